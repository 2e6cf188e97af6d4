"""Attention by features of queries and keys, against implementations that no one here wrote."""

import pytest
import torch
import torch.nn.functional as F
from performer_pytorch.performer_pytorch import generalized_kernel, linear_attention
from torch import Tensor

from longseq.attention.others.linear_transformer import linear_formula

B, H, N, C = 2, 3, 50, 8


def queries_keys_values(scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    return [scale * torch.randn(B, H, N, C, dtype=torch.float64).requires_grad_() for _ in range(3)]


def assert_equal_with_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(theirs, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_the_linear_transformer_is_performer_pytorchs_linear_attention_with_elu_plus_one() -> None:
    inputs = queries_keys_values()
    features = [
        generalized_kernel(x, projection_matrix=None, kernel_fn=F.elu, kernel_epsilon=1.0, normalize_data=False)
        for x in inputs[:2]
    ]
    assert_equal_with_gradients(linear_formula(*inputs, None, None, 0.0), linear_attention(*features, inputs[2]), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_far_below_zero_give_a_finite_mean_of_the_values(dtype: torch.dtype) -> None:
    queries, keys, values = (x.detach().to(dtype) for x in queries_keys_values())
    found = linear_formula(queries - 30, keys - 30, values, None, None, 0.0)
    assert found.isfinite().all() and found.abs().max() > 0.1
    assert (found <= values.amax(-2, keepdim=True) + 0.05).all()
    assert not linear_formula(queries - 1000, keys, values, None, None, 0.0).isnan().any()
