"""Build one of timm's models, with pretrained weights, those of a file, or random ones."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import ArgumentError, require


def config_of(model: str, example: str) -> Any:
    """timm's configuration of a model's pretrained weights. The error message suggests ``example`` if no name is close.

    Raises:
        ValueError: If timm has no such model.
    """
    if not timm.is_model(model):
        near = get_close_matches(model, timm.list_models(), n=1) or [example]
        raise ArgumentError("model", f"must be one of timm's, got {model!r}; {near[0]} is one")
    return timm.get_pretrained_cfg(model)


def statistics_of(config: Any, channels: int) -> list[Float[Tensor, "channels 1 1"]]:
    """Mean and deviation of pixels of 0 to 255 that pretrained weights expect."""
    of_channels = [255 * torch.tensor(values) for values in (config.mean, config.std)]
    if channels != 3:
        of_channels = [values.mean().expand(channels) for values in of_channels]
    return [values[:, None, None] for values in of_channels]


def created(model: str, pretrained: bool | str, **options: Any) -> Any:
    """A model of timm's. ``pretrained`` is True for timm's weights, the path of a file, or False for random ones.

    Raises:
        ValueError: If the weights cannot be loaded. Where the model refuses an option, timm's error is raised.
    """
    if isinstance(pretrained, str):
        what = f"must be true, false or a file of weights, got {pretrained!r}: no such file"
        require(Path(pretrained).is_file(), "pretrained", what)
        options["pretrained_cfg_overlay"] = {"file": pretrained, "custom_load": pretrained.endswith(".npz")}
    try:
        return timm.create_model(model, bool(pretrained), **options)
    except Exception as error:  # every format of weights has its own exceptions
        if not pretrained or "unexpected keyword argument" in str(error):
            raise
        what = misfit(str(error)) or str(error).strip().split("\n")[0] or type(error).__name__
        what = f"must have weights for {model} ({what}); give the path of a file, or false for random ones"
        raise ArgumentError("pretrained", what) from error


def misfit(message: str) -> str:
    """Which weights of a file do not fit the model, from torch's message; empty if it is another message."""
    shapes = r"size mismatch for ([\w.]+): .*?with shape torch\.Size\(\[(.*?)\]\).*?model is torch\.Size\(\[(.*?)\]\)"
    odd = [
        f"{name} is ({theirs}) in the file and ({ours}) in the model"
        for name, theirs, ours in re.findall(shapes, message)
    ]
    for kind, where in (("Missing", "lacks"), ("Unexpected", "alone has")):
        if names := re.search(rf"{kind} key\(s\) in state_dict: (.*?)\. ?(?:\n|$)", message):
            odd += [f"the file {where} {name}" for name in re.findall(r'"([^"]+)"', names[1])]
    return odd[0] + (f", and {len(odd) - 1} more" if len(odd) > 1 else "") if odd else ""
