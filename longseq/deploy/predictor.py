"""A trained model that answers: ``longseq.load``, from a checkpoint, a shared folder, or the Hugging Face Hub."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from jaxtyping import Float
from PIL import Image
from torch import Tensor

import longseq
from longseq.arguments import ArgumentError
from longseq.deploy import card
from longseq.files.checkpoint import CheckpointError
from longseq.files.description import describe
from longseq.files.model_folder import FILES, refuse_other_model, write_model_folder
from longseq.training.answers.events import Event, Settings
from longseq.training.answers.predictions import (
    EventDetector,
    FilePredictions,
    Prediction,
    answers,
    batches_of,
    features_of_files,
)
from longseq.training.classifier import Answers, Classifier, model_and_data
from longseq.training.data import InputSpec, lacking

_LOUDEST = 100.0  # no recording with full scale 1 is 40 dB louder: larger values have another unit


class Predictor(ModelHubMixin, library_name="longseq", tags=["longseq"]):
    """A trained model with the data module that reads its inputs. ``longseq.load`` makes one.

    It gives the same answers as the command ``predict``. Its methods save_pretrained, from_pretrained and push_to_hub
    come from huggingface_hub. They write and read model.safetensors, config.json and the model card README.md; none of
    these files can hold code. Several threads may use it at the same time.

    Args:
        model: The classifier.
        data: A data module that fulfils DataContract.
        source: The checkpoint or the folder that it was loaded from; the model card beside it is shared too.

    Attributes:
        model, data, source: As in Args.
        class_names: The names of the classes.
    """

    def __init__(self, model: Classifier, data: Any, source: str | PathLike | None = None) -> None:
        self.model, self.data, self.source = model.eval(), data, source
        self.class_names = model.class_names

    def predict(
        self, inputs: Any, window: float | None = None, hop: float | None = None, top: int | None = None
    ) -> list[Prediction]:
        """Predict the classes of files, images or arrays.

        Args:
            inputs: A path, the bytes of an image or sound file, an image of Pillow, or an array, or a list of them. An
                array is a waveform (samples,) of floats at the model's rate, with full scale 1; or (channels, samples),
                if the model takes several; or an image (channels, height, width) of the model's size, 0 to 255; or an
                image (height, width, 3) of any size, which is resized as a file is; or features (tokens, f); or what a
                user's data module defines. A model with a frozen network takes what the network takes.
            window: Seconds of a window. Sound files are split into windows, each with its own prediction.
            hop: Seconds from one window to the next.
            top: How many classes to name, the most probable first.

        Returns:
            A prediction for each input, or for each window of each input.

        Raises:
            DataError: If a file cannot be read.
            ValueError: If a window or a number of classes is out of its range, or an array has another form.
        """
        predictions: list[Prediction] = []
        has_times = window is not None or hop is not None
        for source in _listed(inputs):
            answered = self._answers(source, window, hop)
            of_file = FilePredictions(self.model, has_times, top)
            for answer in answered:
                predictions += of_file.add(answer)
        return predictions

    def events(
        self,
        recording: Any,
        threshold: float | None = None,
        window: float | None = None,
        hop: float | None = None,
        smooth: float = Settings().smooth,
        gap: float = Settings().gap,
        shortest: float = Settings().shortest,
    ) -> list[Event]:
        """Find the events in a recording, with their times.

        Args:
            recording: A path, or a waveform as predict takes it.
            threshold: The probability that an event must reach. It lasts while its probability is at least half of
                that. None means the model's own threshold.
            window: Seconds of a window; the recording is split into windows.
            hop: Seconds from one window to the next.
            smooth: Seconds over which probabilities are averaged.
            gap: Seconds of silence that do not end an event.
            shortest: Events shorter than this, in seconds, are left out.

        Raises:
            DataError: If the file cannot be read.
            ValueError: If a setting is out of its range, the model takes images, or an array is not a waveform.
        """
        answered = self._answers(recording, window, hop, scores=True)
        detector = EventDetector(self.model, Settings(threshold, smooth, gap, shortest))
        for answer in answered:
            detector.add(answer)
        (result,) = detector.heard()
        return result.events

    def embed(self, inputs: Any, window: float | None = None, hop: float | None = None) -> Float[Tensor, "inputs dim"]:
        """The features of files or arrays before the head, (inputs, dim). The features of a file split into windows are
        their mean. Arguments and errors are those of predict."""
        rows = []
        for source in _listed(inputs):
            answered = self._answers(source, window, hop, probabilities=False, features=True)
            rows += [row for _, row in features_of_files((answer.part, answer.features) for answer in answered)]
        return torch.stack(rows) if rows else torch.empty(0, self.model.encoder.dim)

    def _answers(self, source: Any, window: float | None, hop: float | None, **wanted: bool) -> Iterator[Answers]:
        """The model's answers to the parts of a file, or to an array."""
        if isinstance(source, str | PathLike):
            parts = self.data.parts(str(source), window, hop, self.model.encoder.any_length)
            return answers(self.model, batches_of(self.data, parts), parts, **wanted)
        content = self._content_of(source)
        if content is not None:
            parts = self.data.parts(self._as_file(content), window, hop, self.model.encoder.any_length)
            unnamed = [("", start, end) for _, start, end in parts]
            return answers(self.model, batches_of(self.data, parts), unnamed, **wanted)
        if window is not None or hop is not None:
            raise ArgumentError("window", "must be None for an array; cut it yourself, or write it to a file")
        values = _tensor_of(source)
        inputs = self._inputs
        axis = inputs.shape.index(None) if None in inputs.shape else -1  # time, if the inputs have a rate
        is_suitable = values.ndim == len(inputs.shape)  # else it is refused below
        seconds = values.shape[axis] / inputs.rate_hz if inputs.rate_hz is not None and is_suitable else None
        return answers(self.model, self._batch_of(values), [("", 0.0, seconds)], **wanted)

    def _content_of(self, source: Any) -> bytes | Image.Image | None:
        """The content of a file that the data module reads; None for other inputs, which are arrays of numbers."""
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if isinstance(source, Image.Image) or self._inputs.kind != "images" or not hasattr(source, "shape"):
            return source if isinstance(source, Image.Image) else None
        shape = tuple(source.shape)
        if len(shape) != 3 or shape[2] != 3 or shape[0] == self._inputs.shape[0]:
            return None
        values = _tensor_of(source)
        _refuse_no_pixels(values)
        return Image.fromarray(values.round().to(torch.uint8).cpu().numpy())

    def _as_file(self, content: bytes | Image.Image) -> Any:
        """What the data module takes in place of a path.

        Raises:
            ValueError: If it takes no such content.
        """
        takes = {"images": (bytes, Image.Image), "sounds": (bytes,)}.get(self._inputs.kind, ())
        if not isinstance(content, takes) or not hasattr(self.data, "as_file"):
            what = f"must be paths or arrays of {self._inputs.kind}, or a list of them, got {type(content).__name__}"
            raise ArgumentError("inputs", f"{what}; pass a path or an array")
        return self.data.as_file(content)

    @property
    def _inputs(self) -> InputSpec:
        """What an array must be."""
        return self.data.inputs if self._network is None else self.data.raw_inputs

    @property
    def _network(self) -> Any:
        return getattr(self.data, "network", None)

    def _batch_of(self, values: Tensor) -> Iterator[Any]:
        if permutes_pixels(self.data):
            raise ArgumentError("inputs", "must be paths, because the pixels of files are permuted; give paths")
        inputs = self._inputs
        if inputs.shape[-1:] == (None,):
            _refuse_no_waveform(values, inputs)
            values = values.float()
        elif inputs.dtype == torch.uint8:
            _refuse_no_pixels(values)
        else:
            _refuse_other_numbers(values, inputs)
            values = values.to(inputs.dtype)
        if self._network is not None:
            values = self.data.embedded(values)
        given: InputSpec = self.data.inputs
        if None not in given.shape:
            yield values[None]
        else:
            length = torch.tensor([values.shape[given.shape.index(None)]])
            yield {"features" if given.kind == "features" else "waveforms": values[None], "lengths": length}

    def save_pretrained(self, save_directory: str | PathLike, **options: Any) -> str | None:
        """Write model.safetensors, config.json and the model card README.md into a folder.

        Args:
            save_directory: The folder.
            options: Options of huggingface_hub.

        Raises:
            ValueError: If the folder holds files of these names that longseq did not write.
        """
        refuse_others_files(Path(save_directory), "save_directory")
        return super().save_pretrained(Path(save_directory), **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        described = {"hyper_parameters": dict(self.model.hparams), "data": describe(self.data)}
        weights = self.model.state_dict()
        write_model_folder({**described, "state_dict": weights, "version": longseq.__version__}, save_directory)
        if self.source is not None:
            of_run = Path(self.source) if Path(self.source).is_dir() else Path(self.source).parent
            card.replace_card(of_run, save_directory)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, revision: str | None, cache_dir: str | Path | None, force_download: bool,
        local_files_only: bool, token: str | bool | None, **options: Any,
    ) -> "Predictor":  # fmt: skip
        if not Path(model_id).is_dir():
            model_id = snapshot_download(
                model_id, revision=revision, cache_dir=cache_dir, force_download=force_download,
                local_files_only=local_files_only, token=token, allow_patterns=[*FILES, *card.FILES],
            )  # fmt: skip
        return load(model_id, **options)


