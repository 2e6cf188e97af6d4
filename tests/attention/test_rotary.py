"""Rotary positions: products depend on how far apart two tokens are, and on nothing else."""

import pytest
import torch

from longseq.arguments import ArgumentError
from longseq.attention import Softmax
from longseq.attention.grid import TokenGrid
from longseq.attention.rotary import Rotary
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.encoders.forward_pass import encode


@pytest.mark.parametrize(
    "grid", [TokenGrid((6, 5)), TokenGrid((12, 1)), TokenGrid((1, 12)), TokenGrid((4, 4), 2)], ids=str
)
def test_a_product_depends_on_the_distance_alone(grid: TokenGrid) -> None:
    rotary = Rotary(grid, 8)
    query, key = torch.randn(8), torch.randn(8)
    turned_queries, turned_keys = (rotary(x.expand(1, 1, grid.num_tokens, 8))[0, 0] for x in (query, key))
    scores = (turned_queries @ turned_keys.T)[grid.num_prefix_tokens :, grid.num_prefix_tokens :]
    height, width = grid.size
    by_place = scores.reshape(height, width, height, width)
    by_distance: dict[tuple[int, int], float] = {}
    for a in range(height):
        for b in range(width):
            for c in range(height):
                for d in range(width):
                    score = float(by_place[a, b, c, d])
                    assert by_distance.setdefault((a - c, b - d), score) == pytest.approx(score, abs=1e-4)
    assert len({round(score, 4) for score in by_distance.values()}) > len(by_distance) / 2
    torch.testing.assert_close(turned_keys.norm(dim=1), key.norm().expand(grid.num_tokens))
    torch.testing.assert_close(turned_keys[: grid.num_prefix_tokens], key.expand(grid.num_prefix_tokens, -1))


def test_pairs_turn_as_complex_numbers_do() -> None:
    """Places on a line, rates 1 and 1/100 for two pairs; the fifth channel is left over."""
    x = torch.randn(1, 1, 7, 5, dtype=torch.float64)
    numbers = torch.complex(x[..., :2], x[..., 2:4])
    angles = torch.outer(torch.arange(7, dtype=torch.float64), torch.tensor([1.0, 0.01], dtype=torch.float64))
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag, x[..., 4:]], dim=-1)
    torch.testing.assert_close(Rotary(TokenGrid((7, 1)), 5)(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("grid", [TokenGrid((3000, 1), 1), TokenGrid((64, 64))], ids=str)
def test_angles_are_in_float32_whatever_torchs_default_is(grid: TokenGrid) -> None:
    x = torch.randn(1, 1, grid.num_tokens, 32)
    expected = Rotary(grid, 32)(x)
    torch.set_default_dtype(torch.bfloat16)  # as Lightning's bf16-true does
    try:
        outcome = Rotary(grid, 32)(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(outcome, expected)


def test_a_line_of_tokens_may_be_longer_and_a_grid_may_not() -> None:
    line = Rotary(TokenGrid((5, 1)), 4)
    x = torch.randn(1, 1, 9, 4)
    torch.testing.assert_close(line(x), Rotary(TokenGrid((9, 1)), 4)(x))
    with pytest.raises(ArgumentError, match="rotary must be false for more tokens than the 4 of the grid, got 9"):
        Rotary(TokenGrid((2, 2)), 4)(x)


def test_the_order_of_frames_counts_without_position_embeddings() -> None:
    common = {"num_mels": 20, "dim": 16, "depth": 2, "heads": 4, "positions": "none"}
    turned = SpectrogramEncoder(8000, 0.4, Softmax(rotary=True), **common)
    plain = SpectrogramEncoder(8000, 0.4, Softmax(), **common)
    for weight in (*turned.parameters(), *plain.parameters()):
        torch.nn.init.normal_(weight, std=0.5)  # at the start all tokens get nearly the same weight
    picture = torch.randn(1, 1, 41, 20)
    for encoder in (turned.eval(), plain.eval()):
        forwards, backwards = (encode(encoder.trunk, image) for image in (picture, picture.flip(2)))
        assert torch.allclose(forwards, backwards, atol=1e-3) == (encoder is plain)


def test_a_model_for_any_length_refuses_them() -> None:
    with pytest.raises(ArgumentError, match="must take sequences of any length, but Softmax is bound to one"):
        SpectrogramEncoder(8000, 0.4, Softmax(rotary=True), positions="none", any_length=True)


def test_a_head_of_too_few_channels_is_refused() -> None:
    with pytest.raises(ArgumentError, match="rotary must be false for heads of 2 channels, got true; it needs 4"):
        ImageEncoder((1, 4, 4), Softmax(rotary=True), dim=8, depth=1, heads=4)
