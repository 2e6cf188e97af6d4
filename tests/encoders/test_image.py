"""Images as sequences of pixels and patches."""

import pytest
import torch

from longseq.attention import Linformer, Softmax, Verma
from longseq.encoders import ImageEncoder

SMALL = {"dim": 16, "depth": 2, "heads": 2}


@pytest.mark.parametrize(
    ("shape", "patch_size", "pool", "tokens"),
    [
        ((1, 8, 8), 1, "avg", 64),
        ((3, 32, 32), 1, "avg", 1024),
        ((3, 32, 16), 4, "avg", 32),
        ((3, 8, 8), 2, "token", 17),
    ],
)
def test_it_says_how_many_tokens_the_attention_sees(shape: tuple, patch_size: int, pool: str, tokens: int) -> None:
    encoder = ImageEncoder(shape, Verma(), patch_size=patch_size, pool=pool, **SMALL)
    seen = []
    encoder.trunk.blocks[0].attn.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    features = encoder(torch.zeros(2, *shape, dtype=torch.uint8))
    assert features.shape == (2, 16)
    assert seen == [tokens]
    assert encoder.num_tokens == tokens


def test_bytes_and_floats_of_the_same_image_give_the_same_features() -> None:
    encoder = ImageEncoder((1, 8, 8), Softmax(), **SMALL)
    images = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(encoder(images), encoder(images.float()))


def test_measure_sets_mean_and_deviation_of_each_channel() -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder((2, 4, 4), Softmax(), **SMALL)
    batches = [torch.randn(5, 2, 4, 4) * torch.tensor([3.0, 0.0])[:, None, None] + 7 for _ in range(3)]
    encoder.measure(batches)
    pixels = torch.cat(batches).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(encoder.mean.flatten().double(), pixels.mean(1), rtol=1e-5, atol=1e-5)
    deviation = pixels[0].std(correction=0)
    torch.testing.assert_close(encoder.std.flatten().double()[0], deviation, rtol=1e-5, atol=1e-5)
    assert encoder.std.flatten()[1] == 1.0  # a constant channel would otherwise be divided by zero


def test_a_picture_with_its_channels_last_is_refused_with_the_remedy() -> None:
    encoder = ImageEncoder((3, 8, 8), Softmax(), **SMALL)
    with pytest.raises(ValueError, match=r"got \(8, 8, 3\); put the channels first$"):
        encoder(torch.rand(2, 8, 8, 3))
    with pytest.raises(
        ValueError, match=r"got \(3, 8, 9\); change the inputs, or carry the encoder to their size with "
    ):
        encoder(torch.rand(2, 3, 8, 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "heads must divide dim, but 3 does not divide 16"),
        ({"patch_size": 3}, "patch_size must divide the image, but 3 does not divide 8 x 8"),
        ({"patch_size": 0}, "patch_size must divide the image"),
        ({"depth": -1}, "depth must be positive, got -1"),
        ({"dropout": 1.0}, r"dropout must be in 0\.\.1"),
        ({"attention": Linformer(k=65)}, r"k must be in 1\.\.64"),
        ({"pool": "map"}, "pool must be avg, max, gated, statistics or token, got 'map'"),
        ({"shape": [8, 8]}, "shape must be channels, height and width"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(change: dict, message: str) -> None:
    arguments = {"shape": (1, 8, 8), "attention": Softmax(), **SMALL, **change}
    with pytest.raises(ValueError, match=message):
        ImageEncoder(**arguments)
