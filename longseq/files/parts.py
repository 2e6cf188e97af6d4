"""A checkpoint as a folder to which each process writes its own parts of the weights and moments.

``meta.ckpt`` holds everything except tensors, and names the folder of the parts, with the SHA-256 of each file. The
parts are safetensors, written and read by torch.distributed.checkpoint, so nothing in the folder can hold code.
"""

import itertools
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from longseq.files.storage import (
    CheckpointError,
    StorageError,
    aside,
    read_whole,
    remove_checkpoint,
    set_aside,
    sha256_of,
    write_checkpoint,
)

META = "meta.ckpt"


def is_sharded(path: Path) -> bool:
    """Whether a path is a checkpoint in the form of such a folder."""
    return (path / META).is_file()


def write_sharded(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint. Every process calls this with its own parts, which are DTensors.

    The parts go into a new folder, and ``meta.ckpt`` is replaced when they are complete. The first checkpoint at a path
    is written beside the path and then renamed. So even if a process is killed, a complete checkpoint exists, old or
    new; or none if it is the first.

    Raises:
        StorageError: If the disk is full or the folder cannot be written; an older checkpoint stays unchanged.
    """
    tensors, rest = _apart(checkpoint)
    is_first = dist.get_rank() == 0
    beside = path.with_name(f".{path.name}.parts")
    named = [(path if is_sharded(path) else beside) / f"{time.time_ns()}"]
    dist.broadcast_object_list(named)
    (folder,) = named
    try:
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        reasons = [failed for failed, _ in error.failures.values()]
        raise StorageError(
            f"{path}: the checkpoint cannot be written ({reasons[0]}); make room or choose another "
            "--trainer.default_root_dir, then --resume: an older checkpoint is unchanged"
        ) from error
    if is_first:
        sums = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
        write_checkpoint({**rest, "parts": {"folder": folder.name, "sums": sums}}, folder.parent / META)
        if folder.parent == beside:
            if path.is_file():  # written by a training of one process
                set_aside(path)
            shutil.rmtree(path, ignore_errors=True)  # the unfinished first checkpoint of an older longseq
            os.rename(beside, path)
        for old in path.iterdir():
            if old.is_dir() and old.name != folder.name:
                shutil.rmtree(old, ignore_errors=True)  # a rank of a killed training may still write there
        shutil.rmtree(beside, ignore_errors=True)  # left by a killed process
        remove_checkpoint(aside(path))


def read_sharded(path: Path, map_location: Any = "cpu", sha256_of: Callable[[Path], str] = sha256_of) -> dict[str, Any]:
    """Read such a folder in one process, in the form of an ordinary checkpoint with whole tensors. The arguments are
    those of ``read_whole``; but the tensors of parts are on the CPU, and absent for the device ``meta``.

    Raises:
        CheckpointError: If a part is missing or damaged.
    """
    rest = read_whole(path / META, sha256_of=sha256_of)
    try:
        parts, same = rest.pop("parts"), rest.pop("same_weights")
        folder = path / Path(parts["folder"]).name
        if {file.name: sha256_of(file) for file in folder.iterdir()} != parts["sums"]:
            raise CheckpointError(f"{path}: damaged, the SHA-256 of a part is not the one in {META}; give another")
        reader = HuggingFaceStorageReader(str(folder))
        sizes: Any = reader.read_metadata().state_dict_metadata
        for name, part in sizes.items():
            if not _are_whole(part):
                raise CheckpointError(f"{path}: damaged, the parts of {name} are not those of one tensor; give another")
        if map_location == "meta":
            return rest
        whole = {name: torch.empty(part.size, dtype=part.properties.dtype) for name, part in sizes.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # this is intended
            dcp.load(whole, storage_reader=reader, no_dist=True)
        return _together(whole, rest, same)
    except CheckpointError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds of errors for broken parts
        what = " ".join(str(error).split())
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {what}); give another") from error


def _are_whole(tensor: Any) -> bool:
    """Whether the parts of a tensor fill it without overlap, and none lies outside. Otherwise torch would allocate the
    claimed size, and leave uninitialized memory where there is no part."""
    boxes = [[*zip(part.offsets, part.sizes, strict=True)] for part in tensor.chunks]
    if sum(math.prod(part.sizes) for part in tensor.chunks) != math.prod(tensor.size):
        return False
    are_inside = all(
        first >= 0 and first + size <= length
        for box in boxes
        for (first, size), length in zip(box, tensor.size, strict=True)
    )
    return are_inside and not any(
        all(max(a, b) < min(a + of_a, b + of_b) for (a, of_a), (b, of_b) in zip(one, other, strict=True))
        for one, other in itertools.combinations(boxes, 2)
    )


def _apart(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a checkpoint into the tensors of weights and moments, each once, and the rest."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    same = {}
    for name, weight in checkpoint["state_dict"].items():
        first = names.setdefault(id(weight), name)
        if first == name:
            tensors[f"state_dict/{name}"] = weight
        else:
            same[name] = first
    rest = {name: value for name, value in checkpoint.items() if name != "state_dict"} | {"same_weights": same}
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = [
            {**state, "state": {number: _numbers(moments) for number, moments in state["state"].items()}}
            for state in checkpoint["optimizer_states"]
        ]
        tensors |= {
            f"optimizer_states/{place}/{number}/{name}": value
            for place, state in enumerate(checkpoint["optimizer_states"])
            for number, moments in state["state"].items()
            for name, value in moments.items()
            if isinstance(value, Tensor)
        }
    return tensors, rest


def _numbers(moments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in moments.items() if not isinstance(value, Tensor)}


def _together(whole: Mapping[str, Tensor], rest: dict[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    weights = {}
    for name, value in whole.items():
        kind, _, within = name.partition("/")
        if kind == "state_dict":
            weights[within] = value
        else:
            place, number, moment = within.split("/")
            rest["optimizer_states"][int(place)]["state"][int(number)][moment] = value
    return rest | {"state_dict": weights | {name: weights[first] for name, first in same.items()}}
