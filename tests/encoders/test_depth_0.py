"""An encoder of depth 0 pools the tokens of its stem: what a mechanism's results are compared with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import program_of

from longseq import ImageEncoder, Linformer, SpectrogramEncoder, Verma, WaveformEncoder, resize
from longseq.arguments import arguments_of
from longseq.deploy._formats import write_onnx, write_torch
from longseq.deploy.export import largest_difference
from longseq.encoders import Conv2d, Residual
from longseq.encoders.sharding import refuse_unsharded
from longseq.reports.spectrum import context_matrices
from longseq.training import Classifier
from longseq.training.answers.attribution import attribute, token_maps
from longseq.training.board.summary import summary
from longseq.training.flops import flops_per_sample
from longseq.training.optimizer import Optimization

STEM = Residual([4, 6], [1, 2])
SMALL: Any = {"dim": 16, "depth": 0, "heads": 2, "stem": STEM}


def images(**options: Any) -> ImageEncoder:
    return ImageEncoder((3, 8, 12), Linformer(5), patch_size=4, **SMALL | options)


def sounds(**options: Any) -> SpectrogramEncoder:
    return SpectrogramEncoder(8000, 0.4, Verma(), num_mels=20, tokens=[10, 2], **SMALL | options)


def inputs_of(encoder: Any) -> Any:
    torch.manual_seed(0)
    if encoder.kind != "sounds":
        return torch.randint(256, (3, 3, 8, 12), dtype=torch.uint8)
    lengths = torch.tensor([3200, 1000, 90])
    return {"waveforms": torch.rand(3, 3200) * (torch.arange(3200) < lengths[:, None]), "lengths": lengths}


def classifier(encoder: Any, **options: Any) -> Classifier:
    encoder.set_statistics(torch.tensor(100.0 if encoder.kind != "sounds" else -3.0), torch.tensor(50.0))
    model = Classifier(encoder, 4, **options).eval()
    torch.nn.init.normal_(model.head.weight, std=0.3)  # type: ignore[arg-type]
    return model


BOTH = pytest.mark.parametrize("make", [images, sounds])


@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"local": Conv2d()}, {"reversible": True}, {"checkpointing": True}, {"drop_path": 0.2}], ids=repr
)
def test_features_are_the_normalised_mean_of_the_stems_tokens_without_padding(make: Any, options: Any) -> None:
    encoder = classifier(make(**options)).encoder
    inputs = inputs_of(encoder)
    trunk, (picture, rows) = encoder.trunk, encoder.prepared(inputs)
    for number, features in enumerate(encoder(inputs)):
        height = picture.shape[2] if rows is None else int(rows[number])
        own = torch.zeros(1, picture.shape[1], *trunk.patch_embed.img_size)
        own[:, :, :height] = picture[number, :, :height]
        count = -(-height // trunk.patch_embed.patch_size[0]) * trunk.patch_embed.grid_size[1]
        tokens = trunk.patch_embed(own, torch.tensor([height])) + trunk.pos_embed
        expected = torch.nn.functional.layer_norm(tokens[0, :count].mean(0), (16,), eps=1e-6)
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize("pool", [None, "attention"])
def test_it_is_counted_summarised_explained_and_trained_and_there_is_no_attention_to_draw(make: Any, pool: Any) -> None:
    model = classifier(make(), pool=pool)
    inputs = inputs_of(model.encoder)
    one = {name: part[:1] for name, part in inputs.items()} if isinstance(inputs, dict) else inputs[:1]
    assert flops_per_sample(model).forward > 0
    assert "none, because the depth is 0" in summary(model)
    assert token_maps(model, one, 6) == {}
    (explanation,) = attribute(model, one, [1])
    assert explanation.summaries.shape[0] == 0 and explanation.gradient.abs().sum() > 0
    torch.testing.assert_close(explanation.rollout.sum(), torch.tensor(1.0))
    with pytest.raises(ValueError, match="ckpt_path must be a model with attention in every block, got no blocks"):
        next(iter(context_matrices(model, one)))
    Optimization(layer_decay=0.5).make_optimizer(model)
    model.train()(inputs).square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@BOTH
def test_its_arguments_rebuild_it_and_it_is_carried_to_another_size(make: Any) -> None:
    encoder = classifier(make()).encoder
    assert arguments_of(type(encoder)(**arguments_of(encoder))) == arguments_of(encoder)
    larger = resize(encoder, seconds=0.8) if encoder.kind == "sounds" else resize(encoder, (3, 16, 12))
    assert larger.depth == 0 and larger.num_tokens > encoder.num_tokens


@BOTH
@pytest.mark.parametrize("write", [pytest.param(write_onnx, marks=pytest.mark.thorough), write_torch])
def test_it_is_exported(make: Any, write: Any, tmp_path: Path, exports: None) -> None:
    model = classifier(make())
    program = program_of(model)
    assert largest_difference(model, program, write(program, tmp_path / "model", {}), inputs_of(model.encoder)) < 1e-5


def test_what_needs_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="depth must be positive without a stem, got 0; give a stem"):
        images(stem=None)
    with pytest.raises(ValueError, match="depth must be positive without a stem, got 0"):
        WaveformEncoder(8000, 0.1, Verma(), depth=0)
    with pytest.raises(ValueError, match="depth must be positive, got -1"):
        images(depth=-1)
    with pytest.raises(ValueError, match="pool must not be token with depth 0"):
        images(pool="token")
    with pytest.raises(ValueError, match="encoder must have no stem"):
        refuse_unsharded(images())
