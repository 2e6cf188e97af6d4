"""The separable projection is the dense one whose matrix is a Kronecker product, at a fraction of weights and cost."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import Linear, Separable, TokenGrid
from longseq.attention.projection import LinearProjection, resample_columns
from longseq.attention.separable import SeparableProjection

GRIDS = [((4, 6), 12), ((8, 4), 7), ((4, 6), 24), ((5, 5), 4)]


def dense(layer: SeparableProjection) -> torch.Tensor:
    """The full matrix E, (h, k, n)."""
    E_y, E_x = layer.along_rows.detach(), layer.along_columns.detach()
    if layer.commutes:
        E_y, E_x = E_y[None], E_x[None]
    product = torch.stack([torch.kron(rows, columns) for rows, columns in zip(E_y, E_x, strict=True)])
    if layer.of_prefix is None:
        return product
    return torch.cat([layer.of_prefix.detach().reshape(len(product), product.shape[1], -1), product], dim=-1)


@pytest.mark.parametrize(("size", "k"), GRIDS, ids=str)
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("heads", [None, 4])
def test_it_equals_the_dense_kronecker_product(size: tuple[int, int], k: int, prefix: int, heads: int | None) -> None:
    torch.manual_seed(0)
    grid = TokenGrid(size, prefix)
    if k == 24:
        assert Separable().slots(grid, k) == size
    layer = Separable().build(grid, k, 8, heads).double()
    tokens = torch.randn(2, grid.num_tokens, 8, dtype=torch.float64)
    by_head = tokens.unflatten(-1, (heads or 1, -1)).transpose(1, 2)
    expected = (dense(layer) @ by_head).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(tokens), expected, rtol=1e-10, atol=1e-10)
    assert layer(tokens).shape == (2, k, 8)


@pytest.mark.parametrize("count", [1, 5, 9, 24])
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_shorter_sequence_meets_its_first_columns_and_absent_tokens_count_nothing(count: int, prefix: int) -> None:
    grid = TokenGrid((4, 6), prefix)
    layer = Separable().build(grid, 12, 8).double()
    tokens = torch.randn(1, prefix + count, 8, dtype=torch.float64)
    present = torch.ones(1, prefix + count, 1, dtype=torch.bool)
    expected = dense(layer)[0][:, : prefix + count] @ tokens
    torch.testing.assert_close(layer(tokens, present), expected, rtol=1e-10, atol=1e-10)
    present[:, -1] = False
    torch.testing.assert_close(
        layer(tokens, present), dense(layer)[0][:, : prefix + count - 1] @ tokens[:, :-1], rtol=1e-10, atol=1e-10
    )


def test_a_million_pixels_need_32_thousand_weights_and_a_sixteenth_of_the_product() -> None:
    grid = TokenGrid((1024, 1024))
    with torch.device("meta"):
        layer = Separable().build(grid, 256, 8)
    assert sum(weight.numel() for weight in layer.parameters()) == 32_768
    with FlopCounterMode(display=False) as counter:
        assert layer(torch.empty(1, grid.num_tokens, 8, device="meta")).shape == (1, 256, 8)
    of_dense = 2 * 256 * grid.num_tokens * 8
    assert of_dense / 16 <= counter.get_total_flops() < 1.02 * of_dense / 16


@pytest.mark.parametrize("size", [(12, 1), (1, 12)])
def test_of_tokens_in_one_line_it_is_the_linear_one(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours = Separable().build(TokenGrid(size), 5, 8)
    torch.manual_seed(0)
    assert isinstance(ours, LinearProjection)
    assert torch.equal(ours.weight, Linear().build(TokenGrid(size), 5, 8).weight)


def test_its_entries_start_with_the_variance_of_a_dense_start() -> None:
    torch.manual_seed(0)
    layer = Separable().build(TokenGrid((40, 50)), 400, 8)
    assert dense(layer).var().item() == pytest.approx(1 / 2000, rel=0.2)


def test_the_mean_start_is_that_of_windows_that_tile_the_grid() -> None:
    grid = TokenGrid((8, 8))
    layer = Separable(start="mean").build(grid, 16, 8)
    torch.testing.assert_close(dense(layer)[0], grid.window_means(16))
    with_prefix = dense(Separable(start="mean").build(TokenGrid((8, 8), 2), 16, 8))[0]
    torch.testing.assert_close(with_prefix, torch.cat([torch.zeros(16, 2), dense(layer)[0]], dim=1))


@pytest.mark.parametrize(("old", "new"), [((4, 6), (8, 12)), ((8, 8), (6, 5)), ((4, 6), (9, 6))])
def test_carried_to_another_grid_it_is_the_carried_dense_matrix(old: tuple[int, int], new: tuple[int, int]) -> None:
    torch.manual_seed(0)
    before, after = TokenGrid(old, 1), TokenGrid(new, 1)
    trained, ours = (Separable().build(grid, 4, 8).double() for grid in (before, after))
    ours.carry(trained, before, after)
    expected = resample_columns(dense(trained), before, after)
    torch.testing.assert_close(dense(ours), expected, rtol=1e-9, atol=1e-9)


def test_slots_are_as_square_as_fits_or_as_asked_for() -> None:
    assert Separable().slots(TokenGrid((32, 32)), 256) == (16, 16)
    assert Separable().slots(TokenGrid((26, 4)), 32) == (8, 4)
    assert Separable(rows=2).slots(TokenGrid((32, 32)), 32) == (2, 16)
    with pytest.raises(ValueError, match=r"^k must give rows times columns within 8 x 8, got k 11; 10 does$"):
        Separable().build(TokenGrid((8, 8)), 11, 8)
    with pytest.raises(ValueError, match=r"^rows must give .* 8 x 8, got k 16 and rows 3; leave rows out$"):
        Separable(rows=3).build(TokenGrid((8, 8)), 16, 8)
