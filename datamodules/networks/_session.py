"""A network that was opened, whatever library runs it: what its input and its output are, and what it gives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Shape = tuple[int | None, ...]  # None is an axis of any size
Stated = dict[str, Any]  # what a file states of its network: names of _stated.py and their values


class Session(ABC):
    """An open network.

    Attributes:
        input_shape, output_shape: The shapes of its input and of the chosen output.
        dtype: The type of its input.
        stated: What the file states.
        fewest: The smallest batch that it takes.
    """

    input_shape: Shape
    output_shape: Shape
    dtype: torch.dtype
    stated: Stated
    fewest: int = 1

    @abstractmethod
    def run(self, inputs: Tensor) -> Tensor:
        """The chosen output for an input of the shape and the type above."""


class SettingError(Exception):
    """A network cannot be used as it was asked for.

    Args:
        argument: The argument of the network that is wrong, or that would help.
        what: The message: "<what>; <remedy>".
    """

    def __init__(self, argument: str, what: str) -> None:
        super().__init__(argument, what)
        self.argument, self.what = argument, what


def chosen(output: str | None, names: Sequence[str], others: Sequence[str] = ()) -> str:
    """The name of the output: the one asked for, or the only one.

    Args:
        output: The name that the user asked for.
        names: The outputs of the network.
        others: Tensors inside of the network that may be asked for too.

    Raises:
        SettingError: If there are several and none was asked for, or there is none of this name.
    """
    if output is None and len(names) == 1:
        return names[0]
    if output is not None and (output in names or output in others):
        return output
    what = f"none is called {output}" if output is not None else "is not given"
    raise SettingError("output", f"{what}; give one of {', '.join(names)}")


@dataclass(frozen=True)
class Form:
    """How a network takes its inputs.

    Attributes:
        kind: What it takes.
        batch: The number of inputs that it takes at once; None for any number.
        has_batch: Whether its input has an axis for them.
        channels: The channels of images; 1 for sounds.
        sides: Its samples, or its height and width; None is any number.
        is_channels_last: Whether the channels are the last axis.
    """

    kind: Literal["sounds", "images"]
    batch: int | None
    has_batch: bool
    channels: int
    sides: Shape
    is_channels_last: bool = False


def form_of(shape: Shape) -> Form:
    """The form of inputs of this shape: (samples), (batch, samples), (batch, 1, samples), (batch, channels, height,
    width) or (batch, height, width, channels).

    Raises:
        SettingError: If it is another one.
    """
    match shape:
        case (samples,):
            return Form("sounds", 1, False, 1, (samples,))
        case (batch, samples) | (batch, 1, samples):
            return Form("sounds", batch, True, 1, (samples,))
        case (batch, (1 | 3) as channels, height, width):
            return Form("images", batch, True, channels, (height, width))
        case (batch, height, width, (1 | 3) as channels):
            return Form("images", batch, True, channels, (height, width), is_channels_last=True)
    written = ", ".join("any" if size is None else str(size) for size in shape)
    raise SettingError("file", f"takes inputs ({written}), neither sounds nor images; export it with those")


def vectors(outputs: Tensor, batch: int) -> Tensor:
    """The outputs of a batch as (batch, f).

    Raises:
        SettingError: If they are not one vector for each input.
    """
    sizes = [size for size in outputs.shape[1:] if size != 1]
    if len(outputs) != batch or len(sizes) > 1:
        what = f"is {tuple(outputs.shape)} for {batch} inputs, not one vector for each"
        raise SettingError("output", f"{what}; name an output that is")
    return outputs.reshape(batch, -1)
