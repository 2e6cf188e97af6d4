"""Write a Program to a file, as ONNX or as a program of torch.export, and run the file."""

import gc
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.deploy._program import Program
from longseq.files.storage import replacing

Run = Callable[..., Tensor]  # from the arguments of a Program to probabilities

_FACTS = "longseq.json"  # the file in a program of torch.export that describes it

MARKS = {"onnx": rb"class_names", "torch": re.escape(_FACTS.encode())}  # bytes that only our files hold

# The fewest rows, and columns, of tokens in an image for a file whose model takes any size: torch.export treats a
# dimension of 1 as fixed.
FEWEST_ROWS = {"onnx": 1, "torch": 2}


def write_onnx(program: Program, path: Path, facts: Mapping[str, Any]) -> Run:
    """Write an ONNX file, with each fact as JSON in its metadata, and return a function that runs it.

    Raises:
        ValueError: If a package that this needs is not installed, or torch cannot trace the model.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _require(package)
    limits = {
        program.name_of_axis: program.length_of_row
    }  # without this limit, torch would trace a second time to find it
    written = _traced(
        torch.onnx.export,
        program,
        program.examples(),
        dynamo=True,
        dynamic_shapes=program.free_dimensions(lambda name: torch.export.Dim(name, min=limits.get(name))),
        input_names=program.names,
        output_names=["probabilities"],
        verbose=False,
    )
    written.model.metadata_props.update({name: json.dumps(value) for name, value in facts.items()})
    written.save(path)
    return run_onnx(path)


def run_onnx(path: Path) -> Run:
    """A function that runs an ONNX file, with as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*arguments: Tensor) -> Tensor:
        arrays = {name: argument.numpy() for name, argument in zip(names, arguments, strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    return run


def quantise(path: Path) -> Run:
    """Replace an ONNX file with one whose matrices are 8-bit integers, and return a function that runs it. Each output
    of a matrix has a scale of its own. Vectors do not change, and convolutions, which compute the spectrogram too."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path, load_external_data=False).graph
    vectors = {entry.name for entry in graph.initializer if len(entry.dims) < 2}
    kept = [node.name for node in graph.node if vectors & {*node.input[:2]}]  # onnxruntime fails at their one scale
    products = ["MatMul", "Gemm"]
    with replacing(path) as part, _quiet():
        quantize_dynamic(path, part, products, per_channel=True, weight_type=QuantType.QInt8, nodes_to_exclude=kept)
    return run_onnx(path)


def write_torch(program: Program, path: Path, facts: Mapping[str, Any]) -> Run:
    """Write a program of torch.export that contains the facts as longseq.json, and return a function that runs it."""
    free = program.free_dimensions(lambda name: torch.export.Dim.DYNAMIC)  # torch.export finds the limits itself
    exported = _traced(torch.export.export, program, program.examples(), dynamic_shapes=free)
    with _quiet():
        content = io.BytesIO()  # a full disk would abort torch's own writer
        torch.export.save(exported, content, extra_files={_FACTS: json.dumps(facts)})
    path.write_bytes(content.getbuffer())
    return run_torch(path)


def run_torch(path: Path) -> Run:
    """A function that runs a program of torch.export."""
    with _quiet():
        return torch.inference_mode()(torch.export.load(path).module())


def _require(package: str) -> None:
    try:
        __import__(package)
    except ImportError as error:
        what = f"must be torch or safetensors without the package {package}, got onnx"
        raise ArgumentError("format", f"{what}; pip install 'longseq[export]'") from error


def _traced(trace: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The model as an exporter traces it.

    Raises:
        ValueError: If the exporter cannot trace the model, which can happen with a user's own mechanism.
    """
    traced = reason = None
    try:
        with _quiet():
            traced = trace(*arguments, **options)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    # Tracers leave subclasses with the modules' names behind; until they are collected, a name would be ambiguous.
    # The tracer's error would keep them alive, so it is dropped first, and the error below has no cause.
    gc.collect()
    if reason is not None:
        what = f"must be of a model that torch can trace ({reason})"
        raise ArgumentError("ckpt_path", f"{what}; --format safetensors shares any model")
    return traced


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress that the exporters print and log."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
