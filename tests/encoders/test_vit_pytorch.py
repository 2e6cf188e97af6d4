"""Models of vit-pytorch with linformer are read: the oracle is their own code."""

from typing import Any

import pytest
import torch
from linformer import Linformer
from torch import Tensor
from vit_pytorch import SimpleViT
from vit_pytorch.efficient import ViT

import longseq
from longseq.arguments import ArgumentError


def theirs(image_size: Any = 12, n: int = 10, pool: str = "cls", channels: int = 3, **linformer: Any) -> ViT:
    """Their model, whose biases and norms differ from their initial values as those of a trained one do."""
    torch.manual_seed(0)
    of_layers: Any = {"dim": 16, "seq_len": n, "depth": 2, "heads": 4, "k": 5} | linformer
    sizes: Any = {"image_size": image_size, "patch_size": 4, "num_classes": 7, "dim": 16, "channels": channels}
    model = ViT(**sizes, transformer=Linformer(**of_layers), pool=pool).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


@torch.no_grad()
def difference(model: ViT, ours: Any, images: Tensor) -> float:
    return float((model(images) - ours.eval()(images)).abs().max())


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"pool": "mean"},
        {"share_kv": True},
        {"one_kv_head": True},
        {"one_kv_head": True, "share_kv": True, "dim_head": 6},
        {"dim_head": 8, "n": 17},  # more channels than tokens have, and projections for more tokens than an image has
        {"image_size": (8, 20), "n": 11, "channels": 1, "depth": 1},
    ],
    ids=str,
)
def test_a_model_of_vit_pytorch_keeps_its_logits(model: dict[str, Any]) -> None:
    trained = theirs(**model)
    of_image = {name: value for name, value in model.items() if name in ("pool", "channels", "image_size")}
    ours = longseq.from_vit_pytorch(trained.state_dict(), heads=4, **of_image)
    shape = model.get("image_size", (12, 12))
    images = torch.randn(5, model.get("channels", 3), *shape)
    with torch.no_grad():
        assert trained(images).abs().max() > 0.5  # so that a difference of 1e-6 says something
    assert difference(trained, ours, images) < 1e-6
    exact = longseq.from_vit_pytorch(trained.double().state_dict(), heads=4, **of_image)
    assert difference(trained, exact, images.double()) < 1e-13


def test_it_has_the_defaults_of_theirs() -> None:
    trained = theirs(heads=8)
    assert difference(trained, longseq.from_vit_pytorch(trained.state_dict()), torch.randn(2, 3, 12, 12)) < 1e-6


def test_it_can_be_resized_and_trained() -> None:
    ours = longseq.from_vit_pytorch(theirs().state_dict(), heads=4)
    larger = longseq.resize(ours, (3, 24, 24))
    larger(torch.randn(2, 3, 24, 24)).sum().backward()
    assert all(weight.grad is not None for weight in larger.parameters())
    with pytest.raises(ArgumentError, match=r"images must have \(12, 12\) pixels, got \(24, 24\); .*longseq.resize"):
        ours(torch.randn(2, 3, 24, 24))


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (theirs(reversible=True), {}, "state_dict must not be of a reversible Linformer, .*; train a new model"),
        (
            SimpleViT(image_size=8, patch_size=4, num_classes=2, dim=8, depth=1, heads=2, mlp_dim=8),
            {},
            "state_dict must be of vit_pytorch.efficient.ViT around linformer.Linformer \\(it lacks",
        ),
        (theirs(n=9), {}, "it projects 9 tokens, and has positions for 10"),
        (theirs(), {"heads": 3}, "heads must divide the 16 rows of to_q, got 3"),
        (theirs(one_kv_head=True), {"heads": 2}, "heads must be 4, because the keys of one head have 4 channels"),
        (theirs(), {"channels": 1}, "channels must be another number, got 1: a patch has 48 numbers"),
        (theirs((8, 20), 11), {}, "image_size must be given, because 10 patches are not a square"),
        (theirs(), {"image_size": 16}, "image_size must have 9 patches of 4 x 4 pixels, got 16 x 16 pixels"),
        (theirs(), {"pool": "avg"}, "pool must be cls or mean, got 'avg'"),
        (theirs(k=11), {}, "k must be in 1..10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_named_in_a_line(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        longseq.from_vit_pytorch(model.state_dict(), **{"heads": 4, **arguments})
    assert "\n" not in str(error.value)


def test_another_weight_is_named() -> None:
    weights = dict(theirs().state_dict(), extra=torch.zeros(1))
    with pytest.raises(ArgumentError, match="the file alone has extra"):
        longseq.from_vit_pytorch(weights, heads=4)
