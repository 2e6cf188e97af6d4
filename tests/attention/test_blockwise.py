"""Blockwise attention equals softmax attention with a mask of all pairs for each head, in float64."""

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention import Blockwise, Softmax, TokenGrid
from longseq.attention.layer import AttentionLayer

D = 24


def layer_of(mechanism: Blockwise | Softmax, n: int, heads: int = 6) -> AttentionLayer:
    torch.manual_seed(0)
    (layer,) = mechanism.layers([Attention(D, heads, qkv_bias=True)], TokenGrid((n, 1)))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.double().eval()


def mask_of(shifts: list[int], n: int, size: int) -> Tensor:
    """Whether query i attends to key j in each head, (h, n, n), pair by pair."""
    blocks = -(-n // size)
    mask = torch.zeros(len(shifts), n, n, dtype=torch.bool)
    for head, shift in enumerate(shifts):
        for i in range(n):
            for j in range(n):
                mask[head, i, j] = j // size == (i // size + shift) % blocks
    return mask


# the mechanism, and the shift of each head
CASES = [
    (Blockwise(2), [0, 0, 0, 0, 0, 1]),
    (Blockwise(3), [0, 0, 0, 0, 1, 2]),
    (Blockwise(5), [0, 0, 1, 2, 3, 4]),
    (Blockwise(2, [3, 3]), [0, 0, 0, 1, 1, 1]),
    (Blockwise(4, [1, 0, 2, 3]), [0, 2, 2, 3, 3, 3]),
    (Blockwise(24, [2, 4]), [0, 0, 1, 1, 1, 1]),
    (Blockwise(1), [0, 0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize("n", [24, 23, 7, 1, 60], ids=lambda n: f"n={n}")
@pytest.mark.parametrize(("mechanism", "shifts"), CASES, ids=repr)
def test_values_and_gradients_are_those_of_a_mask_of_all_pairs(mechanism: Blockwise, shifts: list[int], n: int) -> None:
    layer, size = layer_of(mechanism, 24), -(-24 // mechanism.num_blocks)
    x = torch.randn(2, n, D, dtype=torch.float64, requires_grad=True)
    Q, K, V = layer.qkv(x).unflatten(-1, (3, 6, D // 6)).permute(2, 0, 3, 1, 4)
    scores = (Q @ K.mT * (D // 6) ** -0.5).masked_fill(~mask_of(shifts, n, size), -1e300)
    expected = layer.proj((scores.softmax(-1) @ V).transpose(1, 2).flatten(2))
    ours, inputs = layer(x), [x, *layer.parameters()]
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("num_blocks", "counts"), [(1, [12]), (2, [10, 2]), (3, [8, 2, 2])])
def test_twelve_heads_are_shared_out_as_in_the_paper(num_blocks: int, counts: list[int]) -> None:
    assert layer_of(Blockwise(num_blocks), 24, heads=12).formula.heads_of_shifts == counts  # type: ignore[attr-defined]


def test_every_clip_of_a_padded_batch_shifts_by_its_own_blocks() -> None:
    """Clips of one, two and three blocks in one batch: a shift by two is none of them, one of them, or two of them."""
    layer, lengths = layer_of(Blockwise(3), 24), [5, 8, 9, 16, 24]
    batch = torch.randn(len(lengths), 24, D, dtype=torch.float64, requires_grad=True)
    present = torch.arange(24) < torch.tensor(lengths)[:, None]
    padded = layer(batch, present[:, None, None])
    for clip, outcome, length in zip(batch, padded, lengths, strict=True):
        torch.testing.assert_close(outcome[:length], layer(clip[None, :length])[0], rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad(padded[present].sum(), batch)
    assert gradient.isfinite().all() and not gradient[~present].any()


def test_a_gap_changes_no_shift_and_a_block_inside_it_adds_nothing() -> None:
    """Four blocks of six tokens, the second one and a half of the third in a gap."""
    layer, shifts = layer_of(Blockwise(4), 24), [0, 0, 0, 1, 2, 3]
    x, present = torch.randn(2, 24, D, dtype=torch.float64), torch.ones(24, dtype=torch.bool)
    present[6:15] = False
    Q, K, V = layer.qkv(x).unflatten(-1, (3, 6, D // 6)).permute(2, 0, 3, 1, 4)
    seen = mask_of(shifts, 24, 6) & present
    weights = (Q @ K.mT * (D // 6) ** -0.5).masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0)
    expected = layer.proj((weights @ V).transpose(1, 2).flatten(2))
    mask = present[None, None, None].expand(2, 1, 1, 24)
    torch.testing.assert_close(layer(x, mask)[:, present], expected[:, present], rtol=1e-10, atol=1e-10)
    assert layer.bfloat16()(x.bfloat16(), mask).isfinite().all()  # its softmax is another one


def test_one_block_is_softmax() -> None:
    x = torch.randn(2, 24, D, dtype=torch.float64)
    torch.testing.assert_close(layer_of(Blockwise(1), 24)(x), layer_of(Softmax(), 24)(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (Blockwise(0), "num_blocks must be positive, got 0; 2 and 3 are the paper's"),
        (Blockwise(25), "num_blocks must be at most 24 .the tokens., got 25"),
        (
            Blockwise(2, [5, 2]),
            r"heads must be 1 to 2 numbers .* that sum to 6 .the heads., got \[5, 2\]; leave it out",
        ),
        (Blockwise(2, [4, 1, 1]), r"heads must be 1 to 2 numbers .the blocks., .* got \[4, 1, 1\]"),
        (Blockwise(2, [7, -1]), r"heads must be .* 0 or more"),
        (Blockwise(2, []), r"heads must be 1 to 2 numbers"),
    ],
    ids=repr,
)
def test_what_it_cannot_be_is_named(mechanism: Blockwise, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        layer_of(mechanism, 24)
