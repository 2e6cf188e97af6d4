"""Windows that reach over all tokens, or nearly so, are softmax attention at no more than its cost."""

import pytest
import torch
from timm.layers.attention import Attention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import Longformer, Mechanism, Softmax, SparseTransformer, TokenGrid, TransformerLS
from longseq.attention.layer import AttentionLayer

D, H = 12, 2


def layer_of(mechanism: Mechanism, grid: TokenGrid) -> AttentionLayer:
    torch.manual_seed(0)
    (layer,) = mechanism.layers([Attention(D, H, qkv_bias=True)], grid)
    return layer.double().eval()  # type: ignore[return-value]


def flops(mechanism: Mechanism, grid: TokenGrid) -> int:
    layer = layer_of(mechanism, grid).to("meta")
    x = torch.empty(1, grid.num_tokens, D, device="meta", dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops()


EVERYTHING = [
    (Longformer(), (35, 1)), (Longformer(68), (35, 1)), (Longformer(grid=True), (7, 5)),
    (Longformer(12, grid=True), (7, 5)), (SparseTransformer(stride=512), (7, 5)),
    (SparseTransformer("fixed", stride=512, last=1), (7, 5)), (SparseTransformer(stride=36, factors="heads"), (7, 5)),
]  # fmt: skip


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(("mechanism", "size"), EVERYTHING[:-1], ids=str)
def test_a_window_of_all_tokens_is_softmax_attention(mechanism: Mechanism, size: tuple, prefix: int) -> None:
    grid = TokenGrid(size, prefix)
    ours, theirs = layer_of(mechanism, grid), layer_of(Softmax(), grid)
    x = torch.randn(2, grid.num_tokens, D, dtype=torch.float64, requires_grad=True)
    present = torch.arange(grid.num_tokens) < torch.tensor([[grid.num_tokens], [11]])
    outcomes = [layer(x, present[:, None, None])[present] for layer in (ours, theirs)]
    torch.testing.assert_close(*outcomes, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(outcomes[0])
    torch.testing.assert_close(
        *(torch.autograd.grad(outcome, x, cotangent)[0] for outcome in outcomes), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("mechanism", "size"),
    [*EVERYTHING, (Longformer(24), (35, 1)), (Longformer(6, grid=True), (7, 5)), (Longformer(6, grid=True), (4, 64))],
    ids=str,
)
def test_windows_cost_no_more_than_attention_to_all_tokens(mechanism: Mechanism, size: tuple) -> None:
    grid = TokenGrid(size)
    assert flops(mechanism, grid) <= 1.02 * flops(Softmax(), grid)


@pytest.mark.parametrize("window", [4, 5, 64])
def test_windows_and_summaries_cost_no_more_than_attention_to_all_tokens_and_summaries(window: int) -> None:
    grid, k = TokenGrid((8, 8)), 3
    n, mechanism = grid.num_tokens, TransformerLS(k, window, grid=True)
    of_summaries = 2 * n * k * H * D + 4 * n * k * D + 4 * n * k * D
    assert flops(mechanism, grid) <= flops(Softmax(), grid) + of_summaries


class Float32Norm(nn.LayerNorm):
    """What autocast makes of a norm on CUDA."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", [Longformer(4), SparseTransformer(stride=6), TransformerLS(7, 4)], ids=repr)
def test_norms_of_queries_that_are_float32_under_autocast_do_no_harm(mechanism: Mechanism, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    trained = Attention(D, H, qkv_bias=True, qk_norm=True, norm_layer=Float32Norm)
    layer = mechanism.layers([trained], TokenGrid((8, 8), 1))[0].eval()
    x = torch.randn(2, 65, D)
    with torch.no_grad():
        expected = layer(x)
        with torch.autocast("cpu", dtype=dtype):
            result = layer(x)
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.02)
