"""What export writes: its answers are longseq's, for any batch and length, and it says what it takes."""

import gc
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from encoder_kinds import KINDS
from PIL import Image
from programs import program_of
from torch import nn

import longseq
from datamodules import FSDD, Digits
from longseq.arguments import ArgumentError, SettingError
from longseq.attention import S4D, Dynamic, Linear, Linformer, Mechanism, Softmax, Verma
from longseq.attention.examples import every_mechanism
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mixer import TokenMixer
from longseq.deploy._formats import MARKS, run_onnx, run_torch, write_onnx, write_torch
from longseq.deploy._program import LogMelOfProducts
from longseq.deploy.export import export, facts_of, largest_difference, refuse_bound
from longseq.deploy.predictor import Predictor
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.encoders.encoder import Encoder
from longseq.encoders.local import Conv1d
from longseq.encoders.spectrogram import LogMel
from longseq.files.storage import is_foreign
from longseq.tasks import Masked, MultiLabel
from longseq.training import Classifier

FORMATS = {"onnx": write_onnx, "torch": write_torch}
THOROUGH = pytest.mark.thorough
TWO_KINDS = [ImageEncoder, SpectrogramEncoder]


pytestmark = pytest.mark.usefixtures("exports")


def classifier(encoder: Encoder, num_classes: int = 5, **options) -> Classifier:
    """A classifier whose weights are not those of a start, which would hide mistakes."""
    torch.manual_seed(0)
    model = Classifier(encoder, num_classes, **options)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(weight, std=0.3)
    model.encoder.set_statistics(torch.tensor(-2.0), torch.tensor(3.0))
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "format"),
    # ONNX is made of torch's program; that it is written and read as well, the test of the command shows
    [*((kind, "torch") for kind in TWO_KINDS), *(pytest.param(kind, "onnx", marks=THOROUGH) for kind in KINDS)],
)
def test_every_encoder_is_exported_for_any_batch(kind: type[Encoder], format: str, tmp_path: Path) -> None:
    encoder, inputs = kind.examples(Linformer(7), local=Conv1d(3))[0]
    if encoder.kind == "sounds":
        inputs = {**inputs, "waveforms": inputs["waveforms"].clamp(-1, 1)}  # as files are read
    encoder.trunk.blocks = encoder.trunk.blocks[:1]  # an export takes its time for each block
    model = classifier(encoder)
    program = program_of(model)
    run = FORMATS[format](program, tmp_path / "model", {})  # traced with two inputs
    assert largest_difference(model, program, run, inputs) < 1e-5


@pytest.mark.thorough
def test_a_file_that_answers_nan_is_as_far_off_as_can_be() -> None:
    model, images = classifier(ImageEncoder((1, 8, 8), Linformer(4), dim=8, depth=1, heads=1)), torch.rand(2, 1, 8, 8)
    program: Any = SimpleNamespace(of_batch=lambda inputs: (inputs,))
    assert largest_difference(model, program, lambda inputs: torch.full((len(inputs), 5), math.nan), images) == math.inf


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_leaves_no_second_class_of_a_name(format: str, tmp_path: Path) -> None:
    """Of modules that share parts torch's tracer makes subclasses with their names, and a YAML file names a class."""
    before = ImageEncoder.__subclasses__()
    gc.disable()
    try:
        FORMATS[format](
            program_of(classifier(ImageEncoder.examples(Linformer(7), depth=1)[0][0])), tmp_path / "model", {}
        )
        assert set(ImageEncoder.__subclasses__()) <= set(before)
    finally:
        gc.enable()


@pytest.mark.thorough
@pytest.mark.parametrize("write", FORMATS.values())
def test_an_export_that_fails_leaves_no_second_class_of_a_name(write: Any, tmp_path: Path) -> None:
    model = classifier(ImageEncoder.examples(Linformer(7), depth=1)[0][0])
    model.encoder.trunk.blocks[0].attn.proj_drop.forward = lambda tokens: tokens if tokens.sum() > 0 else -tokens
    before = ImageEncoder.__subclasses__()
    gc.disable()
    try:
        with pytest.raises(ArgumentError, match="must be of a model that torch can trace") as caught:
            write(program_of(model), tmp_path / "model", {})
        assert set(ImageEncoder.__subclasses__()) <= set(before), caught.value
    finally:
        gc.enable()