def load(
    source: str | PathLike, device: Any = "cpu", allow_class: Sequence[str] = (), root: str | None = None
) -> Predictor:
    """A trained model, ready to predict.

    Args:
        source: A checkpoint of fit, a folder that ``export --format safetensors`` or save_pretrained has written, or
            the name of a model on the Hugging Face Hub, such as ``someone/birds``.
        device: The device that it runs on.
        allow_class: Packages whose classes the checkpoint may name, in addition to longseq's.
        root: Folder of the data that it was trained with, if it has moved; predictions do not need it.

    Raises:
        CheckpointError: If the source is not a checkpoint, or does not describe its model and its data.

    Example:
        >>> model = longseq.load("runs/fsdd/0/best.ckpt")
        >>> model.predict("call.wav", window=1.0)
    """
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and Path(source).suffix != ".ckpt"
    if is_name and not Path(source).exists() and not Path(source).parent.is_dir():
        try:
            return Predictor.from_pretrained(str(source), device=device, allow_class=allow_class, root=root)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            what = "no such folder, and the Hugging Face Hub does not give it"
            raise CheckpointError(f"{source}: {what} ({type(error).__name__}); give a checkpoint of fit") from error
    model, data = model_and_data(source, allow_class, root)
    missing = lacking(data)
    if missing:
        raise CheckpointError(f"{source}: its data module lacks {', '.join(missing)}; give another checkpoint")
    if hasattr(data, "download"):
        data.download = False  # predictions need no data set
    data.num_workers = 0  # starting processes for each file would take longer than reading it
    return Predictor(model.to(device), data, source)


