"""The command ``export``: a trained model as a file that runs without longseq, checked against longseq."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.deploy._formats import FEWEST_ROWS, MARKS, Run, quantise, write_onnx, write_torch
from longseq.deploy._program import Program
from longseq.deploy.predictor import Predictor, load, permutes_pixels, refuse_no_file, refuse_others_files
from longseq.encoders.spectrogram import LogMel
from longseq.files.storage import refuse_foreign, replacing
from longseq.reports.plots import machine
from longseq.training.answers.events import thresholds_of
from longseq.training.answers.predictions import batches_of
from longseq.training.data import InputSpec, bounds
from longseq.training.throughput import timed

_ROUNDS = 20  # timed runs of a latency


def export(
    ckpt_path: str,
    format: Literal["onnx", "torch", "safetensors"] = "onnx",
    out: str | None = None,
    input: str | None = None,
    root: str | None = None,
    tolerance: float = 1e-5,
    int8: bool = False,
    allow_class: list[str] = [],  # noqa: B006  (jsonargparse shows it)
) -> None:
    """Write a trained model as a file that runs without longseq, and check the file on real inputs.

    The file takes the contents of an image or sound file and gives probabilities. It includes the normalisation and the
    spectrogram, but not the resampling. It also holds the class names and the sample rate.

    Args:
        ckpt_path: A checkpoint of fit.
        format: onnx; torch, a program of torch.export; or safetensors, a folder of weights and settings for
            longseq.load.
        out: The file or the folder; by default model.onnx, model.pt2 or model.
        input: A file to check with; by default inputs of the test split.
        root: Folder of the data, if it has moved.
        tolerance: The largest accepted difference between its probabilities and longseq's.
        int8: Whether matrices become 8-bit integers (onnx). The accuracy on the test split is printed before and after.
        allow_class: Packages whose classes the checkpoint may name, in addition to longseq's.

    Raises:
        ValueError: If the model cannot be written in this format, or the file's answers differ from longseq's.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the inputs to check with cannot be read.
    """
    if int8 and format != "onnx":
        raise ArgumentError("int8", f"must be left out with {format}, got true; it is for onnx")
    path = Path(out or {"onnx": "model.onnx", "torch": "model.pt2", "safetensors": "model"}[format])
    if format == "safetensors":
        refuse_others_files(path, "out")
    else:
        refuse_foreign(path, "out", MARKS[format])
    predictor = load(ckpt_path, allow_class=allow_class, root=root)
    if format == "safetensors":
        predictor.save_pretrained(path)
        print(f"{path}: longseq.load({str(path)!r}) reads it")
        return
    if path.is_dir():
        raise ArgumentError("out", f"must be a file, got {path}, a folder; give another")
    if permutes_pixels(predictor.data):
        what = "must be of a model that takes pixels in their order, and the data of this one permutes them"
        raise ArgumentError("ckpt_path", f"{what}; --format safetensors shares any model")
    model = predictor.model
    batch, origin = _real_inputs(predictor, input)
    program = Program(model, predictor.data.inputs)
    write = write_onnx if format == "onnx" else write_torch
    with replacing(path) as part:  # an older file stays until this one is checked
        run = write(program, part, facts_of(predictor))
        if predictor.model.encoder.any_length:
            refuse_bound(program, run, format, tolerance)
        print(f"{path}: {_size(part)}")
        print(_what_it_takes(program, format))
        difference = largest_difference(model, program, run, batch)
        print(f"largest difference of a probability: {difference:.1e}, on {origin}")
        if not difference <= tolerance:  # this refuses NaN too
            raise ArgumentError(
                "tolerance", f"must be {difference:.1e} or more for this model, got {tolerance:g}; raise it"
            )
        one = _first(batch)
        print(
            f"latency of one: {_latency(run, program.of_batch(one))}, longseq {_latency(model, (one,))} ({machine()})"
        )
        if int8:
            before = _test_figure(predictor, program, run)
            run = quantise(part)
            after = _test_figure(predictor, program, run)
            print(f"int8: {_size(part)}, latency of one {_latency(run, program.of_batch(one))}")
            print(f"test {model.task.best}: {before:.4f}, with int8 {after:.4f}")


def facts_of(predictor: Predictor) -> dict[str, Any]:
    """What a user of the exported file needs to know, as plain values."""
    encoder: Any = predictor.model.encoder
    task = type(predictor.model.task).__name__
    inputs: InputSpec = predictor.data.inputs
    has_lengths = None in inputs.shape
    facts: dict[str, Any] = {"class_names": predictor.class_names, "task": task, **_preprocessing_of(predictor)}
    network = getattr(predictor.data, "network", None)
    if network is not None:  # its outputs are the inputs of the file
        facts |= {"network": type(network).__name__, "network_sha256": network.sha256}
    if inputs.rate_hz is not None:
        facts |= {"sample_rate_hz" if encoder.kind == "sounds" else "tokens_per_second": inputs.rate_hz}
        is_limited = has_lengths and not encoder.any_length
        facts |= {"longest_seconds": round(encoder.longest / inputs.rate_hz, 6)} if is_limited else {}
    if inputs.shape != (None,) and inputs.dtype.is_floating_point:
        facts |= {"shape": list(inputs.shape), "unit": inputs.unit, "channels": inputs.channels}
    if not predictor.model.task.names_silence:
        return facts
    return facts | {"thresholds": thresholds_of(predictor.model).tolist()}


def _preprocessing_of(predictor: Predictor) -> dict[str, Any]:
    """What is done with a decoded image or sound: first what the user of the file does, then, under ``in_file``, what
    the file does."""
    encoder: Any = predictor.model.encoder
    in_file: dict[str, Any] = {
        name: [float(f"{value:.7g}") for value in getattr(encoder, name).flatten().tolist()] for name in ("mean", "std")
    }
    log_mel = getattr(encoder, "log_mel", None)
    if isinstance(log_mel, LogMel):
        spectrogram: Any = log_mel.mel.spectrogram
        in_file |= {
            "mel_bands": log_mel.mel.n_mels,
            "hop_samples": spectrogram.hop_length,
            "window_samples": spectrogram.win_length,
            "fft_samples": spectrogram.n_fft,
        }
    if encoder.kind != "images" or predictor.data.inputs.kind != "images":
        return {"in_file": in_file}
    channels, *size = encoder.picture_shape
    is_cropped = bool(getattr(predictor.data, "keep_aspect", False))
    resize = "scale until the size is covered, then crop the middle" if is_cropped else "stretch"
    resizing = {
        "size": size,
        "colours": "grey" if channels == 1 else "RGB",
        "resize": f"{resize}; bilinear, antialiased",
    }
    return {**resizing, "in_file": in_file}


@torch.inference_mode()
def largest_difference(model: Any, program: Program, run: Run, batch: Any) -> float:
    """The largest difference of a probability from longseq's, for a batch and for its first input alone."""
    largest = 0.0
    for inputs in (batch, _first(batch)):
        expected = model.predict_step(inputs, 0)
        difference = float((run(*program.of_batch(inputs)) - expected).abs().max())
        largest = max(largest, math.inf if math.isnan(difference) else difference)  # max ignores NaN
    return largest


