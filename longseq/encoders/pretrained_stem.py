"""A stem of timm's: the first stages of a pretrained convolutional network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from longseq.arguments import require
from longseq.encoders._timm_models import config_of, created, statistics_of
from longseq.encoders.patches import without_padding
from longseq.encoders.stem import Rows, Stage, Stem


@dataclass(frozen=True)
class Pretrained(Stem):
    """The first stages of one of timm's pretrained convolutional networks.

    Its BatchNorm keeps its pretrained statistics, even in training. Images are normalised as the network expects it;
    spectrograms by the mean and deviation of the training set. They have one channel, for which timm sums the weights
    of the three colours. Stages after the level are left out.

    Args:
        model: timm's name, such as ``resnet18``.
        level: The resolution at which the stem ends: level 2 has 1 / 8 of the rows and columns for ``resnet18``, 1 / 16
            for ``convnext_tiny``.
        pretrained: True for timm's weights, which it downloads once; the path of a file of weights that timm can read;
            False for random ones, whose BatchNorm does not normalise: use ``Residual`` instead.

    Raises:
        ValueError: If timm has no such model, it is no convolutional network, or it has no such level.
    """

    model: str
    level: int = 2
    pretrained: bool | str = True

    def __post_init__(self) -> None:
        config_of(self.model, "resnet18")
        levels = _levels(self.model)
        what = f"must be a convolutional network whose sides are halved, got {self.model!r}; resnet18 is one"
        require(bool(levels), "model", what)
        sides = ", ".join(f"1 / {stride}" for _, stride in levels)
        what = f"must be in 0..{len(levels) - 1} for {self.model}, got {self.level}"
        require(0 <= self.level < len(levels), "level", f"{what}; these have {sides} of the rows and columns")

    @classmethod
    def examples(cls) -> "Sequence[Pretrained]":
        return [cls("test_resnet", 0, pretrained=False)]

    @property
    def stride(self) -> tuple[int, int]:
        stride = _levels(self.model)[self.level][1]
        return stride, stride

    def build(self, channels: int) -> "FirstStages":
        return FirstStages(self, channels)

    def statistics(self, channels: int) -> list[Float[Tensor, "channels 1 1"]]:
        """Mean and deviation of pixels that the weights expect."""
        return statistics_of(config_of(self.model, "resnet18"), channels)

    def without_weights(self) -> "Pretrained":
        """The same stem without pretrained weights."""
        return replace(self, pretrained=False)


class FirstStages(Stage):
    """A timm network up to a level. Inputs of a batch are grouped by their number of rows, and each group is run
    without padding, so padding cannot change the result."""

    def __init__(self, stem: Pretrained, channels: int) -> None:
        super().__init__()
        self.width, self.stride = _levels(stem.model)[stem.level][0], stem.stride
        # a getter leaves out what comes after the level; timm's default for some networks does not
        options = {"features_only": True, "feature_cls": "getter", "out_indices": (stem.level,), "in_chans": channels}
        self.network = created(stem.model, stem.pretrained, **options)
        self.train()

    def train(self, mode: bool = True) -> "FirstStages":
        """As in torch, but BatchNorm stays in evaluation mode, because small batches would spoil its statistics."""
        super().train(mode)
        for part in self.network.modules():
            if isinstance(part, _BatchNorm):
                part.eval()
        return self

    def forward(self, picture: Float[Tensor, "b channels height width"], rows: Rows = None) -> Float[Tensor, "b _ _ _"]:
        # networks differ in how they round sides that they cannot halve
        high, wide = self.stride
        picture = F.pad(without_padding(picture, rows), (0, -picture.shape[3] % wide, 0, -picture.shape[2] % high))
        if rows is None:
            return self.network(picture)[0]
        counts, height = self.rows_after(rows), picture.shape[2] // high
        sizes = counts.unique().tolist()
        groups = [(counts == count).nonzero()[:, 0] for count in sizes]
        parts = [
            F.pad(self.network(picture[group, :, : count * high])[0], (0, 0, 0, height - count))
            for count, group in zip(sizes, groups, strict=True)
        ]
        return torch.cat(parts)[torch.cat(groups).argsort()]


@cache
def _levels(model: str) -> list[tuple[int, int]]:
    """The width and the stride of each level of a timm network. An empty list if it does not take images of any size,
    or if the size of a level is no whole fraction of the image."""
    try:
        with torch.device("meta"):
            network = created(model, False, features_only=True, feature_cls="getter").eval()
            strides = network.feature_info.reduction()
            rows, columns = 2 * max(strides), 3 * max(strides)
            shapes = [tuple(level.shape) for level in network(torch.zeros(1, 3, rows, columns))]
    except Exception:  # timm's models raise many kinds of errors if they cannot do this
        return []
    levels = list(zip(network.feature_info.channels(), strides, strict=True))
    is_right = shapes == [(1, width, rows // stride, columns // stride) for width, stride in levels]
    return levels if is_right else []
