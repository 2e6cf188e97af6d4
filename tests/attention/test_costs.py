"""The formulas of docs/attention.md for the FLOPs of a layer are those that torch counts, at two lengths."""

from collections.abc import Callable
from math import log2

import pytest
import torch
from timm.layers.attention import Attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import (
    LRU,
    LSTM,
    S4,
    S4D,
    Blockwise,
    EfficientAttention,
    LinearTransformer,
    LongConv,
    Longformer,
    Mamba,
    Mamba2,
    Mechanism,
    NoAttention,
    Nystromformer,
    Performer,
    SparseTransformer,
    StaticMixing,
    TokenGrid,
    TransformerLS,
)
from longseq.attention.others.fourier import FFT_FLOPS

D, H = 32, 4
C, K, M, N, G = D // H, 16, 13, 24, 2  # channels, landmarks or summaries, features, states, prefix tokens

# columns and prefix tokens of the grid, and the formula beside 8 n d^2 for queries, keys, values and output
ATTENTION: list[tuple[Mechanism, int, int, Callable[[int], float]]] = [
    (Blockwise(4), 1, 0, lambda n: 4 * n * n / 4 * D),
    (EfficientAttention(), 1, 0, lambda n: 4 * D**2 * C),
    (EfficientAttention("scaling"), 1, 0, lambda n: 4 * n * D * C),
    (LinearTransformer(), 1, 0, lambda n: 4 * n * D * C),
    (Performer(M), 1, 0, lambda n: 8 * n * M * D),
    (Nystromformer(K), 1, 0, lambda n: 8 * n * K * D + 48 * K**3 * H),
    (TransformerLS(K, 4), 1, 0, lambda n: 2 * n * K * H * D + 8 * n * K * D + 8 * n * 4 * D),
    (TransformerLS(K, 4, grid=True), 16, 0, lambda n: 2 * n * K * H * D + 8 * n * K * D + 16 * n * 4**2 * D),
    (Longformer(8), 1, G, lambda n: 6 * n * 8 * D + 8 * n * G * D + 6 * n * D**2),
    (Longformer(4, grid=True), 16, 0, lambda n: 9 * n * 4**2 * D),
    (SparseTransformer(stride=16), 1, 0, lambda n: 12 * n * 16 * D + 4 * n * n / 16 * D),
    (SparseTransformer("fixed", stride=16, last=4), 1, 0, lambda n: 4 * n * 16 * D + 4 * n * n / 16 * 4 * D),
]
OTHERS: list[tuple[Mechanism, int, int, Callable[[int], float]]] = [
    (S4D(N), 1, 0, lambda n: 4 * n * D**2 + 15 * n * D * log2(2 * n) + 4 * n * D * N),
    (LongConv(), 1, 0, lambda n: 4 * n * D**2 + 15 * n * D * log2(2 * n)),
    (NoAttention(), 1, 0, lambda n: 4 * n * D**2),
    (StaticMixing(K), 1, 0, lambda n: 2 * n * D**2 + 2 * K * D**2 + 4 * n * K * D),
    (LSTM(), 1, 0, lambda n: 14 * n * D**2),
    (LRU(N), 1, 0, lambda n: 4 * n * D**2 + 12 * n * D * N + 40 * n * N * log2(2 * n)),
    (
        S4(N),
        1,
        0,
        lambda n: (
            4 * n * D**2 + 15 * n * D * log2(2 * n) + 4 * n * D * N + 2 * D * N**3 * log2(n) + 6 * n**0.5 * D * N**2
        ),
    ),
    (Mamba(N), 1, 0, lambda n: 4 * n * (6 * D**2 + 4 * D * (2 + N) + 2 * D * N)),
    (Mamba2(N), 1, 0, lambda n: 2 * n * (12 * D**2 + 4 * D * N + 128 * (N + 2 * D) + 8 * D * N)),
]


@pytest.mark.parametrize("n", [1024, 4096])
@pytest.mark.parametrize(
    ("mechanism", "columns", "prefix", "formula", "of_maps"),
    [(*case, 8 * D**2) for case in ATTENTION] + [(*case, 0) for case in OTHERS],
    ids=lambda value: repr(value) if isinstance(value, Mechanism) else "",
)
def test_the_counted_flops_are_those_of_the_formula(
    mechanism: Mechanism, columns: int, prefix: int, formula: Callable[[int], float], of_maps: int, n: int
) -> None:
    """Formulas leave out row sums, and convolutions over a few tokens: up to 4 % of a layer as narrow as this one."""
    (layer,) = mechanism.layers([Attention(D, H)], TokenGrid((n // columns, columns), prefix))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=FFT_FLOPS) as counter:
        layer.to("meta")(torch.empty(1, n + prefix, D, device="meta"))
    expected = of_maps * (n + prefix) + formula(n + prefix)
    assert 0.999 * expected <= counter.get_total_flops() <= 1.04 * expected