def kind_of(mechanism: Mechanism) -> tuple:
    """Sharings differ in weights, and not in what is traced; a projection is traced alike in both mechanisms."""
    projection = type(getattr(mechanism, "projection", None))
    if projection not in (Linear, type(None)):
        return (projection,)
    has_no_k = getattr(mechanism, "k", None) is None
    return type(mechanism), has_no_k, getattr(mechanism, "normalize", None)


# the plainest of each kind, and all heads with a k of their own, which are traced one by one
EXPORTED = [
    *{kind_of(each): each for each in reversed(every_mechanism())}.values(),
    Verma([[3, 4, 5, 6]], "none"),
    Verma([[7, 7, 7, 7]], "none"),
]


@dataclass(frozen=True)
class InTurn(Mechanism):
    """Another mechanism in every layer, because what an export costs besides its layers takes seconds."""

    mechanisms: tuple[Mechanism, ...]

    @property
    def any_length(self) -> bool:
        return all(each.any_length for each in self.mechanisms)

    @classmethod
    def examples(cls) -> list[Mechanism]:
        return []

    def layers(self, stack: Stack, grid: TokenGrid) -> list[TokenMixer]:
        return [each.layers([layer], grid)[0] for each, layer in zip(self.mechanisms, stack, strict=True)]


def of_clips(*mechanisms: Mechanism) -> Classifier:
    sizes = {"num_mels": 20, "dim": 16, "depth": len(mechanisms), "heads": 4}
    return classifier(SpectrogramEncoder(8000, 0.4, InTurn(mechanisms), **sizes))


@THOROUGH
@pytest.mark.parametrize("mechanisms", [EXPORTED[start : start + 9] for start in range(0, len(EXPORTED), 9)], ids=str)
def test_every_mechanism_is_exported_for_clips_of_any_length(mechanisms: list[Mechanism], tmp_path: Path) -> None:
    model = of_clips(*mechanisms)
    program = program_of(model)
    run = write_onnx(program, tmp_path / "model.onnx", {})
    for lengths in ([3200, 1000, 90], [400, 1200], [85], [79]):
        waveforms = torch.randn(len(lengths), max(lengths)).clamp(-1, 1)
        for clip, length in zip(waveforms, lengths, strict=True):
            clip[length:] = 0
        inputs = {"waveforms": waveforms, "lengths": torch.tensor(lengths)}
        assert largest_difference(model, program, run, inputs) < 1e-5, lengths


