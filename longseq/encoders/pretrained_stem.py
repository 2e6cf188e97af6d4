"""A stem of timm's: the first stages of a pretrained convolutional network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from longseq.arguments import ArgumentError
from longseq.encoders.patches import without_padding
from longseq.encoders.stem import Rows, Stage, Stem
from longseq.encoders.timm_models import config_of, created, statistics_of


@dataclass(frozen=True)
class Pretrained(Stem):
    """The first stages of one of timm's convolutional networks, with the weights that it was trained with.

    Its BatchNorm keeps the statistics that it was trained with, in a training too. Images are normalised as the network
    expects them; spectrograms by the mean and deviation of the training set, with one channel, for which timm sums the
    weights of the three colours. The weights of stages behind the level are left out.

    Args:
        model: timm's name, such as ``resnet18``.
        level: Which of the network's resolutions: 2 is 1 / 8 of the rows and columns for ``resnet18``, 1 / 16 for
            ``convnext_tiny``.
        pretrained: True for timm's weights, which it downloads once; the path of a file of weights that timm can read;
            False for random ones, whose BatchNorm does not normalise: for these take ``Residual``.

    Raises:
        ValueError: If timm has no such model, it is no convolutional network, or it has no such level.
    """

    model: str
    level: int = 2
    pretrained: bool | str = True

    def __post_init__(self) -> None:
        config_of(self.model, "resnet18")
        found = _levels(self.model)
        if not found:
            what = f"must be a convolutional network whose sides are halved, got {self.model!r}"
            raise ArgumentError("model", f"{what}; resnet18 is one")
        if not 0 <= self.level < len(found):
            sides = ", ".join(f"1 / {stride}" for _, stride in found)
            what = f"must be in 0..{len(found) - 1} for {self.model}, got {self.level}"
            raise ArgumentError("level", f"{what}; these have {sides} of the rows and columns")

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
        """The same stem, for which nothing is loaded."""
        return replace(self, pretrained=False)


class FirstStages(Stage):
    """A timm network up to a level. A batch is run once for each number of rows of results in it, so padding is never
    seen, whatever the network does."""

    def __init__(self, stem: Pretrained, channels: int) -> None:
        super().__init__()
        self.width, self.stride = _levels(stem.model)[stem.level][0], stem.stride
        # a getter leaves out what lies behind the level; timm's own choice for some networks does not
        options = {"features_only": True, "feature_cls": "getter", "out_indices": (stem.level,), "in_chans": channels}
        self.network = created(stem.model, stem.pretrained, **options)
        self.train()

    def train(self, mode: bool = True) -> "FirstStages":
        """As torch; but BatchNorm stays in evaluation: small batches would spoil its statistics."""
        super().train(mode)
        for part in self.network.modules():
            if isinstance(part, _BatchNorm):
                part.eval()
        return self

    def forward(self, picture: Float[Tensor, "b channels height width"], rows: Rows = None) -> Float[Tensor, "b _ _ _"]:
        # networks round sides that they cannot halve in their own ways
        high, wide = self.stride
        picture = F.pad(without_padding(picture, rows), (0, -picture.shape[3] % wide, 0, -picture.shape[2] % high))
        if rows is None:
            return self.network(picture)[0]
        counts, height = self.rows_after(rows), picture.shape[2] // high
        there = counts.unique().tolist()
        groups = [(counts == count).nonzero()[:, 0] for count in there]
        parts = [
            F.pad(self.network(picture[group, :, : count * high])[0], (0, 0, 0, height - count))
            for count, group in zip(there, groups, strict=True)
        ]
        return torch.cat(parts)[torch.cat(groups).argsort()]


@cache
def _levels(model: str) -> list[tuple[int, int]]:
    """The width and the stride of each level of a timm network; none if it makes no pictures of any size, smaller by
    whole numbers."""
    try:
        with torch.device("meta"):
            network = created(model, False, features_only=True, feature_cls="getter").eval()
            strides = network.feature_info.reduction()
            rows, columns = 2 * max(strides), 3 * max(strides)
            found = [tuple(level.shape) for level in network(torch.zeros(1, 3, rows, columns))]
    except Exception:  # timm's models say in many ways that they cannot do this
        return []
    levels = list(zip(network.feature_info.channels(), strides, strict=True))
    is_right = found == [(1, width, rows // stride, columns // stride) for width, stride in levels]
    return levels if is_right else []
