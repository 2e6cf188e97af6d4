"""Small networks in files, each with the weights that tests compute the same from."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def onnx_of_sounds(path: Path, window: int | None = 8, batch: int | str = "batch", **notes: Any) -> np.ndarray:
    """An ONNX file: embedding = inputs @ weights, scores = relu(embedding). Returns the weights (8, 3)."""
    import json

    import onnx
    from onnx import TensorProto, helper

    weights = np.random.default_rng(0).standard_normal((window or 8, 3)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["waveform", "weights"], ["embedding"]),
        helper.make_node("Relu", ["embedding"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("waveform", TensorProto.FLOAT, [batch, window or "samples"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 3])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for name, value in notes.items():
        model.metadata_props.add(key=name, value=json.dumps(value))
    onnx.save(model, path)
    return weights


def onnx_of_images(path: Path, kind: str = "float", channels_last: bool = False, **notes: Any) -> None:
    """An ONNX file: the mean of each channel of images of 4 x 6 pixels."""
    import json

    import onnx
    from onnx import TensorProto, helper

    shape: list[Any] = ["batch", 4, 6, 3] if channels_last else ["batch", 3, 4, 6]
    axes = [1, 2] if channels_last else [2, 3]
    nodes = [
        helper.make_node("Cast", ["image"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["numbers"], ["means"], axes=axes, keepdims=0),
    ]
    type_of = {"float": TensorProto.FLOAT, "uint8": TensorProto.UINT8}[kind]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", type_of, shape)],
        [helper.make_tensor_value_info("means", TensorProto.FLOAT, ["batch", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for name, value in notes.items():
        model.metadata_props.add(key=name, value=json.dumps(value))
    onnx.save(model, path)


class Small(nn.Module):
    """The embedding (b, 2) of windows (b, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, waveforms: Tensor) -> Tensor:
        return self.linear(waveforms).tanh()


def exported(
    path: Path, module: nn.Module, example: Tensor, batch: Any = torch.export.Dim.DYNAMIC, **notes: Any
) -> None:
    """A program of torch.export."""
    import json

    shapes = None if batch is None else ({0: batch},)
    program = torch.export.export(module.eval(), (example,), dynamic_shapes=shapes)
    torch.export.save(program, path, extra_files={"notes.json": json.dumps(notes)})


def tflite_of_sounds(path: Path, rate_hz: int | None = None, batch: int = -1) -> np.ndarray:
    """A TFLite file: embedding = inputs @ weights, scores = relu(embedding). Returns the weights (8, 3)."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    weights = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)

    def tensor(name: str, shape: list[int], buffer: int) -> Any:
        made = schema.TensorT()
        made.name, made.type, made.buffer = name, schema.TensorType.FLOAT32, buffer
        made.shape = [abs(size) for size in shape]
        made.shapeSignature = shape
        made.hasRank = True
        return made

    def buffer(content: bytes = b"") -> Any:
        made = schema.BufferT()
        made.data = np.frombuffer(content, np.uint8) if content else None
        return made

    def operator(code: int, inputs: list[int], outputs: list[int], kind: int = 0, options: Any = None) -> Any:
        made = schema.OperatorT()
        made.opcodeIndex, made.inputs, made.outputs = code, inputs, outputs
        made.builtinOptionsType, made.builtinOptions = kind, options
        return made

    def code(number: int) -> Any:
        made = schema.OperatorCodeT()
        made.builtinCode = made.deprecatedBuiltinCode = number
        made.version = 1
        return made

    graph, model = schema.SubGraphT(), schema.ModelT()
    graph.name = "small"
    graph.tensors = [
        tensor("waveform", [batch, 8], 0), tensor("weights", [3, 8], 1), tensor("embedding", [batch, 3], 0),
        tensor("scores", [batch, 3], 0),
    ]  # fmt: skip
    graph.inputs, graph.outputs = [0], [3]
    graph.operators = [
        operator(0, [0, 1, -1], [2], schema.BuiltinOptions.FullyConnectedOptions, schema.FullyConnectedOptionsT()),
        operator(1, [2], [3]),
    ]
    model.version, model.description = 3, "small"
    model.operatorCodes = [code(schema.BuiltinOperator.FULLY_CONNECTED), code(schema.BuiltinOperator.RELU)]
    model.subgraphs = [graph]
    model.buffers = [buffer(), buffer(weights.T.copy().tobytes())]
    if rate_hz is not None:
        metadata = schema.MetadataT()
        metadata.name, metadata.buffer = "TFLITE_METADATA", 2
        model.metadata = [metadata]
        model.buffers.append(buffer(_metadata_of_sounds(rate_hz)))
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return weights


def _metadata_of_sounds(rate_hz: int) -> bytes:
    """ModelMetadata of one input, whose AudioProperties hold the rate, by the fields of metadata_schema.fbs."""
    import flatbuffers

    builder = flatbuffers.Builder(256)

    def table(size: int, fields: dict[int, Any]) -> int:
        builder.StartObject(size)
        for number, add in fields.items():
            add(number)
        return builder.EndObject()

    def vector(offset: int) -> int:
        builder.StartVector(4, 1, 4)
        builder.PrependUOffsetTRelative(offset)
        return builder.EndVector()

    def offset(value: int) -> Any:
        return lambda number: builder.PrependUOffsetTRelativeSlot(number, value, 0)

    audio = table(2, {0: lambda number: builder.PrependUint32Slot(number, rate_hz, 0)})
    content = table(3, {0: lambda number: builder.PrependUint8Slot(number, 3, 0), 1: offset(audio)})
    tensor = table(7, {3: offset(content)})
    inputs = vector(tensor)
    graph = table(8, {2: offset(inputs)})
    graphs = vector(graph)
    builder.Finish(table(8, {3: offset(graphs)}), b"M001")
    return bytes(builder.Output())