def refuse_others_files(folder: Path, argument: str) -> None:
    """Check that sharing a model overwrites no file that longseq did not write.

    Raises:
        ValueError: If it would; the message names the argument.
    """
    refuse_other_model(folder, argument)
    card.refuse_other_card(folder, argument)


def permutes_pixels(data: Any) -> bool:
    """Whether a data module permutes the pixels of the files that it reads, as MNIST may."""
    return getattr(data, "permutation", None) is not None


def refuse_no_file(path: str) -> None:
    """Check the flag --input of a command that takes one file.

    Raises:
        ValueError: If there is no such file.
    """
    if not Path(path).is_file():
        what = "a folder; give one of its files" if Path(path).is_dir() else "no such file"
        raise ArgumentError("input", f"must be an image file or a sound file, got {path}: {what}")


def _refuse_no_pixels(values: Tensor) -> None:
    """Check an array of pixels.

    Raises:
        ValueError: If its numbers are not in 0..255, or are floats in 0..1, as torchvision's ToTensor makes them.
    """
    lowest, highest = values.aminmax() if values.numel() else (values.new_zeros(()), values.new_zeros(()))
    if not 0 <= lowest <= highest <= 255:
        what = f"got values from {float(lowest):g} to {float(highest):g}"
        raise ArgumentError("inputs", f"must be finite pixels in 0..255, {what}; scale them")
    if values.is_floating_point() and 0 < highest <= 1:
        raise ArgumentError("inputs", f"must be pixels in 0..255, got floats up to {float(highest):g}; times 255")