@torch.inference_mode()
def refuse_bound(program: Program, run: Run, format: str, tolerance: float) -> None:
    """Check that the file of a model for inputs of any length takes other lengths than it was traced with, and gives
    the model's answers.

    Raises:
        ValueError: If it does not.
    """
    for arguments in program.other_examples(FEWEST_ROWS[format]):
        try:
            difference = float((run(*arguments) - program(*arguments)).abs().max())
            reason = f"a probability differs by {difference:.1e}"
        except Exception as error:  # any operator may refuse a size, with its own kind of error
            difference, reason = math.inf, str(error).strip().split("\n")[0]
        if not difference <= tolerance:
            size = " x ".join(map(str, arguments[0].shape[1:]))
            what = f"must be of a model whose {format} file takes inputs of any length, and with {size} {reason}"
            raise ArgumentError("ckpt_path", f"{what}; --format safetensors shares any model")


@torch.inference_mode()
def _test_figure(predictor: Predictor, program: Program, run: Run) -> float:
    """The task's best figure (``task.best``) on the test split, from the probabilities that a file gives."""
    model, data = predictor.model, predictor.data
    data.setup("test")
    metric = model.task.own_metrics(model.num_classes)[model.task.best]
    for inputs, labels in data.test_dataloader():
        metric.update(*model.task.measured(model.head, run(*program.of_batch(inputs)), labels))
    return float(metric.compute())


def _real_inputs(predictor: Predictor, path: str | None) -> tuple[Any, str]:
    """A batch to check with, and its description."""
    data = predictor.data
    if path is not None:
        refuse_no_file(path)
        return next(iter(batches_of(data, data.parts(path, None, None, predictor.model.encoder.any_length)))), path
    data.setup("test")
    batch = next(iter(data.test_dataloader()))[0]
    return batch, "a batch of the test split"


def _first(batch: Any) -> Any:
    """The first input of a batch, without padding."""
    if isinstance(batch, Tensor):
        return batch[:1]
    length = batch["lengths"][:1]
    if "features" in batch:
        return {"features": batch["features"][:1, : int(length)].contiguous(), "lengths": length}
    return {"waveforms": batch["waveforms"][:1, ..., : int(length)].contiguous(), "lengths": length}


@torch.inference_mode()
def _latency(run: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    times: list[float] = []
    for _ in range(_ROUNDS):
        with timed(times):
            run(*arguments)
    return f"{1000 * median(times):.2f} ms"


def _what_it_takes(program: Program, format: str) -> str:
    encoder: Any = program.model.encoder
    if encoder.kind == "features":
        tokens = "tokens" if encoder.any_length else f"tokens up to {encoder.longest}"
        return (
            f"inputs: features, float32 (batch, {tokens}, {program.inputs.shape[1]}), with zeros behind the smaller "
            "bags; lengths, int64 (batch), in tokens"
        )
    if program.has_lengths:
        longest = "of any length" if encoder.any_length else f"up to {encoder.seconds:g} s"
        shape = "(batch, samples)" if encoder.channels == 1 else f"(batch, {encoder.channels}, samples)"
        return (
            f"inputs: waveforms, float32 {shape} {longest}, at {encoder.sample_rate_hz} Hz (others must be "
            "resampled before), with silence behind the shorter ones; lengths, int64 (batch), in samples"
        )
    channels, height, width = encoder.picture_shape
    limits = bounds(program.inputs)
    what = f"{program.inputs.kind}, {str(program.inputs.dtype).removeprefix('torch.')}"
    numbers = "" if limits is None else f", {limits[0]:g} to {limits[1]:g}"
    if not encoder.any_length:
        return f"inputs: {what} (batch, {channels}, {height}, {width}){numbers}"
    sides = zip(("height", "width"), encoder.trunk.patch_embed.patch_size, strict=True)
    steps = ", ".join(f"{side} from {FEWEST_ROWS[format] * patch} in steps of {patch}" for side, patch in sides)
    return f"inputs: {what} (batch, {channels}, height, width){numbers}; {steps}"


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 2**20:.2f} MiB"
