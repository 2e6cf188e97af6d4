"""Random changes of whole batches of images, on the device of the batch.

Numbers between 0 and 1 decide the changes of a sample. They are a function of (seed, epoch, index), so the changes do
not depend on the batch, on the workers or on the device.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor
from torch.nn.functional import grid_sample
from torchvision.transforms import v2

_NEAREST = ("nearest", v2.InterpolationMode.NEAREST)


class BatchTransform(v2.Transform, ABC):
    """A random change of images (b, c, h, w) that keeps their size. One image (c, h, w) is changed alone.

    Attributes:
        num_draws: The number of random numbers that the change of one image needs.
    """

    num_draws: int

    @abstractmethod
    def change(self, images: Shaped[Tensor, "b ..."], draws: Float64[Tensor, "b m"]) -> Shaped[Tensor, "b ..."]:
        """Change each image as its numbers say, which are in 0..1 (1 excluded)."""

    def forward(self, image: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Change one image at random, with torch's generator."""
        return self.change(image[None], torch.rand(1, self.num_draws, dtype=torch.float64))[0]


class Flip(BatchTransform):
    """torchvision's RandomHorizontalFlip and RandomVerticalFlip.

    Args:
        axis: The axis that is flipped, -1 or -2.
        probability: The probability that an image is flipped.
    """

    num_draws = 1

    def __init__(self, axis: int, probability: float) -> None:
        super().__init__()
        self.axis, self.probability = axis, probability

    def change(self, images: Shaped[Tensor, "b ..."], draws: Float64[Tensor, "b m"]) -> Shaped[Tensor, "b ..."]:
        is_flipped = draws[:, 0] < self.probability
        return torch.where(is_flipped.reshape(-1, *[1] * (images.ndim - 1)), images.flip(self.axis), images)


class Affine(BatchTransform):
    """torchvision's RandomAffine around the middle of the image, without shear: the nearest pixels. Outside of the
    image its edge is repeated, because a model may learn to recognise a constant colour.

    Args:
        affine: The transform whose ranges are drawn from.
    """

    num_draws = 4  # angle, translation to the right, translation to the bottom, scale

    def __init__(self, affine: v2.RandomAffine) -> None:
        super().__init__()
        self.affine = affine

    def change(self, images: Shaped[Tensor, "b c h w"], draws: Float64[Tensor, "b m"]) -> Shaped[Tensor, "b c h w"]:
        height, width = images.shape[-2:]
        across, down = self.affine.translate or (0.0, 0.0)
        right, bottom = across * width, down * height
        ranges = (self.affine.degrees, (-right, right), (-bottom, bottom), self.affine.scale or (1.0, 1.0))
        angle, to_right, to_bottom, scale = (
            (least + (greatest - least) * draws[:, number])[:, None, None]
            for number, (least, greatest) in enumerate(ranges)
        )
        cosine, sine = ((of_angle(angle.deg2rad()) / scale).to(torch.float32) for of_angle in (torch.cos, torch.sin))
        places = {"dtype": torch.float32, "device": images.device}
        x = torch.arange(width, **places) - (width - 1) / 2 - to_right.round().to(torch.float32)
        y = torch.arange(height, **places)[:, None] - (height - 1) / 2 - to_bottom.round().to(torch.float32)
        # where each pixel comes from; without a matrix product, which may be rounded to TF32
        from_x, from_y = (cosine * x + sine * y) / (width / 2), (cosine * y - sine * x) / (height / 2)
        changed = grid_sample(
            images.to(torch.float32),
            torch.stack([from_x, from_y], dim=-1),
            mode="nearest",
            padding_mode="border",
            align_corners=False,
        )
        return changed.to(images.dtype)


def in_batches(transform: Any) -> BatchTransform | None:
    """The same random change for whole batches; None if there is none."""
    if isinstance(transform, BatchTransform):
        return transform if type(transform).forward is BatchTransform.forward else None
    if type(transform) in (v2.RandomHorizontalFlip, v2.RandomVerticalFlip):
        return Flip(-1 if type(transform) is v2.RandomHorizontalFlip else -2, transform.p)
    if type(transform) in (v2.RandomAffine, v2.RandomRotation):
        is_plain = transform.center is None and transform.fill == 0 and transform.interpolation in _NEAREST
        if type(transform) is v2.RandomAffine:
            return Affine(transform) if is_plain and transform.shear is None else None
        least, greatest = transform.degrees  # counterclockwise, other than those of RandomAffine
        return Affine(v2.RandomAffine((-greatest, -least))) if is_plain and not transform.expand else None
    return None


def divided(transforms: Sequence[Any]) -> tuple[list[Any], list[BatchTransform]]:
    """The transforms that change one sample at a time, and those after them, which change whole batches."""
    of_batches: list[BatchTransform] = []
    for transform in reversed(transforms):
        if (of_batch := in_batches(transform)) is None:
            break
        of_batches.insert(0, of_batch)
    return list(transforms[: len(transforms) - len(of_batches)]), of_batches


def changed(
    images: Shaped[Tensor, "b ..."], transforms: Sequence[BatchTransform], draws: Float64[Tensor, "b m"]
) -> Shaped[Tensor, "b ..."]:
    """The images after all transforms, each of which uses numbers of its own."""
    of_transforms = draws.split([transform.num_draws for transform in transforms], dim=1)
    for transform, numbers in zip(transforms, of_transforms, strict=True):
        images = transform.change(images, numbers)
    return images


def draws_of(seed: int, samples: Sequence[tuple[int, int]], count: int) -> Float64[Tensor, "b {count}"]:
    """Numbers in 0..1 (1 excluded), as many for each sample: `mix(seed, epoch, index, number)` of samples.py / 2**63.

    Args:
        seed: The seed.
        samples: Epoch and index of each sample.
        count: Numbers of each sample.
    """
    epochs, indices = np.array(samples, dtype=np.uint64).reshape(-1, 2).T[:, :, None]
    state = np.zeros((len(samples), count), dtype=np.uint64)
    for number in (np.uint64(seed), epochs, indices, np.arange(count, dtype=np.uint64)):
        state = state * np.uint64(0x9E3779B97F4A7C15) + number + np.uint64(1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ state >> np.uint64(shift)) * np.uint64(factor)
        state = state ^ state >> np.uint64(31)
    return torch.from_numpy((state << np.uint64(1) >> np.uint64(11)) * math.ldexp(1, -53))