def _refuse_other_numbers(values: Tensor, inputs: InputSpec) -> None:
    """Check an array against what the data module says of its inputs.

    Raises:
        ValueError: If it has another shape, or numbers that are not finite or out of their range.
    """
    sides = zip(values.shape, inputs.shape, strict=False)
    if values.ndim != len(inputs.shape) or any(side not in (wanted, None) for side, wanted in sides if wanted):
        wanted = tuple("any" if side is None else side for side in inputs.shape)
        raise ArgumentError("inputs", f"must be {inputs.kind} {wanted}, got {tuple(values.shape)}; give one of them")
    low, high = (-math.inf if inputs.low is None else inputs.low), (math.inf if inputs.high is None else inputs.high)
    if values.numel() and not (values.isfinite().all() and low <= values.min() and values.max() <= high):
        lowest, highest = map(float, values.aminmax())
        what = f"must be finite numbers in {low:g}..{high:g}, got values from {lowest:g} to {highest:g}"
        raise ArgumentError("inputs", f"{what}; scale them as the training data, fill gaps")


def _refuse_no_waveform(values: Tensor, inputs: InputSpec) -> None:
    """Check a waveform, as files are checked.

    Raises:
        ValueError: If it is not a waveform of floats with full scale 1, or has other channels than the model's inputs.
    """
    if tuple(values.shape[:-1]) != inputs.shape[:-1] or values.ndim != len(inputs.shape) or not values.numel():
        (*channels, _) = inputs.shape
        wanted = f"({channels[0]} channels, samples)" if channels else "(samples,)"
        remedy = "give these channels" if channels else "average channels first"
        raise ArgumentError("inputs", f"must be {wanted}, got {tuple(values.shape)}; {remedy}")
    if not values.is_floating_point():
        raise ArgumentError("inputs", f"must be floats in -1..1, got {values.dtype}; divide 16 bits by 32768")
    if getattr(inputs, "has_gaps", False) and not values.isinf().any():  # in any unit
        return
    if not values.abs().max() <= _LOUDEST:
        what = f"got values up to {float(values.abs().max()):g}"
        raise ArgumentError("inputs", f"must be finite floats in -1..1, {what}; divide by full scale, fill gaps")


def _tensor_of(array: Any) -> Tensor:
    if isinstance(array, np.ndarray):  # torch does not take negative strides, another byte order or a read-only array
        array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    try:
        values = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"must be paths or arrays, or a list of them, got {type(array).__name__}"
        raise ArgumentError("inputs", f"{what}; pass a path or an array") from error
    # torch has few operations on these types
    return values.long() if values.dtype in (torch.uint16, torch.uint32, torch.uint64) else values


def _listed(inputs: Any) -> list[Any]:
    """The inputs as a list."""
    if isinstance(inputs, str | PathLike | Tensor | np.ndarray | bytes | bytearray | memoryview) or not isinstance(
        inputs, Iterable
    ):
        return [inputs]
    return list(inputs)
