"""The sizes of a trunk are one description: every encoder takes it, hands it on by name, and keeps its arguments."""

import dataclasses
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from longseq.arguments import argument_hints, argument_names
from longseq.attention import Softmax
from longseq.encoders import (
    ASTEncoder,
    FeatureEncoder,
    ImageEncoder,
    Sizes,
    SpectrogramEncoder,
    TimmEncoder,
    WaveformEncoder,
)
from longseq.files.description import build, describe

# the flags, and the arguments in checkpoints, that each encoder had before it shared a description with the others
TRAINED: dict[str, Any] = {"dropout": 0.0, "drop_path": 0.0, "checkpointing": False, "local": None}
OF_A_VIT = {**TRAINED, "mlp_ratio": 4.0, "heads": 4, "bf16_residual": False}
FREE = {**OF_A_VIT, "pool": "avg", "any_length": False, "reversible": False}
WITH_STEM = {**FREE, "dim": 128, "depth": 6, "positions": "learned", "stem": None, "layer_scale": 0.0}
EXPECTED = {
    ImageEncoder: WITH_STEM,
    SpectrogramEncoder: WITH_STEM,
    WaveformEncoder: {**FREE, "dim": 64, "depth": 4, "mlp_ratio": 2.0, "positions": "none"},
    FeatureEncoder: {
        **FREE,
        "dim": 128,
        "depth": 2,
        "mlp_ratio": 2.0,
        "positions": "none",
        "any_length": True,
        "layer_scale": 0.0,
    },
    ASTEncoder: {**OF_A_VIT, "dim": 768, "depth": 12, "heads": 12},
    TimmEncoder: TRAINED,
}
OTHER = {**WITH_STEM, "dropout": 0.125, "drop_path": 0.25, "mlp_ratio": 3.0, "positions": "sincos", "layer_scale": 0.5}
OTHER["bf16_residual"] = True


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_flags_and_checkpoints_have_the_sizes_that_the_encoder_has_and_its_defaults(kind: type) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "encoder", skip={"attention"})
    flags = {action.dest.partition(".")[2]: action for action in parser._actions if "." in action.dest}
    sizes = {field.name for field in dataclasses.fields(Sizes)}
    assert {name: flags[name].default for name in sizes & set(flags)} == EXPECTED[kind]
    assert all(flags[name].help for name in EXPECTED[kind])
    names = argument_names(kind)
    assert set(names) == {*(name for name in flags if not name.endswith(".help")), "attention"}
    assert sizes & set(names) == set(EXPECTED[kind]) and argument_hints(kind).keys() >= set(names)


def test_each_size_arrives_where_it_belongs_and_comes_back_from_a_checkpoint() -> None:
    given = {name: value for name, value in OTHER.items() if name not in ("dim", "depth")}
    encoder = ImageEncoder((1, 8, 8), Softmax(), dim=16, depth=3, **given)
    block = encoder.trunk.blocks[2]
    assert (encoder.trunk.pos_drop.p, block.drop_path1.drop_prob, block.mlp.drop1.p) == (0.125, 0.25, 0.125)
    assert (block.mlp.fc1.out_features, len(encoder.trunk.blocks)) == (48, 3)
    assert (block.ls1.gamma == 0.5).all() and "pos_embed" not in dict(encoder.trunk.named_parameters())
    described = describe(encoder)
    assert {name: described["init_args"][name] for name in OTHER} == {**OTHER, "dim": 16, "depth": 3}
    assert describe(build(described, ImageEncoder)) == described


def test_sizes_go_by_name_alone_and_a_wrong_name_is_refused() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        ImageEncoder((1, 4, 4), Softmax(), 1, 8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="dmi"):
        ImageEncoder((1, 4, 4), Softmax(), dmi=8)
    with pytest.raises(TypeError, match="layer_scale"):
        WaveformEncoder(8000, 0.1, Softmax(), layer_scale=0.1)


def test_a_description_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sizes().dim = 7  # type: ignore[misc]
    with pytest.raises(ValueError, match="^heads must divide dim, but 4 does not divide 6"):
        dataclasses.replace(Sizes(), dim=6)


class Own(ImageEncoder):
    """A user's encoder, which hands its keywords on."""

    def __init__(self, shape: list[int], attention: Softmax, gain: float = 1.0, **options: Any) -> None:
        super().__init__(shape, attention, **options)
        self.gain = gain


def test_an_encoder_that_is_derived_from_ours_has_the_same_arguments_and_its_own() -> None:
    assert set(argument_names(Own)) == {"gain", *argument_names(ImageEncoder)}
    encoder = Own([1, 4, 4], Softmax(), gain=2.0, dim=8, depth=1, heads=2)
    assert describe(encoder)["init_args"]["gain"] == 2.0 and encoder(torch.rand(1, 1, 4, 4)).shape == (1, 8)
