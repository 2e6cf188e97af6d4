"""A stem computes a small ResNet, and padding changes nothing in it, in a training either."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from longseq import ImageEncoder, Linformer, SpectrogramEncoder, Verma
from longseq.encoders import Residual
from longseq.encoders.stem import RaggedBatchNorm
from longseq.tasks import Masked
from longseq.training import Classifier

SMALL = {"dim": 16, "depth": 1, "heads": 2}


class Block(nn.Module):
    """ResNet's basic block, written as its paper draws it."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.c, self.d = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.e, self.f = nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.d(self.c(F.relu(self.b(self.a(x))))) + self.f(self.e(x)))


@pytest.mark.parametrize("is_training", [True, False])
def test_the_stem_is_a_convolution_and_resnets_blocks(is_training: bool) -> None:
    torch.manual_seed(0)
    ours = Residual([4, 6, 8], [1, 2, 2]).build(3).double().train(is_training)
    theirs = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Block(4, 6, 2), Block(6, 8, 2)
    )
    theirs.double().train(is_training)
    values = list(ours.state_dict().values())
    theirs.load_state_dict(dict(zip(theirs.state_dict(), values, strict=True)))
    pictures = torch.randn(5, 3, 12, 8, dtype=torch.float64)
    assert ours.stride == (4, 4) and ours.width == 8
    torch.testing.assert_close(ours(pictures), theirs(pictures), rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_batch_norm_is_torchs_over_what_is_there_with_its_gradients_and_running_figures() -> None:
    torch.manual_seed(0)
    rows = torch.tensor([7, 1, 4])
    ours, theirs = RaggedBatchNorm(2).double(), nn.BatchNorm1d(2).double()
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        pictures = torch.randn(3, 2, 9, 5, dtype=torch.float64, requires_grad=True)
        there = torch.cat([one[:, :count].flatten(1) for one, count in zip(pictures, rows, strict=True)], dim=1)[None]
        expected, result = theirs(there), ours(pictures, rows)
        joined = torch.cat([one[:, :count].flatten(1) for one, count in zip(result, rows, strict=True)], dim=1)[None]
        torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-12)
        mine, other = (torch.autograd.grad(y.pow(3).sum(), pictures, retain_graph=True)[0] for y in (joined, expected))
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stem", Residual.examples(), ids=repr)
def test_more_padding_changes_nothing_in_a_training_either(stem: Residual) -> None:
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(
        8000, 1.0, Verma(), num_mels=16, tokens=[8, 4], stem=stem, any_length=True, positions="none", **SMALL
    ).double()
    encoder.mean.normal_()
    encoder.measure = lambda batches: None  # type: ignore[method-assign]
    lengths = torch.tensor([1000, 2600, 79])
    waveforms = torch.randn(3, 2600, dtype=torch.float64) * (torch.arange(2600) < lengths[:, None])
    long = {"waveforms": F.pad(waveforms, (0, 3000)), "lengths": lengths}
    short = {"waveforms": waveforms, "lengths": lengths}
    torch.testing.assert_close(encoder(long), encoder(short), rtol=1e-10, atol=1e-10)


def test_a_token_covers_a_patch_of_the_picture_whatever_the_stem() -> None:
    encoder = ImageEncoder((3, 32, 16), Linformer(7), patch_size=8, stem=Residual(), **SMALL)
    assert encoder.num_tokens == 4 * 2
    assert encoder.trunk.patch_embed.proj.weight.shape == (16, 128, 2, 2)


def test_layer_scale_starts_a_block_near_identity() -> None:
    encoder = ImageEncoder((1, 8, 8), Verma(), layer_scale=1e-3, positions="none", **SMALL)
    assert all((scale.gamma == 1e-3).all() for scale in (encoder.trunk.blocks[0].ls1, encoder.trunk.blocks[0].ls2))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"patch_size must be a multiple of the stem's strides, 4 x 4, got a patch of 2"
    ):
        ImageEncoder((3, 32, 32), Verma(), patch_size=2, stem=Residual(), **SMALL)
    with pytest.raises(ValueError, match="strides must be 3 as there are widths"):
        Residual([8, 8, 8], [1, 2])
    with pytest.raises(ValueError, match="widths must be positive"):
        Residual([8, 0], [1, 2])
    with pytest.raises(ValueError, match="layer_scale must be in 0..1, got 2"):
        ImageEncoder((3, 32, 32), Verma(), layer_scale=2, **SMALL)
    encoder = ImageEncoder((3, 32, 32), Verma(), patch_size=4, stem=Residual(), **SMALL)
    with pytest.raises(ValueError, match="task must not be Masked where patches overlap or have a stem"):
        Classifier(encoder, num_classes=2, task=Masked())


def test_gradients_have_the_strides_of_their_weights_else_several_processes_would_warn() -> None:
    stem = Residual().build(3)
    stem(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(weight.grad.stride() == weight.stride() for weight in stem.parameters())


def test_gradients_of_each_sample_by_vmap_are_those_of_each_sample_alone() -> None:
    stem = Residual([4, 6], [1, 2]).build(3).eval()
    weights = dict(stem.named_parameters())

    def loss(weights: dict[str, nn.Parameter], picture: torch.Tensor) -> torch.Tensor:
        return functional_call(stem, weights, (picture[None],)).square().sum()

    pictures = torch.randn(3, 3, 8, 8)
    derivatives = vmap(grad(loss), (None, 0))(weights, pictures)
    for number, picture in enumerate(pictures):
        for name, gradient in grad(loss)(weights, picture).items():
            torch.testing.assert_close(derivatives[name][number], gradient)


def test_a_batch_of_one_picture_that_is_one_place_behind_the_stem_can_be_trained_on() -> None:
    """The last batch of an epoch may hold one small image; torch's BatchNorm would refuse it."""
    torch.manual_seed(0)
    stage = Residual([4, 6], [2, 2]).build(3).train()
    several, one = torch.randn(5, 3, 4, 4), torch.randn(1, 3, 4, 4)
    stage(several)
    before = {name: value.clone() for name, value in stage.named_buffers()}
    stage(one).sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in stage.parameters())
    norms = [name for name, value in stage.named_buffers() if not torch.equal(value, before[name])]
    assert all(".first" in name or name.startswith("stages.0") for name in norms), norms
