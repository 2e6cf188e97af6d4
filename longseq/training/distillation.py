"""Knowledge distillation: a classifier learns the outputs of a trained one, or of any network, for the same inputs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.arguments import ArgumentError, SettingError, argument_names
from longseq.compat.torch import at_least_float32
from longseq.files.checkpoint import CheckpointError
from longseq.files.description import NETWORKS, class_named, naming
from longseq.training.devices.processes import Loss


@dataclass(frozen=True)
class Distillation:
    """What a classifier learns from another network.

    Args:
        teacher: A checkpoint whose outputs are learned in addition to the labels (knowledge distillation,
            arXiv:1503.02531): the loss is (1 - a) * the task's loss + a * T^2 * KL(softmax(teacher / T) ||
            softmax(outputs / T)). The teacher gets the same inputs through its own front end, frozen and in evaluation
            mode. Only the training needs it. Or a frozen network (datamodules.networks): a file (.onnx, .tflite, .pt2),
            the name of a class such as BirdNET, or ``{network: m.onnx, rate_hz: 48000}`` with arguments of the class.
            It runs once over the training set, without augmentation; the target is the mean over the windows or tiles
            of a sample.
        distillation: What is learned from the teacher: its ``logits``, which need every class of the data; or its
            ``features``, for a teacher with other classes. Then T^2 * KL becomes 1 - cos(W features, teacher). W is
            trained too, but the trained model does not contain it.
        teacher_classes: A file with the names of a network's classes, one in each line. If absent, the names in the
            network's own file are used.
        distillation_alpha: a, the teacher's share of the loss.
        temperature: T, by which the logits of teacher and student are divided.
    """

    teacher: str | dict[str, Any] | None = None
    distillation: Literal["logits", "features"] = "logits"
    teacher_classes: str | None = None
    distillation_alpha: float = 0.5
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.distillation_alpha <= 1:
            raise ArgumentError("distillation_alpha", f"must be in 0..1, got {self.distillation_alpha}; 0.5 is usual")
        if not 0.01 <= self.temperature <= 1000:
            raise ArgumentError("temperature", f"must be in 0.01..1000, got {self.temperature}; 1 to 10 are usual")
        if self.distillation not in ("logits", "features"):
            raise ArgumentError("distillation", f"must be logits or features, got {self.distillation!r}; choose one")
        if self.teacher_classes is not None and (not is_network(self.teacher) or self.distillation == "features"):
            what = f"must be left out except for the logits of a network, got {self.teacher_classes}"
            raise ArgumentError("teacher_classes", f"{what}; leave it out")


@runtime_checkable
class FrozenNetwork(Protocol):
    """What longseq needs of a network of datamodules, besides ``key``, ``num_features`` and ``class_names``."""

    def __call__(self, values: Tensor) -> Tensor: ...
    def mean_of(self, values: Tensor) -> Tensor: ...


class Teaching(ABC):
    """What a student learns from. It is not a module, so checkpoints, optimizers and ranks ignore it.

    Attributes:
        model: The classifier that runs in every step; None if there is none.
        width: The number of features that it teaches.
    """

    model: Any = None
    width: int

    @abstractmethod
    def __call__(self, inputs: Any, student: Any, taught: Tensor | None = None) -> Tensor:
        """What the student shall give for a batch: logits or features.

        Args:
            inputs: The batch that the student gets.
            student: The student.
            taught: What the data module gives besides inputs and labels.
        """

    def losses(
        self, loss: Loss, inputs: Any, outputs: Tensor, student: Any, features: Tensor | None, taught: Tensor | None
    ) -> list[Loss]:
        """The parts of the student's loss for a batch: the given loss of the task, and the distance to the teacher."""
        wanted = self(inputs, student, taught)
        if features is None:
            mean = student.task.distillation(outputs, wanted, student.temperature)
        else:
            own = at_least_float32(student.to_teacher(features))
            mean = (1 - F.cosine_similarity(own, wanted.to(own), dim=-1)).mean()
        num_samples = mean.new_full((), len(outputs), dtype=torch.float32)  # the distance has no class weights
        alpha = student.distillation_alpha
        return [loss._replace(share=1 - alpha), Loss(alpha, mean, num_samples)]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teaching":
        return self  # a copy of the student, such as an average of weights, has the same teacher


class Teacher(Teaching):
    """A trained classifier, frozen, in evaluation.

    Args:
        path: The file that fit has written, or a folder to share.
        student: The classifier that it teaches.

    Raises:
        CheckpointError: If there is no such checkpoint, or if it has other inputs; for logits also if it has other
            classes or another task.
    """

    def __init__(self, path: str, student: Any) -> None:
        with naming("model.teacher"):
            self.model = type(student).load_from_checkpoint(path).eval().requires_grad_(False)
        self.width = self.model.encoder.dim
        if student.distillation == "logits":
            self._refuse_other_classes(path, student)
        self._refuse_other_inputs(path, student.encoder)

    def _refuse_other_classes(self, path: str, student: Any) -> None:
        tasks = [type(model.task) for model in (self.model, student)]
        if tasks[0] is not tasks[1]:
            what = f"learned the task {tasks[0].__name__}, and the model learns {tasks[1].__name__}"
            raise CheckpointError(f"model.teacher: {path} {what}; give a teacher of the same task")
        if self.model.class_names != student.class_names:
            pairs = zip(self.model.class_names, student.class_names, strict=False)
            other = next((f"{one!r} where the data has {two!r}" for one, two in pairs if one != two), None)
            what = other or f"{self.model.num_classes} classes, and the data has {student.num_classes}"
            raise CheckpointError(f"model.teacher: {path} has {what}; give one of the same classes in this order")

    def _refuse_other_inputs(self, path: str, student: Any) -> None:
        mine = self.model.encoder
        for name in ("kind", "shape", "sample_rate_hz", "seconds", "channels"):
            value, wanted = getattr(mine, name, None), getattr(student, name, None)
            fits = value == wanted or (mine.any_length and name in ("shape", "seconds"))
            if value is None or wanted is None or fits or (name == "seconds" and value > wanted):
                continue
            what = f"takes inputs with {name} {value}, and the data has {wanted}"
            raise CheckpointError(f"model.teacher: {path} {what}; give a teacher of the same inputs")

    def __call__(self, inputs: Any, student: Any, taught: Tensor | None = None) -> Tensor:
        """The teacher's outputs or features for a batch, on the student's device and in its precision."""
        if (self.model.device, self.model.dtype) != (student.device, student.dtype):
            self.model.to(device=student.device, dtype=student.dtype)
        with torch.no_grad():
            return self.model(inputs) if student.distillation == "logits" else self.model.encoder(inputs)


