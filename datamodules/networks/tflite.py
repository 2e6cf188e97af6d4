"""Networks in TFLite files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.compat import tflite_notes, tflite_tensors, tflite_with_output
from datamodules.errors import DataError
from datamodules.networks._session import Session, SettingError, Shape, chosen
from datamodules.networks._stated import stated_in
from datamodules.networks.network import Network


class TFLite(Network):
    """A network in a TFLite file. Its metadata may state the rate, the mean and the deviation of inputs.

    `output` may also be a tensor inside of the network, such as the one before the classifier.

    Args:
        file: The path of the file.
        common: Arguments of Network.
    """

    def __init__(self, file: str, **common: Any) -> None:
        super().__init__(**common)
        self.file = file

    def _open(self) -> Session:
        return TFLiteSession(self._path(), self.output)


class TFLiteSession(Session):
    """An open TFLite file. `output` is the name of a tensor, or None for the only output."""

    def __init__(self, path: Path, output: str | None) -> None:
        try:
            from ai_edge_litert.interpreter import Interpreter
        except ImportError as error:
            raise DataError(f"{path}: needs ai-edge-litert; pip install 'longseq[networks]'") from error
        content = path.read_bytes()
        try:
            outputs, others = tflite_tensors(content)
            name = chosen(output, list(outputs), list(others))
            if name not in outputs:
                content = tflite_with_output(content, others[name])
            self._interpreter = Interpreter(model_content=content, num_threads=torch.get_num_threads())
            notes = tflite_notes(content)
        except SettingError:
            raise
        except Exception as error:  # of broken bytes, anything
            what = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
            raise DataError(f"{path}: LiteRT cannot open it ({what}); convert it again") from error
        inputs = self._interpreter.get_input_details()
        if len(inputs) != 1:
            raise SettingError("file", f"{path.name} takes {len(inputs)} inputs; convert it with one")
        self._input = inputs[0]
        (self._output,) = (
            entry
            for entry in self._interpreter.get_output_details()
            if entry["index"] == (outputs.get(name, others.get(name)))
        )
        self.input_shape, self.output_shape = _sizes(self._input), _sizes(self._output)
        scale, _ = self._input["quantization"]
        self._is_quantized = bool(scale) and len(self.input_shape) < 4  # images of integers are taken as they are
        self.dtype = torch.float32 if self._is_quantized else _torch_type(self._input["dtype"])
        self.stated = stated_in(notes)
        self._shape: tuple[int, ...] | None = None

    def run(self, inputs: Tensor) -> Tensor:
        interpreter, index = self._interpreter, self._input["index"]
        if self._shape != tuple(inputs.shape):
            if tuple(self._input["shape"]) != tuple(inputs.shape) or self._shape is not None:
                interpreter.resize_tensor_input(index, list(inputs.shape))
            interpreter.allocate_tensors()
            self._shape = tuple(inputs.shape)
        values = inputs.numpy()
        if self._is_quantized:
            scale, zero = self._input["quantization"]
            limits = np.iinfo(self._input["dtype"])
            values = np.clip(np.round(values / scale) + zero, limits.min, limits.max).astype(self._input["dtype"])
        interpreter.set_tensor(index, values)
        interpreter.invoke()
        result = interpreter.get_tensor(self._output["index"])
        scale, zero = self._output["quantization"]
        if scale and result.dtype != np.float32:
            result = scale * (result.astype(np.float32) - zero)
        return torch.from_numpy(result)


def _sizes(details: dict[str, Any]) -> Shape:
    """The shape of a tensor; its first axis is a batch of any size where the file says so."""
    return tuple(None if size < 0 else int(size) for size in details["shape_signature"])


def _torch_type(kind: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, kind)).dtype
