"""Tokens that are features: outputs of a trained network, in time or at coordinates."""

import pytest
import torch

from longseq import Linformer, Verma
from longseq.attention import Dynamic
from longseq.encoders import FeatureEncoder


def bag(tokens: int, features: int = 5, side: float = 2560.0) -> torch.Tensor:
    """Features of tokens at random coordinates."""
    return torch.cat([torch.randn(tokens, features), side * torch.rand(tokens, 2)], dim=1)


def encoder_of(**options) -> FeatureEncoder:
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 4, "num_coordinates": 2, "attention": Verma(), **options}
    return FeatureEncoder(5, 100, **sizes).eval()


@pytest.mark.parametrize("attention", [Verma(), Linformer(8, projection=Dynamic())], ids=repr)
def test_a_bag_has_no_order_and_no_place_on_its_slide(attention):
    encoder, tokens = encoder_of(attention=attention).double(), bag(60).double()
    encoder.measure([tokens[None]])
    features = encoder(tokens[None])
    shuffled = tokens[torch.randperm(60)][None]
    torch.testing.assert_close(encoder(shuffled), features, rtol=1e-9, atol=1e-9)
    moved = tokens[None] + torch.tensor([0, 0, 0, 0, 0, 51_200.0, 2_560.0])
    torch.testing.assert_close(encoder(moved), features, rtol=1e-9, atol=1e-9)


def test_coordinates_in_another_unit_give_the_same_features_and_other_places_give_others():
    tokens = bag(60).double()
    in_micrometres = tokens * torch.tensor([1, 1, 1, 1, 1, 0.25, 0.25])
    features = []
    for values in (tokens, in_micrometres):
        encoder = encoder_of().double()
        encoder.measure([values[None]])
        features.append(encoder(values[None]))
    torch.testing.assert_close(features[1], features[0], rtol=1e-9, atol=1e-9)
    elsewhere = torch.cat([in_micrometres[:, :5], in_micrometres[:, 5:].flip(0)], dim=1)
    assert (encoder(elsewhere[None]) - features[0]).abs().max() > 1e-5


def test_the_typical_distance_is_that_of_neighbours_on_a_grid_and_on_a_line_and_needs_two_tokens():
    y, x = torch.meshgrid(256.0 * torch.arange(30), 256.0 * torch.arange(40), indexing="ij")
    on_grid = torch.cat([torch.randn(1200, 5), x.reshape(-1, 1), y.reshape(-1, 1)], dim=1)
    on_line = on_grid[:40]
    for tokens, expected in ((on_grid, 256), (on_line, 256)):
        encoder = encoder_of()
        encoder.measure([tokens[None]])
        assert encoder.std[5:].flatten().tolist() == pytest.approx([expected] * 2, rel=0.05)
        assert encoder.mean[5:].flatten().tolist() == [0, 0]
    encoder = encoder_of()
    encoder.measure([on_grid[None, :1]])
    assert encoder.std[5:].flatten().tolist() == [1, 1]
    assert encoder(on_grid[None, :1]).isfinite().all()


def test_padding_has_no_part_in_the_corner_of_a_bag():
    encoder, tokens = encoder_of().double(), bag(60).double() + torch.tensor([0, 0, 0, 0, 0, 500.0, 500.0])
    encoder.measure([tokens[None]])
    alone = encoder(tokens[None])
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, 40))[None]
    batch = {"features": padded, "lengths": torch.tensor([60])}
    both = {name: values.repeat(2, *[1] * (values.ndim - 1)) for name, values in batch.items()}
    for inputs in (batch, both):
        torch.testing.assert_close(encoder(inputs)[:1], alone, rtol=1e-9, atol=1e-9)


def test_without_blocks_the_features_are_the_mean_of_the_mapped_tokens():
    encoder, tokens = encoder_of(num_coordinates=0, depth=0).double(), torch.randn(1, 30, 5).double()
    weight, bias = encoder.trunk.patch_embed.proj.weight.flatten(1), encoder.trunk.patch_embed.proj.bias
    # timm normalises each token before the pooling, or the mean after it
    mapped = tokens @ weight.T + bias
    expected = encoder.trunk.fc_norm(encoder.trunk.norm(mapped).mean(1))
    torch.testing.assert_close(encoder(tokens), expected, rtol=1e-9, atol=1e-9)


def test_features_of_another_width_and_more_tokens_than_fit_are_refused_in_a_line():
    with pytest.raises(ValueError, match="must have 7 numbers a token, got 9; give features of the same network"):
        encoder_of()(torch.randn(2, 10, 9))
    with pytest.raises(ValueError, match="must have at most 100 tokens, got 101; give --model.encoder.any_length true"):
        encoder_of(any_length=False)(torch.randn(2, 101, 7))
    with pytest.raises(ValueError, match="must be 0 or 2, got 3; 2 are x and y"):
        FeatureEncoder(5, 10, Verma(), num_coordinates=3)
