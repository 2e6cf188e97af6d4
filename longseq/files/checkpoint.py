"""Read checkpoints of a classifier as tensors and plain values, and compare them with a model."""

import re
from collections.abc import Mapping
from functools import cache
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import CheckpointIO
from torch import Tensor

from longseq.files.description import flatten, renew_paths
from longseq.files.model_folder import read_model_folder
from longseq.files.parts import is_sharded, read_sharded
from longseq.files.storage import (
    LAYOUT,
    CheckpointError,
    read_whole,
    remove_checkpoint,
    sha256_of,
    write_checkpoint,
)

_FREE = re.compile(r"encoder\.(dropout|drop_path|checkpointing|bf16_residual|spec_augment|pretrained)\b")
TO_TEACHER = "to_teacher.weight"  # W of model.distillation features, which no trained model has
_PLAIN = bool | int | float | str
_WITHOUT = {"TimmEncoder": False, "ASTEncoder": None}  # the value of `pretrained` that loads no weights
_VALUES = 2**20  # the most values in the settings: with shared lists, a few bytes can hold any number
_EXPANDED = 2**20  # bytes; smaller tensors may be expanded, such as one mean for all channels


class Checkpoint(dict[str, Any]):
    """The content of a checkpoint, as tensors and plain values. It is passed on, so that each file is read only once.

    Attributes:
        path: A file or a folder of parts from a training, or a folder to share.
    """

    def __init__(self, path: str | PathLike) -> None:
        self.path, self._sha256_of = path, cache(sha256_of)

    def steps(self) -> int:
        """The number of training steps done. The whole checkpoint is checked, but no tensor is read.

        Raises:
            CheckpointError: If it is damaged or not a checkpoint.
        """
        return self._content("meta").get("global_step", 0)

    def read(self, map_location: Any = "cpu") -> "Checkpoint":
        """Read the content.

        Raises:
            CheckpointError: If it is damaged or not a checkpoint.
        """
        self.update(self._content(map_location))
        return self

    def _content(self, map_location: Any) -> dict[str, Any]:
        path = Path(self.path)
        if is_sharded(path):
            return read_sharded(path, map_location, self._sha256_of)
        return read_model_folder(path) if path.is_dir() else read_whole(path, map_location, self._sha256_of)

    def taken(self) -> dict[str, Any]:
        """Move the content out of this object, so that the caller can change it and free its memory."""
        content = dict(self)
        self.clear()
        return content

    @property
    def digest(self) -> str:
        """The SHA-256 of the file, or of all files of the folder, joined."""
        whole = Path(self.path)
        files = [whole] if whole.is_file() else sorted(file for file in whole.rglob("*") if file.is_file())
        return " ".join(map(self._sha256_of, files))


