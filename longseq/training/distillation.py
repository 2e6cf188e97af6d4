"""Knowledge distillation: a classifier learns the outputs of a trained one for the same inputs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.files.checkpoint import CheckpointError
from longseq.files.description import naming
from longseq.training.devices.processes import Loss


@dataclass(frozen=True)
class Distillation:
    """What a classifier learns from another one.

    Args:
        teacher: A checkpoint whose outputs are learned besides the labels (knowledge distillation, arXiv:1503.02531):
            the loss is (1 - a) * the task's loss + a * T^2 * KL(softmax(teacher / T) || softmax(outputs / T)). The
            teacher gets the same inputs through its own front end, frozen and in evaluation. Only a training needs it.
        distillation_alpha: a, the teacher's share of the loss.
        temperature: T, which divides the outputs of both.
    """

    teacher: str | None = None
    distillation_alpha: float = 0.5
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.distillation_alpha <= 1:
            raise ArgumentError("distillation_alpha", f"must be in 0..1, got {self.distillation_alpha}; 0.5 is usual")
        if not 0.01 <= self.temperature <= 1000:
            raise ArgumentError("temperature", f"must be in 0.01..1000, got {self.temperature}; 1 to 10 are usual")


class Teacher:
    """A trained classifier, frozen, in evaluation. It is not a module, so checkpoints, optimizers and ranks ignore it.

    Args:
        path: The file that fit has written, or a folder to share.
        student: The classifier that it teaches.

    Raises:
        CheckpointError: If there is no such checkpoint, or if it has other classes, inputs or another task.
    """

    def __init__(self, path: str, student: Any) -> None:
        with naming("model.teacher"):
            self.model = type(student).load_from_checkpoint(path).eval().requires_grad_(False)
        tasks = [type(model.task) for model in (self.model, student)]
        if tasks[0] is not tasks[1]:
            what = f"learned the task {tasks[0].__name__}, and the model learns {tasks[1].__name__}"
            raise CheckpointError(f"model.teacher: {path} {what}; give a teacher of the same task")
        if self.model.class_names != student.class_names:
            pairs = zip(self.model.class_names, student.class_names, strict=False)
            other = next((f"{one!r} where the data has {two!r}" for one, two in pairs if one != two), None)
            what = other or f"{self.model.num_classes} classes, and the data has {student.num_classes}"
            raise CheckpointError(f"model.teacher: {path} has {what}; give one of the same classes in this order")
        self._refuse_other_inputs(path, student.encoder)

    def _refuse_other_inputs(self, path: str, student: Any) -> None:
        mine = self.model.encoder
        for name in ("takes_sounds", "shape", "sample_rate_hz", "seconds"):
            value, wanted = getattr(mine, name, None), getattr(student, name, None)
            fits = value == wanted or (mine.any_length and name in ("shape", "seconds"))
            if value is None or wanted is None or fits or (name == "seconds" and value > wanted):
                continue
            what = f"takes inputs with {name} {value}, and the data has {wanted}"
            raise CheckpointError(f"model.teacher: {path} {what}; give a teacher of the same inputs")

    def __call__(self, inputs: Any, student: Any) -> Tensor:
        """The teacher's outputs for a batch that the student gets, on the student's device and in its precision."""
        if (self.model.device, self.model.dtype) != (student.device, student.dtype):
            self.model.to(device=student.device, dtype=student.dtype)
        with torch.no_grad():
            return self.model(inputs)

    def losses(self, loss: Loss, inputs: Any, outputs: Tensor, student: Any) -> list[Loss]:
        """The parts of the student's loss for a batch: the given loss of the task, and the distance to the teacher."""
        mean = student.task.distillation(outputs, self(inputs, student), student.temperature)
        num_samples = mean.new_full((), len(outputs), dtype=torch.float32)  # the distance has no class weights
        alpha = student.distillation_alpha
        return [loss._replace(share=1 - alpha), Loss(alpha, mean, num_samples)]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teacher":
        return self  # a copy of the student, such as an average of weights, has the same teacher
