"""The Triton kernels, without a GPU: run by Triton's interpreter, and compiled for an H100."""

import ast
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import Tensor

from longseq.attention import few_keys
from longseq.attention.column_softmax import column_softmax

pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", int: "i32"}


def test_triton_interprets_the_kernels_and_their_tests_pass(tmp_path: Path) -> None:
    """A process of its own, because Triton decides whether it interprets when it is imported."""
    script = Path(__file__).with_name("kernels_interpreted.py")
    functions = {part.name for part in ast.parse(script.read_text()).body if isinstance(part, ast.FunctionDef)}
    done = forked.run(script, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert functions - set(names) == {
        "with_widened_bfloat16",
        "drawn",
        "leaves",
        "attend",
        "formula",
        "assert_near",
        "compare",
    }


@pytest.mark.thorough
def test_the_script_that_times_them_runs_in_the_interpreter(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks/few_keys.py"
    done = forked.run(script, "--device", "cpu", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" right ") == 2 and done.stdout.count(" sweep ") == 2
    assert not any(word in done.stdout for word in ("WRONG", "NOT DETERMINISTIC", "FAILED"))


class CompiledInstead:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any, shared_memory: list[int]) -> None:
        self.kernel, self.shared_memory = kernel, shared_memory

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self.compile

    def compile(self, *arguments: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget

        given = dict(zip(self.kernel.arg_names, arguments, strict=False))
        kinds = {name: value.dtype if isinstance(value, Tensor) else type(value) for name, value in given.items()}
        signature = {name: TYPES[kind] for name, kind in kinds.items()} | dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(self.kernel, signature, constants)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        made: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert "cubin" in made.asm
        self.shared_memory.append(made.metadata.shared)


def compiled_by(module: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> list[int]:
    """The shared memory of the kernels that the next launches compile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    shared_memory: list[int] = []
    for name in names:
        monkeypatch.setattr(module, name, CompiledInstead(getattr(module, name), shared_memory))
    return shared_memory


@pytest.mark.parametrize(
    ("k", "memory"), [(128, 232448), (128, 166912), pytest.param(200, 232448, marks=pytest.mark.thorough)]
)
def test_attention_to_few_keys_compiles_and_needs_no_more_shared_memory_than_is_expected(
    k: int, memory: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On an H100, and with the shared memory of an A100."""
    from longseq.attention import _few_keys_kernels

    monkeypatch.setattr(few_keys, "_shared_memory_of", lambda index: memory)
    settings = few_keys.settings_for(torch.bfloat16, 64, k, True, memory)
    shared_memory = compiled_by(_few_keys_kernels, monkeypatch, tmp_path, "attend", "attend_backward")
    queries, grad = (torch.zeros(2, 2, 999, 64, dtype=torch.bfloat16) for _ in range(2))
    keys, values = (torch.zeros(2, 2, k, 64, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.ones(2, 1, 1, k, dtype=torch.bool)
    few_keys.few_keys(queries, keys, values, mask)
    few_keys.few_keys_backward(grad, queries, keys, values, mask)
    assert len(shared_memory) == 2
    assert 0 < max(shared_memory) <= few_keys._shared_memory(settings, torch.bfloat16, 64, k) <= memory


def test_softmax_over_tokens_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from longseq.attention import _column_kernels

    shared_memory = compiled_by(_column_kernels, monkeypatch, tmp_path, "column_sums", "column_weights")
    column_softmax(torch.zeros(2, 9999, 200, dtype=torch.bfloat16))
    assert len(shared_memory) == 2