class WholeCheckpoints(CheckpointIO):
    """Lightning writes and reads every checkpoint through this class.

    Args:
        opened: A checkpoint that is already read. Lightning gets its content at the first load of its path.
    """

    def __init__(self, opened: Checkpoint | None = None) -> None:
        self._opened = opened

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | PathLike, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, path)

    def load_checkpoint(
        self, path: str | PathLike, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        if self._opened and Path(self._opened.path) == Path(path):
            return self._opened.taken()
        return read_any(path, map_location or "cpu")

    def remove_checkpoint(self, path: str | PathLike) -> None:
        remove_checkpoint(path)


def read_any(path: str | PathLike, map_location: Any = "cpu") -> Checkpoint:
    """Open and read a checkpoint, of longseq or another program."""
    return Checkpoint(path).read(map_location)


def good_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """The undamaged checkpoints of a run, unread and most steps first, and messages about the damaged ones."""
    good, bad = [], []
    for path in folder.glob("*.ckpt"):
        checkpoint = Checkpoint(path)
        try:
            good.append(((checkpoint.steps(), path.name == "last.ckpt", path), checkpoint))
        except CheckpointError as error:
            bad.append(str(error).partition(";")[0])
    return [checkpoint for _, checkpoint in sorted(good, key=itemgetter(0), reverse=True)], bad


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has a checkpoint, even a damaged one. Parts without meta.ckpt do not count: an older longseq was
    killed while it wrote its first checkpoint."""
    return any(path.is_file() or is_sharded(path) for path in folder.glob("*.ckpt"))


def misfit(saved: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> str:
    """A message about a weight that a checkpoint and a model do not share, or have in different shapes or kinds of
    numbers; empty if all fit. The map to a teacher's features is of a training only."""
    saved, current = ({name: state[name] for name in state if name != TO_TEACHER} for state in (saved, current))
    saved_shapes, shapes = ({name: tuple(weight.shape) for name, weight in state.items()} for state in (saved, current))
    odd = next((name for name in {**shapes, **saved_shapes} if shapes.get(name) != saved_shapes.get(name)), None)
    if odd is None:
        for name, weight in saved.items():
            if weight.is_floating_point() != current[name].is_floating_point():
                return f"{name} holds {weight.dtype}, and {current[name].dtype} by its own settings; give another"
        return ""
    both = f"{saved_shapes.get(odd, 'absent')}, and {shapes.get(odd, 'absent')} by its own settings"
    return f"{odd} is {both}; another version of longseq wrote it, or it was changed: use the original file"


def refuse_other_shapes(checkpoint: Mapping[str, Any], model: pl.LightningModule) -> None:
    """Check that a checkpoint's weights fit a model.

    Raises:
        CheckpointError: If they do not; the message names the settings that differ, or a weight, with both values.
    """
    what = misfit(checkpoint["state_dict"], model.state_dict())
    if not what:
        return
    old, new = _settings(checkpoint, model)
    differing = [
        f"model.{name} is {old.get(name)} in the checkpoint and {new.get(name)} here"
        for name in {**old, **new}
        if old.get(name) != new.get(name) and re.match(r"(encoder|task|pool|num_classes)\b", name)
    ]
    if not differing:
        raise CheckpointError(f"ckpt_path: {what}")
    raise CheckpointError(
        f"ckpt_path: does not fit the model: {', '.join(differing)}; "
        "leave the flags out, or start a new training from it with --model.init_from"
    )


def changed_settings(checkpoint: Mapping[str, Any], model: pl.LightningModule) -> list[str]:
    """The settings of the encoder and of pooling that differ from the checkpoint's, each with both values.

    With such a setting the model computes something else from the same weights. Dropout rates, masks, recomputation and
    the source of pretrained weights may differ, so they are not listed.
    """
    old, new = _settings(checkpoint, model)
    return [
        f"model.{name} is {old[name]} in the checkpoint and {new[name]} here"
        for name in old
        if re.match(r"encoder\.|pool$", name) and not _FREE.match(name) and name in new and old[name] != new[name]
    ]


def _settings(checkpoint: Mapping[str, Any], model: pl.LightningModule) -> list[dict[str, Any]]:
    """The settings of the checkpoint's model and of the given model, as plain values by path."""
    return [dict(flatten(settings)) for settings in (checkpoint["hyper_parameters"], model.hparams)]


def read_checkpoint(
    source: str | PathLike | Checkpoint, map_location: Any = "cpu", to_go_on: bool = False
) -> Checkpoint:
    """Read a checkpoint of longseq as tensors and plain types, without running code in it.

    Args:
        source: A file, a folder of parts or a folder to share, or the `Checkpoint` of one.
        map_location: The device for the tensors.
        to_go_on: Whether a training will resume from it, which needs more than weights.

    Raises:
        CheckpointError: If the file does not exist or is not a checkpoint of longseq.
    """
    checkpoint = (source if isinstance(source, Checkpoint) else Checkpoint(source)).read(map_location)
    path = checkpoint.path
    settings = checkpoint.get("hyper_parameters", {})
    if "state_dict" not in checkpoint or "encoder" not in settings or not _is_plain([settings, checkpoint.get("data")]):
        raise CheckpointError(f"{path}: not a checkpoint of longseq; give one that fit has written")
    names = settings.get("class_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"{path}: class_names holds something other than texts; give another")
    if wrong := _wrong_weight(checkpoint["state_dict"]):
        raise CheckpointError(f"{path}: {wrong}; give another")
    renew_paths([settings, checkpoint.get("data")])
    _use_own_weights(settings["encoder"])
    if to_go_on and (missing := [name for name in LAYOUT if name not in checkpoint]):
        raise CheckpointError(
            f"{path}: holds no {', '.join(missing)}, so no training can resume from it; start a new one from its "
            "weights with --model.init_from"
        )
    return checkpoint


def _wrong_weight(state: Mapping[str, Tensor]) -> str:
    """A message about the first weight that no training can have saved; empty if there is none."""
    for name, weight in state.items():
        is_short_float = weight.is_floating_point() and weight.itemsize == 1
        if weight.layout != torch.strided or weight.is_quantized or weight.is_meta or is_short_float:
            return f"{name} is not of a kind that weights have"
        # an expanded tensor of any size may have one number in the file
        if weight.nbytes > max(weight.untyped_storage().nbytes(), _EXPANDED):
            return f"{name} holds less than its shape {tuple(weight.shape)} says"
        if weight.is_floating_point() and not weight.isfinite().all():
            return "holds weights that are not finite"
    return ""


def _use_own_weights(encoder: Any) -> None:
    """Keep longseq's encoders from loading pretrained weights, because the checkpoint has the weights. longseq writes
    its checkpoints so, but a foreign one may ask for a download or a file of this machine."""
    if isinstance(encoder, dict) and isinstance(arguments := encoder.get("init_args"), dict):
        name = str(encoder.get("class_path")).rpartition(".")[2]
        if "pretrained" in arguments and name in _WITHOUT:
            arguments["pretrained"] = _WITHOUT[name]


def data_of(checkpoint: Mapping[str, Any], path: str | PathLike) -> dict[str, Any]:
    """The description of the data module that a checkpoint was trained with, with downloads turned off: a foreign
    checkpoint could ask for one, but only the user may.

    Raises:
        CheckpointError: If it names no data module.
    """
    if not isinstance(checkpoint.get("data"), dict) or not isinstance(checkpoint["data"].get("init_args"), dict):
        raise CheckpointError(f"{path}: names no data module; it was trained without one, so use it from Python")
    arguments = checkpoint["data"]["init_args"]
    return {**checkpoint["data"], "init_args": arguments | ({"download": False} if "download" in arguments else {})}


def _is_plain(value: Any) -> bool:
    """Whether a value is made of plain values only, and of at most _VALUES of them."""
    left = [value]
    for _ in range(_VALUES):
        if not left:
            return True
        now = left.pop()
        if isinstance(now, dict) and all(isinstance(name, str) for name in now):
            left += now.values()
        elif isinstance(now, list):
            left += now
        elif not (now is None or isinstance(now, _PLAIN)):
            return False
    return not left
