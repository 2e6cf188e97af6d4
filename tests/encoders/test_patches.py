"""The product over patches equals timm's convolution, in every precision, for every shape in a configuration."""

from pathlib import Path

import pytest
import torch
import yaml
from timm.layers.patch_embed import PatchEmbed
from torch import nn

from longseq.encoders.patches import embed_patches

ROOT = Path(__file__).parents[2]


def shapes():
    """(channels, patch height, patch width) of every configuration, and of frames with other numbers of mels."""
    kernels = {(1, 1, mels) for mels in (8, 16, 32, 80, 128)} | {(3, 16, 16), (1, 8, 8)}
    for path in (ROOT / "configs").glob("[ai]*/*.yaml"):
        arguments = yaml.safe_load(path.read_text())["model"]["encoder"]["init_args"]
        if "num_mels" in arguments:
            kernels.add((1, 1, arguments["num_mels"]))
        else:
            side = arguments.get("patch_size", 1)
            kernels |= {(channels, side, side) for channels in (1, 3)}
    return sorted(kernels)


def embedding(shape, **options):
    torch.manual_seed(0)
    channels, rows, columns = shape
    return PatchEmbed((3 * rows, 2 * columns), (rows, columns), channels, 64, **options)


def pictures(embed):
    return torch.randn(8, embed.proj.in_channels, *embed.img_size)


@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_tokens_and_gradients_are_those_of_the_convolution(shape):
    embed = embedding(shape, norm_layer=nn.LayerNorm).double()
    x = pictures(embed).double()

    def gradients(forward):
        embed.zero_grad()
        forward(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in embed.parameters()]

    torch.testing.assert_close(embed_patches(embed, x), embed(x))
    for ours, theirs in zip(gradients(lambda x: embed_patches(embed, x)), gradients(embed), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_low_precision_is_near_full_precision_on_this_processor(shape, dtype):
    embed = embedding(shape)
    x = pictures(embed)
    expected = embed.double()(x.double())
    with torch.autocast("cpu", dtype):
        low = embed_patches(embed.float(), x)
    torch.testing.assert_close(low.double(), expected, rtol=0.02, atol=0.05)
    torch.testing.assert_close(embed_patches(embed.to(dtype), x.to(dtype)).double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("change", ["hook", "overlap", "other size", "no bias"])
def test_what_is_no_plain_patch_embedding_is_called(change):
    embed = embedding((1, 2, 2), bias=change != "no bias")
    x = pictures(embed)
    called = []
    if change == "hook":
        embed.proj.register_forward_hook(lambda *_: called.append(change))
    if change == "overlap":
        embed.proj = nn.Conv2d(1, 64, 3, stride=2, padding=1)
    if change == "other size":
        embed.strict_img_size = False
        x = torch.randn(8, 1, 4, 2)
    expected = embed(x)
    torch.testing.assert_close(embed_patches(embed, x), expected)
    assert called == (["hook"] * 2 if change == "hook" else [])
