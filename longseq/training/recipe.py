"""How a classifier is trained: one description with three parts."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.training.distillation import Distillation
from longseq.training.mix import Mix
from longseq.training.optimizer import Optimization


@dataclass(frozen=True)
class LabelHandling:
    """How a training changes its labels, and how much each of them counts.

    Args:
        label_smoothing: Share of each target that is spread over all classes, in training.
        class_weights: Weight of each class in the training loss; with MultiLabel, of each label for that class.
            ``balanced`` gives rare classes larger weights, so that all classes have the same total weight. If each
            sample has one label, the mean weight of the training samples is 1.
        mix: Mixes the samples of a training batch: MixUp or CutMix (mix.py).
    """

    label_smoothing: float = 0.0
    class_weights: list[float] | Literal["balanced"] | None = None
    mix: Mix | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            what = f"must be in 0..1 (1 excluded), got {self.label_smoothing}; 0 turns it off"
            raise ArgumentError("label_smoothing", what)

    def weights(self, num_classes: int) -> Float[Tensor, " classes"]:
        """A weight for each class: the given ones, or else 1; with ``balanced`` 1 until labels are known.

        Raises:
            ValueError: If there are not as many positive numbers as classes.
        """
        weights = self.class_weights
        if weights is None or weights == "balanced":
            return torch.ones(num_classes)
        are_numbers = not isinstance(weights, str) and all(0 < weight < math.inf for weight in weights)
        if not are_numbers or len(weights) != num_classes:
            what = f"must be {num_classes} positive numbers or balanced, got {weights}; give one for each class"
            raise ArgumentError("class_weights", what)
        return torch.tensor(weights, dtype=torch.float32)


@dataclass(frozen=True)
class Recipe(Distillation, LabelHandling, Optimization):
    """How a classifier is trained: the classifier takes these arguments by name, as ``**recipe``.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # a checkpoint may hold no number of NumPy
                object.__setattr__(self, name, value.item())
        Optimization.__post_init__(self)
        LabelHandling.__post_init__(self)
        Distillation.__post_init__(self)
