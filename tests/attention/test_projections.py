"""What every projection computes, whether it commutes, and how it is carried to another grid of tokens."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from small_vit import vit
from timm.layers.attention import Attention

from longseq import ImageEncoder, SpectrogramEncoder
from longseq.attention import (
    S4D,
    Conv,
    Gaussian,
    Linear,
    Linformer,
    Max,
    Mean,
    Performer,
    Separable,
    SparseTransformer,
    TokenGrid,
    Verma,
    carry,
    plug,
    start_from_inputs,
)
from longseq.attention.examples import every_projection
from longseq.attention.projection import Projection, resample_columns
from longseq.attention.sharing import Sharing
from longseq.contract.projection import OWN, D, H, K, built, tokens
from longseq.contract.promise import Promise


def windows(clip):
    return [clip[start : start + 5] for start in range(0, len(clip), 5)]


def test_mean_and_max_pool_over_windows_of_which_the_last_is_short():
    X = tokens()
    for projection, reduce in ((Mean(), np.mean), (Max(), np.max)):
        expected = [[reduce(window, axis=0) for window in windows(clip)] for clip in X.numpy()]
        torch.testing.assert_close(built(projection)(X), torch.from_numpy(np.array(expected)))


@pytest.mark.parametrize("promise", OWN, ids=lambda promise: promise.test.__name__)
@pytest.mark.parametrize("projection", every_projection(), ids=repr)
def test_every_projection_keeps_every_promise(projection: Projection, promise: Promise) -> None:
    promise(projection)


@pytest.mark.parametrize(("n", "value"), [(8192, 20.0), (140_000, 0.1)])
def test_a_mean_over_more_than_float16_can_hold_is_right(n, value):
    mean = Mean().build(TokenGrid((1, n)), 2, 1)(torch.full((1, n, 1), value, dtype=torch.float16))
    torch.testing.assert_close(mean, torch.full((1, 2, 1), value, dtype=torch.float16))


@pytest.mark.parametrize(("full", "heads", "per_group"), [(False, None, 1), (True, None, D), (True, H, D // H)])
def test_convolution_multiplies_each_window_with_its_kernel(full, heads, per_group):
    X, layer = tokens(), built(Conv(full), heads)
    kernel = layer.convolution.weight.detach().numpy()  # (d, channels of a group, window)
    expected = np.zeros((2, K, D))
    for b, clip in enumerate(X.numpy()):
        for w, window in enumerate(windows(clip)):
            for out in range(D):
                first = out // per_group * per_group
                part = window[:, first : first + per_group]
                expected[b, w, out] = (part.T * kernel[out, :, : len(window)]).sum()
    torch.testing.assert_close(layer(X), torch.from_numpy(expected))


@pytest.mark.parametrize(("n", "k", "count"), [(24, 6, 6), (23, 5, 5), (9, 4, 3), (7, 7, 7), (5, 1, 1)])
def test_there_are_as_many_windows_as_the_stride_leaves(n, k, count):
    """ceil(n / ceil(n / k)): nine tokens in windows of three make three windows, though k is four."""
    assert Mean().build(TokenGrid((1, n)), k, D)(tokens(n)).shape == (2, count, D)


def test_gaussian_is_the_theorems_pair_of_one_fixed_matrix():
    torch.manual_seed(0)
    grid = TokenGrid((32, 32), 1)
    keys, values = Gaussian(delta=0.5).pair(True, grid, 64, D)
    torch.testing.assert_close(values.weight / math.exp(-0.5), keys.weight / 0.5)
    assert (keys.weight / 0.5).std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert not list(keys.parameters())
    assert set(keys.state_dict()) == {"weight"}  # fixed, but a checkpoint must hold it


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(("size", "k"), [((8, 8), 16), ((8, 8), 13), ((6, 10), 7), ((40, 1), 9), ((1, 40), 9)])
def test_the_mean_start_tiles_the_grid_with_k_windows(size, k, prefix):
    grid = TokenGrid(size, prefix)
    E = Linear("mean").build(grid, k + prefix, D).weight.detach()
    torch.testing.assert_close(E.sum(1), torch.ones(k + prefix))
    assert ((E > 0).sum(0) == 1).all()  # every token is in exactly one window
    assert torch.equal(E[:prefix, :prefix], torch.eye(prefix))
    areas = (E[prefix:] > 0).sum(1)
    assert areas.max() <= 3 * areas.min()


def test_the_mean_start_of_a_square_number_is_square_windows():
    E = Linear("mean").build(TokenGrid((8, 8)), 16, D).weight.detach()
    first = (E[0] > 0).view(8, 8).nonzero()
    assert first.amax(0).tolist() == [1, 1]


def test_the_singular_start_is_the_leading_left_singular_vectors_of_the_layers_inputs():
    torch.manual_seed(0)
    model = plug(vit(class_token=False, global_pool="avg"), Linformer(6)).eval()
    images, seen = torch.randn(5, 1, 8, 8), []
    hook = model.blocks[1].attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    start_from_inputs(model, lambda: model(images))
    X = seen[0].transpose(0, 1).flatten(1)
    hook.remove()
    U = torch.linalg.svd(X, full_matrices=False)[0][:, :6]
    E = model.blocks[1].attn.project_keys.weight.detach()
    torch.testing.assert_close((E @ U).abs(), torch.eye(6), atol=1e-3, rtol=0)


def test_the_singular_start_does_not_take_padding_for_tokens():
    torch.manual_seed(0)
    model = SpectrogramEncoder(8000, 0.2, Linformer(4), num_mels=8, dim=8, depth=2, heads=2).eval()
    clips = {"waveforms": torch.randn(5, 1600), "lengths": torch.tensor([1600, 800, 800, 400, 400])}
    clips["waveforms"] *= torch.arange(1600) < clips["lengths"][:, None]
    alone, seen = [], []
    hook = model.trunk.blocks[1].attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    start_from_inputs(model, lambda: model(clips))
    for length in clips["lengths"].tolist():
        tokens = 1 + length // 80
        alone.append(torch.nn.functional.pad(seen[0][len(alone), :tokens], (0, 0, 0, 21 - tokens)))
    hook.remove()
    U = torch.linalg.svd(torch.cat(alone, dim=1), full_matrices=False)[0][:, :4]
    E = model.trunk.blocks[1].attn.project_keys.weight.detach()
    torch.testing.assert_close((E @ U).abs(), torch.eye(4), atol=1e-3, rtol=0)


def test_the_singular_start_has_orthonormal_rows_also_where_the_inputs_have_few_directions():
    model = ImageEncoder(
        (1, 32, 32), Linformer(16, projection=Linear("singular")), dim=16, depth=2, heads=2, positions="none"
    )
    images = torch.rand(2, 1, 32, 32) * 255
    start_from_inputs(model, lambda: model(images))
    for block in model.trunk.blocks:
        E = block.attn.project_keys.weight.double()
        torch.testing.assert_close(E @ E.mT, torch.eye(16).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharing", ["none", "key_value"])
@pytest.mark.parametrize("projection", every_projection(), ids=repr)
def test_with_one_key_every_token_gets_the_one_summary_of_the_values(projection: Projection, sharing: Sharing) -> None:
    """The softmax over one key is 1: k = 1 is the control without any weight that depends on queries and keys."""
    torch.manual_seed(0)
    (layer,) = Linformer(1, sharing, projection).layers([Attention(D, H, qkv_bias=True)], TokenGrid((4, 6)))
    layer, n = layer.double(), 24
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(2, n, D, dtype=torch.float64)
    for length in (n, 15):
        present = (torch.arange(n) < length).expand(2, n)[..., None]
        values = layer.qkv(x)[..., 2 * D :].masked_fill(~present, 0)
        summary = layer.project_values.given(x, present)(values, present)
        y = layer(x, present.mT[:, None])[:, :length]
        torch.testing.assert_close(y, layer.proj(summary).expand(-1, length, -1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (Linear(), "start"), (Separable(), "start"), (Verma(), "normalize"), (Performer(), "kernel"), (S4D(), "start"),
        (SparseTransformer(), "pattern"), (SparseTransformer(), "factors"),
    ],
    ids=str,
)  # fmt: skip
def test_a_word_that_is_no_choice_is_refused_where_no_type_is_checked(made, name):
    other = copy.copy(made)
    object.__setattr__(other, name, "zeros")

    def check() -> None:
        if hasattr(other, "__post_init__"):
            other.__post_init__()
        inspect.unwrap(type(other).layers)(other, [Attention(8, 2)], TokenGrid((4, 4)))

    with pytest.raises(ValueError, match=f"^{name} must be .*'zeros'"):
        check()


def test_an_unknown_start_and_a_delta_of_zero_are_refused():
    with pytest.raises(ValueError, match="^delta must be positive, got nan"):
        Gaussian(float("nan"))
    with pytest.raises(Exception, match="'random', 'mean'.*'singular'|start must be random"):  # beartype checks first
        Linear("zeros")
    with pytest.raises(ValueError, match="delta must be positive, got 0"):
        Gaussian(0.0)


@pytest.mark.parametrize("new", [(16, 16), (4, 4), (8, 12), (8, 8)])
def test_interpolation_keeps_row_sums_and_prefix_columns(new):
    torch.manual_seed(0)
    E = torch.randn(5, 2 + 64, dtype=torch.float64)
    carried = resample_columns(E, TokenGrid((8, 8), 2), TokenGrid(new, 2))
    assert carried.shape == (5, 2 + math.prod(new))
    assert torch.equal(carried[:, :2], E[:, :2])
    torch.testing.assert_close(carried.sum(1), E.sum(1))
    if new == (8, 8):
        assert torch.equal(carried, E)


def test_interpolation_in_two_dimensions_gives_the_same_summary_of_the_same_picture_enlarged():
    """E is a smooth window. Its summary of a smooth picture stays the same if both get twice the pixels per side."""

    def on_grid(size, function):
        axis = (torch.arange(size, dtype=torch.float64) + 0.5) / size
        return function(axis[:, None], axis[None, :])

    def window(y, x):
        return torch.exp(-((y - 0.4) ** 2 + (x - 0.6) ** 2) / 0.05)

    def picture(y, x):
        return torch.sin(3 * y) + torch.cos(4 * x)

    E = on_grid(8, window).view(1, -1)
    carried = resample_columns(E, TokenGrid((8, 8)), TokenGrid((16, 16)))
    small, large = on_grid(8, picture).flatten(), on_grid(16, picture).flatten()
    torch.testing.assert_close(carried @ large, E @ small, rtol=0.02, atol=0)
    assert not torch.allclose(
        E.repeat_interleave(4) / 4 @ large, (E @ small)[0], rtol=0.01
    )  # repeating the columns of E treats the grid as one dimension, which is wrong


@pytest.mark.parametrize(("old", "new", "error"), [(4, 8, 0.06), (6, 4, 0.25), (8, 2, 0.5), (16, 4, 0.5)])
def test_a_convolution_gives_about_the_same_summary_of_the_same_line_enlarged_or_shrunk(old, new, error):
    torch.manual_seed(0)
    line = torch.nn.functional.avg_pool1d(torch.randn(1, 64, old * 8 + 4, dtype=torch.float64), 5, 1)  # smooth
    other = torch.nn.functional.interpolate(line[:, :, None], (1, new * 8), mode="bicubic", antialias=True)[:, :, 0]
    grids = [TokenGrid((8 * window, 1)) for window in (old, new)]
    trained, carried = (Conv().build(grid, 8, 64).double() for grid in grids)
    carried.carry(trained, *grids)
    expected = trained(line.mT)
    assert (carried(other.mT) - expected).norm() < error * expected.norm()


def test_carrying_names_the_projections_that_the_trained_model_lacks():
    fresh = carry(plug(vit(), Linformer(7)), plug(vit(16), Linformer(9)))
    assert fresh == [f"blocks.{i}.attn.project_{what}" for i in range(2) for what in ("keys", "values")]


def test_carrying_refuses_another_width_by_name():
    with pytest.raises(ValueError, match="cls_token must have one shape"):
        carry(plug(vit(dim=32), Linformer(7)), plug(vit(dim=64), Linformer(7)))