@THOROUGH
@pytest.mark.parametrize("pool", ["max", "gated", "statistics"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_pools_the_tokens_is_exported(format: str, pool: str, tmp_path: Path) -> None:
    model = classifier(SpectrogramEncoder(8000, 0.4, Verma(), num_mels=20, dim=16, depth=1, heads=4, pool=pool))
    program = program_of(model)
    run = FORMATS[format](program, tmp_path / "model", {})
    waveforms = torch.randn(2, 3200).clamp(-1, 1)
    waveforms[1, 900:] = 0
    inputs = {"waveforms": waveforms, "lengths": torch.tensor([3200, 900])}
    assert largest_difference(model, program, run, inputs) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("format", FORMATS)
def test_a_model_of_any_length_is_exported_for_any_length(format: str, tmp_path: Path) -> None:
    free = {"any_length": True, "positions": "none", "local": Conv1d(5), "dim": 16, "depth": 1, "heads": 4}
    sounds = classifier(SpectrogramEncoder(8000, 0.4, Verma(length_scaling=1.0), num_mels=20, **free), pool="attention")
    program = program_of(sounds)
    run = FORMATS[format](program, tmp_path / "sounds", {})
    refuse_bound(program, run, format, 1e-5)
    assert (tmp_path / "sounds").exists()
    for samples in (500, 3200, 50_000):
        assert largest_difference(sounds, program, run, torch.randn(2, samples).clamp(-1, 1)) < 1e-5, samples
    one_row = (3, 2, 8)  # a usual size that torch would take for the number of rows of all images
    by_length = Softmax(1.0), Verma(length_scaling=1.5), Linformer(3, projection=Dynamic(length_scaling=1.0))
    encoder = ImageEncoder(one_row, InTurn(by_length), patch_size=2, **{**free, "depth": 3})
    images = classifier(encoder, pool="attention")  # without a mask, so that log n is that of a traced size
    program = program_of(images)
    run = FORMATS[format](program, tmp_path / "images", {})
    refuse_bound(program, run, format, 1e-5)
    for height, width in ((12, 8), (8, 20), (30, 30)):
        pixels = torch.randint(256, (3, 3, height, width), dtype=torch.uint8)
        assert largest_difference(images, program, run, pixels) < 1e-5, (height, width)


@pytest.mark.thorough
@pytest.mark.parametrize("format", FORMATS)
def test_a_clock_is_exported_for_any_length(format: str, tmp_path: Path) -> None:
    free = {"any_length": True, "positions": "clock", "dim": 16, "depth": 1, "heads": 4}
    sounds = classifier(SpectrogramEncoder(8000, 0.4, Verma(), num_mels=20, **free), pool="max")
    program = program_of(sounds)
    run = FORMATS[format](program, tmp_path / "sounds", {})
    refuse_bound(program, run, format, 1e-5)
    for samples in (500, 3200, 50_000):
        assert largest_difference(sounds, program, run, torch.randn(2, samples).clamp(-1, 1)) < 1e-5, samples


@pytest.mark.parametrize(
    ("sample_rate_hz", "num_mels", "window"), [(8000, 40, 200), (16000, 64, 400), (44100, 80, 1103)]
)
def test_the_spectrogram_of_products_is_the_spectrogram(sample_rate_hz: int, num_mels: int, window: int) -> None:
    log_mel = LogMel(sample_rate_hz, num_mels, sample_rate_hz // 100, window)
    products = LogMelOfProducts(log_mel)
    for waveforms in (torch.randn(2, sample_rate_hz), 1e-3 * torch.randn(1, 777), torch.zeros(1, 3000)):
        torch.testing.assert_close(products(waveforms), log_mel(waveforms), atol=2e-4, rtol=1e-5)


@pytest.fixture
def checkpoint(digits_run: Path) -> Path:
    return digits_run / "best.ckpt"


def test_the_command_writes_a_file_that_describes_itself_and_checks_it_with_a_given_one(
    command, checkpoint: Path, tmp_path: Path
) -> None:
    out, image = tmp_path / "new/digits.onnx", tmp_path / "grey.png"
    Image.new("L", (8, 8), 130).save(image)
    done = command("export", "--ckpt_path", checkpoint, "--out", out, "--input", image)
    assert done.code == 0 and f"on {image}" in done.out, done.err
    assert "inputs: images, uint8 (batch, 1, 8, 8), 0 to 255" in done.out and "latency of one" in done.out
    session = onnxruntime.InferenceSession(out)
    (taken,) = session.get_inputs()
    assert (taken.name, taken.shape, taken.type) == ("images", ["batch", 1, 8, 8], "tensor(uint8)")
    facts = {name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}
    encoder = longseq.load(checkpoint).model.encoder
    in_file = {"mean": [pytest.approx(float(encoder.mean))], "std": [pytest.approx(float(encoder.std))]}
    described = {"class_names": [str(digit) for digit in range(10)], "task": "SingleLabel", "in_file": in_file}
    resizing = {"size": [8, 8], "colours": "grey", "resize": "stretch; bilinear, antialiased"}
    assert facts == {**described, **resizing}
    onnx.checker.check_model(str(out), full_check=True)
    assert not is_foreign(out, MARKS["onnx"])


def test_the_file_of_a_model_of_sounds_names_its_spectrogram() -> None:
    encoder = SpectrogramEncoder(8000, 0.5, Verma(), num_mels=40, hop_ms=10, window_ms=25, dim=8, depth=1, heads=1)
    data = FSDD("nowhere")
    in_file = facts_of(Predictor(classifier(encoder, num_classes=10), data))["in_file"]
    assert len(in_file["mean"]) == len(in_file["std"]) == in_file["mel_bands"] == 40
    assert (in_file["hop_samples"], in_file["window_samples"], in_file["fft_samples"]) == (80, 200, 256)


def test_what_torch_exports_is_described_too(command, checkpoint: Path, tmp_path: Path) -> None:
    done = command("export", "--ckpt_path", checkpoint, "--format", "torch", "--out", tmp_path / "model.pt2")
    assert done.code == 0, done.err
    assert not is_foreign(tmp_path / "model.pt2", MARKS["torch"])
    described = {"longseq.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=described)
    assert json.loads(described["longseq.json"])["task"] == "SingleLabel"
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    assert run_torch(tmp_path / "model.pt2")(images).sum(1).tolist() == pytest.approx([1.0] * 5)


@pytest.mark.thorough
def test_the_command_says_from_which_size_on_torchs_file_takes_images(
    command, checkpoint: Path, tmp_path: Path
) -> None:
    free = {"any_length": True, "positions": "none", "dim": 8, "depth": 1, "heads": 2}
    encoder = ImageEncoder((1, 8, 8), Verma(), patch_size=4, **free)
    model = classifier(encoder, num_classes=10)
    Predictor(model, longseq.load(checkpoint).data).save_pretrained(tmp_path / "free")
    out = tmp_path / "model.pt2"
    done = command("export", "--ckpt_path", tmp_path / "free", "--format", "torch", "--out", out)
    assert done.code == 0, done.err
    said = "images, uint8 (batch, 1, height, width), 0 to 255; height from 8 in steps of 4, width from 8 in steps of 4"
    assert said in done.out
    smallest = torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(run_torch(out)(smallest), model.task.probabilities(model(smallest)))


@THOROUGH
def test_int8_makes_the_file_smaller_and_keeps_what_it_says(command, checkpoint: Path, tmp_path: Path) -> None:
    whole, small = tmp_path / "whole.onnx", tmp_path / "small.onnx"
    assert command("export", "--ckpt_path", checkpoint, "--out", whole).code == 0
    done = command("export", "--ckpt_path", checkpoint, "--out", small, "--int8", "true")
    assert done.code == 0, done.err
    assert small.stat().st_size < whole.stat().st_size
    before, after = (float(word.rstrip(",")) for word in done.out.split("test accuracy: ")[1].split() if "0." in word)
    tested = command("test", "--ckpt_path", checkpoint).out
    assert f"{before:.4f}" in tested and abs(before - after) < 0.1
    images = torch.randint(256, (50, 1, 8, 8), dtype=torch.uint8)
    difference = float((run_onnx(small)(images) - run_onnx(whole)(images)).abs().max())
    assert 0 < difference < 0.1
    assert "class_names" in onnxruntime.InferenceSession(small).get_modelmeta().custom_metadata_map


def test_a_file_to_check_with_that_is_not_there_is_one_line(command, checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--ckpt_path", checkpoint, "--out", tmp_path / "model.onnx", "--input", tmp_path / "none.png"]
    done = command("export", *flags)
    assert done.code == 2 and "none.png: no such file" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_somebody_else_is_not_overwritten(format: str, command, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("my own")
    done = command("export", "--ckpt_path", checkpoint, "--format", format, "--out", "mine")
    assert (done.code, done.err.count("\n")) == (2, 1)
    said = "out: must be a new file, or one that longseq has written, got mine, which it has not; give another, or move"
    assert done.error == f"error: {said} that file away"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["my own"]


def test_what_cannot_be_exported_is_said_in_one_line(
    command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--ckpt_path", checkpoint, "--out", tmp_path / "x"]
    older = "an older file, with longseq.json and class_names"
    (tmp_path / "x").write_text(older)
    done = command("export", *flags, "--format", "torch", "--tolerance", "0")
    assert done.code == 2 and "error: tolerance: must be" in done.err and done.err.count("\n") == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == [older]
    done = command("export", *flags[:3], tmp_path)
    assert done.code == 2 and done.error == f"error: out: must be a file, got {tmp_path}, a folder; give another"
    done = command("export", *flags, "--format", "torch", "--int8", "true")
    assert done.code == 2 and "error: int8: must be left out with torch" in done.err
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)  # as if it were not installed
    done = command("export", *flags)
    assert done.code == 2 and "without the package onnxruntime" in done.err and "longseq[export]" in done.err


def test_permuted_pixels_are_refused_where_no_file_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = longseq.load(checkpoint)
    predictor.data.permutation = 0  # as MNIST has it
    with pytest.raises(ArgumentError, match="^inputs must be paths, because the pixels of files are permuted"):
        predictor.predict(torch.zeros(1, 8, 8))
    monkeypatch.setattr("longseq.deploy.export.load", lambda *_, **__: predictor)
    with pytest.raises(ArgumentError, match="^ckpt_path must be of a model that takes pixels in their order"):
        export(str(checkpoint))


def test_a_model_that_predicts_no_classes_is_refused() -> None:
    model = Classifier(ImageEncoder((1, 4, 4), Verma(), dim=8, depth=1, heads=2), 3, task=Masked())
    with pytest.raises(SettingError, match="predicts no classes"):
        program_of(model)


def test_a_mechanism_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    model = classifier(ImageEncoder((1, 4, 4), Verma(), dim=8, depth=1, heads=2))
    model.encoder.trunk.blocks[0].attn.proj_drop.forward = lambda tokens: tokens if tokens.sum() > 0 else -tokens
    with pytest.raises(ArgumentError, match="must be of a model that torch can trace .*; --format safetensors"):
        write_torch(program_of(model), tmp_path / "x.pt2", {})


def test_thresholds_of_several_labels_are_in_the_file(tmp_path: Path) -> None:
    model = classifier(ImageEncoder((1, 4, 4), Verma(), dim=8, depth=1, heads=2), task=MultiLabel())
    model.head.thresholds.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    program = program_of(model)
    run = write_onnx(program, tmp_path / "model.onnx", facts_of(Predictor(model, Digits())))
    facts = onnxruntime.InferenceSession(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(facts["thresholds"]) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    pixels = torch.randint(256, (3, 1, 4, 4), dtype=torch.uint8)
    assert largest_difference(model, program, run, pixels) < 1e-5


@THOROUGH
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_bound_to_the_traced_length_is_refused(format: str, tmp_path: Path) -> None:
    free = {"any_length": True, "positions": "none", "dim": 16, "depth": 1, "heads": 4, "num_mels": 20}
    path = tmp_path / "model"
    program = program_of(classifier(SpectrogramEncoder(8000, 0.4, S4D(state=16), **free)))
    run = FORMATS[format](program, path, {})
    with pytest.raises(ArgumentError, match=rf"^ckpt_path must be of a model whose {format} file takes inputs"):
        refuse_bound(program, run, format, 1e-5)


def test_a_file_keeps_values_above_full_scale_as_predict_does(tmp_path: Path) -> None:
    model = of_clips(Verma(7)).eval()
    loud, lengths = 3 * torch.randn(2, 3200), torch.tensor([3200, 3200])
    with torch.inference_mode():
        expected = model({"waveforms": loud, "lengths": lengths}).softmax(1)
        clipped = model({"waveforms": loud.clamp(-1, 1), "lengths": lengths}).softmax(1)
        assert (expected - clipped).abs().max() > 1e-5
        torch.testing.assert_close(program_of(model)(loud, lengths), expected)
