"""When attention to few keys is computed by its own kernel. test_triton_kernels.py tests the kernel itself."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import DEVICE, fake_gpu
from torch import Tensor

from longseq.attention import few_keys
from longseq.attention.few_keys import suits_few_keys
from longseq.attention.heads import Heads
from longseq.attention.layer import softmax_formula

BF16, H100 = torch.bfloat16, 232448


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(few_keys, "HAS_TRITON", True)
    monkeypatch.setattr(few_keys, "_shared_memory_of", lambda index: H100)
    with fake_gpu():
        yield


def heads(n: int = 4096, k: int = 128, c: int = 64, dtype: torch.dtype = BF16, device=DEVICE, **others) -> Heads:
    queries = torch.empty(2, n, 3, c, dtype=dtype, device=device).transpose(1, 2)
    keys, values = (torch.empty(2, k, 3, c, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    return Heads(queries, keys, values, **others)


def mask_of(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.bool, device=DEVICE)


def test_it_is_for_many_queries_of_few_keys_on_a_gpu(gpu: None) -> None:
    assert suits_few_keys(heads())
    assert suits_few_keys(heads(dtype=torch.float16)) and suits_few_keys(heads(k=256)) and suits_few_keys(heads(k=1))
    assert suits_few_keys(heads(c=48)) and suits_few_keys(heads(k=128, c=128))
    assert suits_few_keys(heads(key_mask=mask_of(2, 1, 1, 128))) and suits_few_keys(
        heads(key_mask=mask_of(1, 1, 1, 128))
    )


@pytest.mark.parametrize(
    "other",
    [
        {"device": torch.device("cpu")},
        {"k": 257},
        {"n": 300},
        {"c": 8},
        {"c": 160},
        {"k": 256, "c": 128},
        {"dtype": torch.float64},
        {"dropout": 0.1},
    ],
    ids=str,
)
def test_other_heads_are_computed_by_torch(gpu: None, other: dict) -> None:
    assert not suits_few_keys(heads(**other))


def test_keys_and_values_of_other_shapes_are_torchs(gpu: None) -> None:
    given = heads()
    assert not suits_few_keys(given._replace(keys=given.keys[:1], values=given.values[:1]))
    assert not suits_few_keys(given._replace(values=given.values[..., :32]))


def test_a_mask_for_each_query_is_torchs(gpu: None) -> None:
    assert not suits_few_keys(heads(key_mask=mask_of(2, 1, 4096, 128)))


def test_types_that_differ_are_torchs_unless_autocast_makes_them_one(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = heads(dtype=torch.float32)._replace(keys=heads().keys)
    assert not suits_few_keys(mixed)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: BF16)
    assert suits_few_keys(mixed)


def test_float32_is_torchs_unless_tf32_is_allowed(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not suits_few_keys(heads(dtype=torch.float32))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert suits_few_keys(heads(dtype=torch.float32, k=64))
    assert not suits_few_keys(heads(dtype=torch.float32, k=256))  # more shared memory than a program may have


@pytest.mark.parametrize(("name", "value"), [("HAS_TRITON", False), ("_shared_memory_of", lambda index: 101376)])
def test_without_triton_or_on_a_gpu_with_little_shared_memory_torchs_kernel_is_used(
    gpu: None, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(few_keys, name, value)
    assert not suits_few_keys(heads())


def test_transforms_and_forward_derivatives_are_torchs(gpu: None) -> None:
    suits: list[bool] = []
    torch.func.vmap(lambda queries: suits.append(suits_few_keys(heads())) or queries)(torch.zeros(2))
    with torch.autograd.forward_ad.dual_level():
        suits.append(suits_few_keys(heads()))
    assert suits == [False, False]


def test_the_formula_calls_it_with_heads_as_they_lie(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = heads()._replace(keys=heads().keys.requires_grad_())
    result = softmax_formula(given)
    assert "few_keys" in type(result.grad_fn).__name__
    assert result.shape == given.queries.shape and result.stride() == given.queries.stride()
    monkeypatch.setattr(few_keys, "HAS_TRITON", False)
    assert "few_keys" not in type(softmax_formula(given).grad_fn).__name__


def test_the_shared_memory_of_a_gpu_is_a_constant_under_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compiled = torch.compile(lambda x: x * (few_keys._shared_memory_of(0) + 1), backend="eager", fullgraph=True)
    assert compiled(torch.tensor(3.0)) == 3.0


def test_an_exported_program_contains_torchs_attention(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program must run without longseq."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not suits_few_keys(heads())


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_a_gpu_without_bfloat16_keeps_torchs_kernel(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    properties = SimpleNamespace(shared_memory_per_block_optin=H100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert few_keys._shared_memory_of(0) == (H100 if capability >= (8, 0) else 0)
