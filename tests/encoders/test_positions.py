"""How a token gets its position."""

import inspect
import math

import pytest
import torch

from longseq import ImageEncoder, SpectrogramEncoder, Verma, resize
from longseq.attention.grid import TokenGrid
from longseq.encoders import Conv2d, Sizes
from longseq.encoders.positions import sincos

SMALL = {"dim": 16, "depth": 1, "heads": 2}


def test_waves_are_those_of_the_formula() -> None:
    table = sincos(TokenGrid((3, 5), 1), 16)[0]
    assert torch.equal(table[0], torch.zeros(16))
    for y in range(3):
        for x in range(5):
            expected = [
                wave(place * 10_000 ** (-channel / 4))
                for place in (y, x)
                for wave in (math.sin, math.cos)
                for channel in range(4)
            ]
            torch.testing.assert_close(table[1 + 5 * y + x], torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(7, 1), (1, 7)])
def test_tokens_in_one_line_have_all_channels(size: tuple[int, int]) -> None:
    table = sincos(TokenGrid(size), 8)[0]
    for place in range(7):
        angles = [place * 10_000 ** (-channel / 4) for channel in range(4)]
        expected = torch.tensor([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
        torch.testing.assert_close(table[place], expected, rtol=1e-5, atol=1e-6)


def test_places_are_told_apart_also_where_half_the_channels_are_odd() -> None:
    table = sincos(TokenGrid((32, 32)), 18)[0]
    assert table.shape == (1024, 18)
    assert (torch.cdist(table, table) + 9 * torch.eye(1024)).min() > 1e-3


@pytest.mark.parametrize("dim", [2, 6, 7])
def test_rows_and_columns_have_half_of_the_channels_each(dim: int) -> None:
    table = sincos(TokenGrid((5, 5)), dim)[0].unflatten(0, (5, 5))
    by_row, by_column = ((table.roll(1, axis) != table).flatten(0, 1).any(0) for axis in (0, 1))
    assert by_row.sum() == -(-dim // 2)
    assert torch.equal(by_column, ~by_row)


def test_fixed_waves_are_no_weight_and_are_saved() -> None:
    encoder = ImageEncoder((1, 8, 8), Verma(), positions="sincos", **SMALL)
    assert "trunk.pos_embed" not in dict(encoder.named_parameters())
    assert torch.equal(encoder.state_dict()["trunk.pos_embed"], sincos(TokenGrid((8, 8)), 16))
    assert resize(encoder, (1, 16, 16)).trunk.pos_embed.shape == (1, 256, 16)


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_without_positions_tokens_are_a_set_until_local_mixing_sees_edges(pool: str) -> None:
    torch.manual_seed(0)
    images = torch.rand(2, 1, 8, 8)
    shuffled = images.flatten(2)[..., torch.randperm(64)].view(2, 1, 8, 8)
    encoder = ImageEncoder((1, 8, 8), Verma(), positions="none", pool=pool, **SMALL).eval()
    assert "trunk.pos_embed" not in encoder.state_dict()
    torch.testing.assert_close(encoder(images), encoder(shuffled), rtol=1e-4, atol=1e-5)
    mixing = ImageEncoder((1, 8, 8), Verma(), positions="none", pool=pool, local=Conv2d(), **SMALL).eval()
    torch.nn.init.normal_(mixing.trunk.blocks[0].local1.convolution.weight)
    assert (mixing(images) - mixing(shuffled)).abs().max() > 1e-2


def test_sounds_have_them_too_and_other_words_are_refused() -> None:
    for positions in ("learned", "sincos", "none"):
        encoder = SpectrogramEncoder(8000, 0.2, Verma(), num_mels=16, positions=positions, **SMALL)
        assert encoder(torch.randn(2, 1600)).isfinite().all()
        assert resize(encoder, seconds=0.4).positions == positions
    without_type_check = inspect.unwrap(Sizes.__init__)
    with pytest.raises(ValueError, match="^positions must be learned, sincos, clock or none, got 'rope'"):
        without_type_check(Sizes(), positions="rope")
