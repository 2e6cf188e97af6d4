"""How a classifier is trained is one description: flags, checkpoints and attributes have its arguments by name."""

import dataclasses
from typing import Any

import pytest
import torch
from fake_gpu import fake_gpu, move
from jsonargparse import ArgumentParser

from longseq.arguments import argument_hints, argument_names
from longseq.attention import Linformer
from longseq.encoders import ImageEncoder
from longseq.files.description import build_from
from longseq.training import Classifier, MixUp, Recipe

# the flags, and the arguments in checkpoints, that a classifier had before its recipe was a description
EXPECTED: dict[str, Any] = {
    "class_names": None, "task": None, "optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.05,
    "warmup_fraction": 0.1, "label_smoothing": 0.0, "class_weights": None, "mix": None, "init_from": None,
    "compile": False, "betas": None, "pool": None, "schedule": "cosine", "layer_decay": None, "freeze": None,
    "teacher": None, "distillation": "logits", "teacher_classes": None, "distillation_alpha": 0.5, "temperature": 2.0,
}  # fmt: skip
OTHER: dict[str, Any] = {
    "optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.25, "warmup_fraction": 0.125, "label_smoothing": 0.5,
    "class_weights": [1.0, 2.0], "schedule": "linear", "layer_decay": 0.75, "teacher": "a.ckpt",
    "distillation_alpha": 0.25, "temperature": 4.0,
}  # fmt: skip


def classifier(**options: Any) -> Classifier:
    return Classifier(ImageEncoder([1, 4, 4], Linformer(4), dim=8, depth=1, heads=2), 2, **options)


def test_flags_and_checkpoints_have_the_same_arguments_and_defaults_as_before() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(Classifier, "model", skip={"encoder", "num_classes"})
    flags = {action.dest.partition(".")[2]: action for action in parser._actions if "." in action.dest}
    assert {name: flags[name].default for name in flags if not name.endswith(".help")} == EXPECTED
    assert all(flags[name].help for name in EXPECTED)
    names = {"encoder", "num_classes", *EXPECTED}
    assert set(argument_names(Classifier)) == names and argument_hints(Classifier).keys() >= names
    assert classifier().hparams.keys() == names


def test_each_argument_is_an_attribute_and_comes_back_from_a_checkpoint() -> None:
    model = classifier(**OTHER, mix=MixUp(0.5))
    again = build_from(Classifier, model.hparams)
    assert all(getattr(trained, name) == OTHER[name] for trained in (model, again) for name in OTHER)
    assert again.mix is not None and again.mix.alpha == 0.5 and again.hparams == model.hparams


def test_the_optimizer_has_what_attributes_say_when_it_is_made() -> None:
    model = classifier(schedule="constant")
    model.learning_rate = 0.5  # as a finder sets it
    model.weight_decay = 0.25  # type: ignore[assignment]
    groups = model.recipe.make_optimizer(model).param_groups
    assert {group["lr"] for group in groups} == {0.5} and {group["weight_decay"] for group in groups} == {0.0, 0.25}


@pytest.mark.parametrize(("name", "is_fused"), [("adamw", True), ("sgd", True), ("lion", False)])
def test_weights_on_a_gpu_are_stepped_by_one_kernel_where_torch_has_one(name: str, is_fused: bool) -> None:
    with fake_gpu():
        model = move(classifier(optimizer=name))
        groups = model.recipe.make_optimizer(model).param_groups
    assert all(bool(group.get("fused")) is is_fused for group in groups)
    on_cpu = classifier(optimizer=name)
    assert not any(group.get("fused") for group in on_cpu.recipe.make_optimizer(on_cpu).param_groups)


def test_a_recipe_goes_by_name_alone_and_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        Classifier(torch.nn.Identity(), 2, None, None, "adamw")  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match="learning_rat"):
        classifier(learning_rat=1e-3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().learning_rate = 1.0  # type: ignore[misc]
