"""The contract between longseq and data: longseq uses only these members of a data module."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor, dtype

Part = tuple[str, float, float | None]  # a path, and the start and end in seconds; None is the end of the file


class InputSpec(Protocol):
    """What one input is (datamodules/inputs.py)."""

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> dtype: ...
    @property
    def shape(self) -> tuple[int | None, ...]: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def unit(self) -> str | None: ...
    @property
    def channels(self) -> tuple[str, ...] | None: ...
    @property
    def rate_hz(self) -> float | None: ...
    @property
    def has_gaps(self) -> bool: ...


@runtime_checkable
class LabelledSamples(Protocol):
    """A split: a torch data set that returns a whole batch at a time."""

    labels: Tensor

    def __len__(self) -> int: ...

    def __getitems__(self, indices: list[int]) -> Any:
        """The batch ``(inputs, labels)`` of these samples."""
        ...


class DataContract(Protocol):
    """What longseq's commands need of a LightningDataModule besides its loaders; datamodules.DataModule has all of it.

    An encoder that takes ``shape``, or ``sample_rate_hz``, ``seconds``, ``channels`` and ``gaps``, gets them from the
    data module too: its attributes ``shape``, ``sample_rate_hz``, ``seconds``, ``num_channels`` and ``has_gaps``, if it
    has them.

    Attributes:
        class_names: Names of the labels 0, 1, ...
        on_error: Whether a file that cannot be read ends a prediction (raise), or is left out (skip).
        predict_suffixes: Suffixes of the files that ``read_part`` understands, in lower case, with the dot.
        predict_parts: The files, or parts of files, that predict_dataloader reads; longseq sets it.
        remarks: What a user of the model should know about the data as a whole; complete after setup.
    """

    class_names: list[str]
    on_error: Literal["raise", "skip"]
    predict_suffixes: ClassVar[frozenset[str]]
    predict_parts: list[Part]
    remarks: list[str]

    @property
    def num_classes(self) -> int: ...

    @property
    def inputs(self) -> InputSpec: ...

    @property
    def identity(self) -> Mapping[str, int | str]:
        """Counts and digests of the data by name; a training resumes only with the same ones. Available after setup."""
        ...

    def splits(self) -> Mapping[str, LabelledSamples]:
        """The samples of train, val and test, not augmented; available after setup."""
        ...

    def parts(
        self, path: str, window: float | None = None, hop: float | None = None, any_length: bool = False
    ) -> list[Part]:
        """The parts of a file that are separate inputs.

        Args:
            path: The file.
            window: Length of each part in seconds; None for as few parts as needed.
            hop: Seconds from the start of one part to the next; None for the length of the window.
            any_length: Whether the model takes inputs of any length.
        """
        ...

    def read_part(self, part: Part) -> Tensor:
        """One input from a part of a file."""
        ...

    def longest_batch(self) -> Any:
        """The training batch that takes the most memory; available after setup."""
        ...

    def remember(self, what: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result ``what`` for this training set, read from a file or computed now; available after setup."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """What the command stats prints; available after setup."""
        ...

    def bad_files(self) -> Mapping[str, str]:
        """What is wrong with each broken file, by path."""
        ...

    def true_events(self, split: str) -> Mapping[str, Sequence[tuple[float, float, str]]]:
        """The events in each recording of a split, by path: start and end in seconds, and the name of the class. Empty
        if the labels do not describe whole recordings; available after setup."""
        ...

    def save_splits(self, path: Path) -> None:
        """Write which sample is in which split to a file; available after setup."""
        ...


_MEMBERS = [
    *DataContract.__annotations__,
    *(name for name, value in vars(DataContract).items() if not name.startswith("_") and name != "mro"),
]


def lacking(datamodule: Any) -> list[str]:
    """The names of the contract's members that a data module lacks."""
    present = {*dir(type(datamodule)), *vars(datamodule)}
    return sorted({name for name in _MEMBERS if name not in present})


def data_of(trainer: Any) -> Any:
    """The trainer's data module, if it fulfils the contract; else None. A training from Python may have any loaders."""
    datamodule = getattr(trainer, "datamodule", None)
    return None if datamodule is None or lacking(datamodule) else datamodule


def limits_of(trainer: Any) -> tuple[float, float] | None:
    """The smallest and the largest possible number in an input of the trainer's data; None if there is no bound.
    If no data module declares its inputs, they are those of pixels, 0 and 255."""
    inputs: InputSpec | None = getattr(getattr(trainer, "datamodule", None), "inputs", None)
    return (0, 255) if inputs is None else bounds(inputs)


def bounds(inputs: InputSpec) -> tuple[float, float] | None:
    return None if inputs.low is None or inputs.high is None else (inputs.low, inputs.high)