class NetworkTeacher(Teaching):
    """What a frozen network gives of each training sample: the data module runs it once, and then gives the rows of a
    batch with each batch.

    Args:
        described: The network, as ``Distillation.teacher`` names it.
        student: The classifier that it teaches.
        data: The data module, after its setup.

    Raises:
        SettingError: If there is no such network, or it lacks classes of the data, or gives numbers that are not
            finite.
    """

    def __init__(self, described: str | Mapping[str, Any], student: Any, data: Any) -> None:
        self._network: Any = network_of(described)
        if not hasattr(data, "outputs_of"):
            what = "a network teaches samples of a data module with outputs_of"
            raise SettingError(f"model.teacher: {what}; derive it from datamodules.DataModule, or give a checkpoint")
        is_of_logits = student.distillation == "logits"
        columns = self._columns(student.class_names, student.teacher_classes) if is_of_logits else None
        outputs = data.outputs_of(self._network)
        self.width = outputs.shape[1]
        broken = (~outputs.isfinite().all(1)).nonzero()
        if len(broken):
            name = data.splits()["train"].names[int(broken[0])]
            what = f"gives NaN or infinity for {name}; leave it out, or choose another"
            raise SettingError(f"model.teacher: {what}")
        if columns is not None:
            scores = outputs[:, columns]
            outputs = student.task.outputs_of(scores, bool(((outputs >= 0) & (outputs <= 1)).all()))
        data.taught = outputs

    def _columns(self, wanted: list[str], path: str | None) -> list[int]:
        """The place of each class of the data among the outputs."""
        names = self._network.class_names if path is None else _lines(path)
        number = self._network.num_features
        features = "or --model.distillation features learns its features"
        if names is None:
            what = "states no classes; give their names in --model.teacher_classes"
            raise SettingError(f"model.teacher: {what}, {features}")
        if len(names) != number:
            what = f"gives {number} numbers, and there are names of {len(names)} classes"
            raise SettingError(f"model.teacher: {what}; choose the output of the logits, {features}")
        missing = [name for name in wanted if name not in names]
        if missing:
            others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            what = f"has no class {', '.join(missing[:3])}{others}"
            raise SettingError(f"model.teacher: {what}; give its names in --model.teacher_classes, {features}")
        return [names.index(name) for name in wanted]

    def __call__(self, inputs: Any, student: Any, taught: Tensor | None = None) -> Tensor:
        assert taught is not None
        return taught


def is_network(teacher: Any) -> bool:
    """Whether a teacher is a frozen network, and no checkpoint."""
    if not isinstance(teacher, str):
        return teacher is not None
    path = Path(teacher)
    if path.suffix.lower() in NETWORKS:
        return path.suffix.lower() != ".ckpt"
    return not path.exists() and all(part.isidentifier() for part in teacher.split("."))


def network_of(described: str | Mapping[str, Any]) -> FrozenNetwork:
    """The network that ``Distillation.teacher`` names.

    Raises:
        SettingError: If there is no such class, or it refuses its arguments.
    """
    arguments = {"network": described} if isinstance(described, str) else dict(described)
    name = arguments.pop("network", None)
    if not isinstance(name, str):
        raise SettingError(f"model.teacher: {described} names no network; give --model.teacher.network")
    if (kind_of_file := NETWORKS.get(Path(name).suffix.lower())) is not None:
        name, arguments = kind_of_file, {"file": name, **arguments}
    path = name if "." in name else f"datamodules.networks.{name.lower()}.{name}"
    try:
        kind = class_named(path, (FrozenNetwork,), "model.teacher")
        network: Any = kind(**arguments)
    except CheckpointError as error:
        raise SettingError(str(error)) from error
    except TypeError as error:  # an unknown argument, or a missing one
        takes = argument_names(kind)
        unknown = next(
            (f".{name}: no such argument of {kind.__name__}" for name in arguments if name not in takes), None
        )
        lacks = f": {kind.__name__} lacks its argument {next((name for name in takes if name not in arguments), '')}"
        raise SettingError(f"model.teacher{unknown or lacks}; it takes {', '.join(takes)}") from error
    except ValueError as error:  # datamodules' ArgumentError
        raise SettingError(
            f"model.teacher.{getattr(error, 'argument', '')}: {getattr(error, 'what', error)}"
        ) from error
    network.key = "model.teacher"
    return network


def _lines(path: str) -> list[str]:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "not a text file"
        raise SettingError(f"model.teacher_classes: {path}: {what}; give a file with a name in each line") from error
