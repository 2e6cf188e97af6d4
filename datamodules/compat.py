"""Undocumented or fragile interfaces of libraries that data modules use; longseq/compat has longseq's."""

import copy
from typing import Any

from torchvision.transforms import v2


def position_in_training(trainer: Any) -> tuple[int, int]:
    """The epoch of a training, and the number of its finished batches; at an epoch's end the next epoch, and 0."""
    epoch: int = trainer.current_epoch
    batches: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    return (epoch + 1, 0) if batches >= trainer.num_training_batches else (epoch, batches)


# torchvision


def with_arguments(transform: v2.Transform, **arguments: Any) -> v2.Transform:
    """A copy of a transform with other arguments: fill, padding_mode, value or transforms."""
    changed: Any = copy.copy(transform)
    for name, argument in arguments.items():
        setattr(changed, name, argument)
    if "fill" in arguments:
        changed._fill = {"others": [float(value) for value in arguments["fill"]]}  # the one that is used
    return changed


# ONNX


def with_output(model: bytes, name: str) -> bytes:
    """An ONNX file with one more output, a tensor inside of it.

    A file is a message of Protocol Buffers, and of two messages one after the other the lists are joined: here the list
    of outputs (field 12) of the graph (field 7), with one output whose name (field 1) is given. Whether there is such a
    tensor is seen when the file is opened.
    """
    output = _field(12, _field(1, name.encode()))
    return model + _field(7, output)


def _field(number: int, content: bytes) -> bytes:
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


# TFLite


def tflite_tensors(model: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """The numbers of tensors of a TFLite file, by name: of its outputs, and of all that its operators make."""
    graph = _tflite(model).Subgraphs(0)
    made = {number for at in range(graph.OperatorsLength()) for number in graph.Operators(at).OutputsAsNumpy().tolist()}
    numbers = {number: graph.Tensors(number).Name().decode() for number in sorted(made)}
    outputs = graph.OutputsAsNumpy().tolist()
    return {numbers[number]: number for number in outputs}, {name: number for number, name in numbers.items()}


def tflite_with_output(model: bytes, number: int) -> bytes:
    """A TFLite file whose first output is the tensor of this number instead of its own."""
    changed = bytearray(model)
    _tflite(changed).Subgraphs(0).OutputsAsNumpy()[0] = number  # a view of the bytes
    return bytes(changed)


def tflite_notes(model: bytes) -> dict[str, Any]:
    """What the metadata of a TFLite file states of its first input: sample_rate, mean, std; each where it is stated.

    Mean and deviation are of values in 0..255, which is then stated as value_range.
    https://github.com/google-ai-edge/mediapipe/blob/master/mediapipe/tasks/metadata/metadata_schema.fbs
    """
    from flatbuffers import number_types
    from flatbuffers.table import Table

    def inside(table: Table | None, field: int) -> Table | None:
        offset = table and table.Offset(4 + 2 * field)
        return Table(table.Bytes, table.Indirect(table.Pos + offset)) if table and offset else None

    def first(table: Table | None, field: int) -> Table | None:
        offset = table and table.Offset(4 + 2 * field)
        if not table or not offset or not table.VectorLen(offset):
            return None
        return Table(table.Bytes, table.Indirect(table.Vector(offset)))

    def kind(table: Table, field: int) -> int:
        offset = table.Offset(4 + 2 * field)
        return table.Get(number_types.Uint8Flags, table.Pos + offset) if offset else 0

    content = _tflite_metadata(model)
    if content is None:
        return {}
    whole = Table(content, int.from_bytes(content[:4], "little"))
    tensor = first(first(whole, 3), 2)  # ModelMetadata.subgraph_metadata, SubGraphMetadata.input_tensor_metadata
    notes: dict[str, Any] = {}
    properties = inside(tensor, 3)  # TensorMetadata.content
    if properties and kind(properties, 0) == 3 and (audio := _union(properties, 1)):  # AudioProperties
        offset = audio.Offset(4)  # sample_rate
        notes |= {"sample_rate": audio.Get(number_types.Uint32Flags, audio.Pos + offset)} if offset else {}
    process = first(tensor, 4)  # TensorMetadata.process_units
    if process and kind(process, 0) == 1 and (options := _union(process, 1)):  # NormalizationOptions
        for at, name in enumerate(("mean", "std")):
            if offset := options.Offset(4 + 2 * at):
                numbers = options.GetVectorAsNumpy(number_types.Float32Flags, offset)
                notes |= {name: numbers.tolist(), "value_range": [0.0, 255.0]}
    return notes


def _union(table: Any, field: int) -> Any:
    from flatbuffers.table import Table

    offset = table.Offset(4 + 2 * field)
    if not offset:
        return None
    result = Table(bytearray(), 0)
    table.Union(result, offset)
    return result


def _tflite(model: bytes | bytearray) -> Any:
    from ai_edge_litert import schema_py_generated

    return schema_py_generated.Model.GetRootAs(model, 0)


def _tflite_metadata(model: bytes) -> bytes | None:
    whole = _tflite(model)
    for number in range(whole.MetadataLength()):
        if whole.Metadata(number).Name() == b"TFLITE_METADATA":
            return whole.Buffers(whole.Metadata(number).Buffer()).DataAsNumpy().tobytes()
    return None
