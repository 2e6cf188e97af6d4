"""A folder to share a model: model.safetensors and config.json. Neither file can hold code."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from longseq.files.storage import CheckpointError, refuse_foreign, replacing

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FILES = (WEIGHTS, CONFIG)
_OUR_WEIGHTS, _OUR_CONFIG = rb'"encoder\.mean":\{"dtype"', rb'\A\{\s*"longseq":'


def refuse_other_model(folder: Path, argument: str) -> None:
    """Check that a folder holds no model of another program.

    Raises:
        ValueError: If it holds one; the message names the argument.
    """
    refuse_foreign(folder / CONFIG, argument, _OUR_CONFIG)
    if not (folder / CONFIG).exists():  # huggingface_hub deletes it first, so a killed process leaves only the weights
        refuse_foreign(folder / WEIGHTS, argument, _OUR_WEIGHTS)


def write_model_folder(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Write the weights and descriptions of a checkpoint. Weights shared by several names are written once."""
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, weight in checkpoint["state_dict"].items():
        place = weight.data_ptr(), weight.shape, weight.stride()
        first = names.setdefault(place, name) if weight.numel() else name
        if first == name:
            tensors[name] = weight.detach().cpu().contiguous()
        else:
            same[name] = first
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "longseq": checkpoint.get("version"),
        "classifier": checkpoint["hyper_parameters"],
        "datamodule": checkpoint["data"],
        "same_weights": same,
    }
    with replacing(folder / WEIGHTS) as path:  # replaces both files or neither
        path.write_bytes(save(tensors, {"format": "pt"}))
        path.with_name(CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_model_folder(folder: Path) -> dict[str, Any]:
    """Read a folder of write_model_folder, in the form of a checkpoint.

    Raises:
        CheckpointError: If a file is missing or damaged, or has other content.
    """
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        what = f"holds no {' and '.join(FILES)}"
        of_runs = sorted(folder.glob("*/best.ckpt"), key=os.path.getmtime)  # if the folder is runs/NAME
        example = of_runs[-1] if of_runs else folder / "best.ckpt"
        raise CheckpointError(f"{folder}: {what}; give a checkpoint such as {example}") from error
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        what = f"{CONFIG} or {WEIGHTS} is damaged ({type(error).__name__})"
        raise CheckpointError(f"{folder}: {what}; export the model again") from error
    try:
        same = {str(name): weights[first] for name, first in settings["same_weights"].items()}
        return {
            "state_dict": weights | same,
            "hyper_parameters": dict(settings["classifier"]),
            "data": settings["datamodule"],
            "pytorch-lightning_version": pl.__version__,  # Lightning requires it
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{folder}: {CONFIG} is not longseq's; export the model again") from error
