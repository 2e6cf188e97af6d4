"""Softmax over tokens as a GPU computes it: torch's values and gradients, on a CPU."""

import pytest
import torch
from fake_gpu import DEVICE, fake_gpu

from longseq.attention import column_softmax, mixer
from longseq.attention.column_softmax import ColumnSoftmax, suits_columns


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_values_and_gradients_are_torchs(dim: int) -> None:
    torch.manual_seed(0)
    scores = 5 * torch.randn(3, 7, 4, 2, dtype=torch.float64)
    scores[0, 1, 1, 1] = -float("inf")
    own, torchs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    weights, expected = ColumnSoftmax.apply(own, dim), torchs.softmax(dim)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-15)
    for result in (weights, expected):
        (result * torch.arange(result.numel()).view_as(result)).sum().backward()
    torch.testing.assert_close(own.grad, torchs.grad, rtol=0, atol=1e-12)


def test_second_derivatives_are_torchs() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ColumnSoftmax.apply(x, 1), scores)


def test_in_bfloat16_it_adds_in_float32() -> None:
    torch.manual_seed(0)
    scores = (5 * torch.randn(1, 5000, 8)).bfloat16()
    torch.testing.assert_close(ColumnSoftmax.apply(scores, 1), scores.softmax(1), rtol=2**-7, atol=0)


def test_it_is_for_many_tokens_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(1, 5000, 8)
    assert not suits_columns(scores, 1)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert suits_columns(scores, 1) and suits_columns(scores, -2)
    assert not suits_columns(scores, -1) and not suits_columns(scores, 2) and not suits_columns(scores[:, :2000], 1)
    taken: list[int] = []
    monkeypatch.setattr(mixer.ColumnSoftmax, "apply", lambda scores, dim: taken.append(dim) or scores)
    mixer.own_softmax(scores, 1)
    assert taken == [1]


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "has_triton", "is_kernel"),
    [
        ((1, 5000, 8), 1, torch.bfloat16, True, True),
        ((2, 3, 5000, 8), -2, torch.float32, True, True),
        ((1, 5000, 8), 1, torch.float32, False, False),
        ((1, 5000, 8), 1, torch.float64, True, False),
        ((5000, 3, 8), 0, torch.float32, True, False),
    ],
)
def test_on_a_gpu_with_triton_it_is_a_kernel(
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    has_triton: bool,
    is_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(column_softmax, "HAS_TRITON", has_triton)
    kernel, given = column_softmax.column_softmax, []
    monkeypatch.setattr(column_softmax, "column_softmax", lambda scores: given.append(scores) or kernel(scores))
    with fake_gpu():
        weights = mixer.own_softmax(torch.empty(shape, dtype=dtype, device=DEVICE), dim)
    assert weights.shape == shape and weights.dtype == dtype and weights.device == DEVICE
    assert len(given) == is_kernel
