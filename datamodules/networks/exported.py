"""Networks in programs of torch.export."""

import json
import warnings
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import DataError
from datamodules.networks._session import Session, SettingError, Shape, chosen
from datamodules.networks._stated import stated_in
from datamodules.networks.network import Network


class Exported(Network):
    """A network in a program of torch.export (.pt2), which takes one tensor. Open only files that you trust: such a
    file holds code.

    Its extra files ending in .json may state rate_hz, window_seconds, value_range, mean, std and class_names.

    Args:
        file: The path of the file.
        common: Arguments of Network.
    """

    runs_code = True  # so a configuration or a checkpoint may name it only with --allow_class

    def __init__(self, file: str, **common: Any) -> None:
        super().__init__(**common)
        self.file = file

    def _open(self) -> Session:
        return _ExportedSession(self._path(), self.output)


class _ExportedSession(Session):
    def __init__(self, path: Path, output: str | None) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.load(path)
            self.stated = stated_in(_notes_in(path))
        except Exception as error:  # of broken bytes, anything
            what = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
            raise DataError(f"{path}: torch.export cannot open it ({what}); export it again") from error
        names = list(program.graph_signature.user_outputs)
        self._number = names.index(chosen(output, [str(name) for name in names]))
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        inputs = [values[str(name)] for name in program.graph_signature.user_inputs]
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise SettingError("file", f"{path.name} takes {len(inputs)} inputs; export it with one tensor")
        self.input_shape, self.output_shape = _sizes(inputs[0]), _sizes(values[str(names[self._number])])
        self.dtype = inputs[0].dtype
        batch = inputs[0].shape[0]
        if not isinstance(batch, int):
            limits = program.range_constraints.get(batch.node.expr)
            self.fewest = 1 if limits is None else max(int(limits.lower), 1)
        self._module = program.module()

    def run(self, inputs: Tensor) -> Tensor:
        outputs = self._module(inputs)
        return outputs if isinstance(outputs, Tensor) else list(outputs)[self._number]


def _sizes(value: Tensor) -> Shape:
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def _notes_in(path: Path) -> dict[str, Any]:
    """The contents of the extra files that end in .json, together."""
    notes: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if PurePosixPath(name).parent.name == "extra" and name.endswith(".json"):
                content = json.loads(archive.read(name))
                notes |= content if isinstance(content, dict) else {}
    return notes
