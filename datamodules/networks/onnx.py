"""Networks in ONNX files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.compat import with_output
from datamodules.errors import DataError
from datamodules.networks._session import Session, SettingError, Shape, chosen
from datamodules.networks._stated import stated_in
from datamodules.networks.network import Network

_TYPES = {
    "tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(double)": torch.float64,
    "tensor(uint8)": torch.uint8, "tensor(int8)": torch.int8, "tensor(int16)": torch.int16,
}  # fmt: skip


class Onnx(Network):
    """A network in an ONNX file.

    Its metadata may state rate_hz, window_seconds, value_range, mean, std and class_names.
    `output` may also be a tensor inside of the network, such as the one before the classifier.

    Args:
        file: The path of the file. If its weights are in separate files, the digest does not cover them.
        common: Arguments of Network.
    """

    def __init__(self, file: str, **common: Any) -> None:
        super().__init__(**common)
        self.file = file

    def _open(self) -> Session:
        return _OnnxSession(self._path(), self.output)


class _OnnxSession(Session):
    def __init__(self, path: Path, output: str | None) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise DataError(f"{path}: needs onnxruntime; pip install 'longseq[networks]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors alone; they are raised too

        def opened(model: str | bytes) -> Any:
            try:
                return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # onnxruntime's errors share no other class
                what = str(error).strip().split("\n")[0].rpartition("] : ")[2].rstrip(".")
                raise DataError(f"{path}: onnxruntime cannot open it ({what}); export it again") from error

        session = opened(str(path))
        names = [entry.name for entry in session.get_outputs()]
        if output is not None and output not in names:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
            try:
                session = opened(with_output(path.read_bytes(), output))
            except DataError as error:
                raise SettingError("output", f"none is called {output}; give one of {', '.join(names)}") from error
        self.output = chosen(output, [entry.name for entry in session.get_outputs()])
        inputs = session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in _TYPES:
            listed = ", ".join(f"{entry.name}, {entry.type}" for entry in inputs)
            raise SettingError("file", f"{path.name} takes {listed}; export it with one input of numbers")
        (output_shape,) = (entry.shape for entry in session.get_outputs() if entry.name == self.output)
        self.input_shape, self.output_shape = _sizes(inputs[0].shape), _sizes(output_shape or [None, None])
        self.dtype, self._input = _TYPES[inputs[0].type], inputs[0].name
        self.stated = stated_in(session.get_modelmeta().custom_metadata_map)
        self._session = session

    def run(self, inputs: Tensor) -> Tensor:
        return torch.from_numpy(self._session.run([self.output], {self._input: inputs.numpy()})[0])


def _sizes(shape: Sequence[int | str | None]) -> Shape:
    return tuple(size if isinstance(size, int) and size > 0 else None for size in shape)
