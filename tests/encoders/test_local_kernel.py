"""When local mixing is computed by its own kernel. local_kernel_interpreted.py tests the kernel itself."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from fake_gpu import DEVICE, fake_gpu
from torch import nn
from torch.nn.utils import parametrize

from longseq.attention.grid import TokenGrid
from longseq.encoders import Conv2d, local, local_kernel
from longseq.encoders.local_kernel import suits_local_kernel


def test_triton_interprets_the_kernels_and_their_tests_pass(tmp_path: Path) -> None:
    """A process of its own, because Triton decides whether it interprets when it is imported."""
    pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
    script = Path(__file__).with_name("local_kernel_interpreted.py")
    names = [ast.unparse(name) for name in ast.parse(script.read_text()).body[-2].value.elts]  # type: ignore[attr-defined]
    assert len(names) > 10
    done = forked.run(script, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names


@pytest.mark.thorough
def test_they_compile_for_an_h100_and_keep_their_numbers_in_registers(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").is_file():
        pytest.skip("Triton's wheel brings no ptxas here")
    done = forked.run(Path(__file__).with_name("compile_local_kernel.py"), cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill stores", done.stdout)]
    assert len(spills) == 6
    assert max(spills) <= 64  # thousands if all taps were read at once


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(local_kernel, "HAS_TRITON", True)
    with fake_gpu():
        yield


def tokens(dtype: torch.dtype = torch.float32, device: torch.device = DEVICE) -> torch.Tensor:
    return torch.empty(2, 30, 16, dtype=dtype, device=device)


def test_it_is_for_a_gpu(gpu: None) -> None:
    assert suits_local_kernel(tokens(), 9)
    assert suits_local_kernel(tokens(torch.bfloat16), 25) and suits_local_kernel(tokens(torch.float16), 1)
    assert not suits_local_kernel(tokens(device=torch.device("cpu")), 9)
    assert not suits_local_kernel(tokens(torch.float64), 9)
    assert not suits_local_kernel(tokens(), 81)


def test_without_triton_it_is_torchs_convolution(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_kernel, "HAS_TRITON", False)
    assert not suits_local_kernel(tokens(), 9)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def hook(convolution: nn.Module) -> None:
    convolution.register_forward_hook(lambda *_: None)


def parametrise(convolution: nn.Module) -> None:
    parametrize.register_parametrization(convolution, "weight", Doubled())


@pytest.mark.parametrize("change", [None, hook, parametrise])
def test_a_convolution_that_something_wraps_is_called(monkeypatch: pytest.MonkeyPatch, change) -> None:
    layer = Conv2d().build(16, TokenGrid((5, 6)))
    if change is not None:
        change(layer.convolution)
    called: list[object] = []
    monkeypatch.setattr(local, "suits_local_kernel", lambda *_: True)
    monkeypatch.setattr(local, "mixed_locally", lambda x, *_: called.append(1) or x)
    layer(torch.randn(2, 30, 16))
    assert bool(called) == (change is None)
