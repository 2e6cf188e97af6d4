"""What augmentation puts where a moved image has no pixels, in training batches."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from datamodules.images import ImageDataModule
from datamodules.samples import LabelledTensors

PLAIN = torch.tensor([200, 150, 100], dtype=torch.uint8)[:, None, None].expand(3, 16, 16)
NEAREST, BILINEAR = v2.InterpolationMode.NEAREST, v2.InterpolationMode.BILINEAR
MOVED = [
    v2.Pad(4),
    v2.RandomAffine(30.0, (0.4, 0.4), (0.5, 0.8)),
    v2.RandomAffine(30.0, (0.4, 0.4), shear=20.0),
    v2.RandomCrop(16, padding=8),
    v2.RandomErasing(1.0),
    v2.RandomPerspective(0.8, 1.0, NEAREST),
    v2.RandomRotation(90.0),
    v2.RandomZoomOut(p=1.0),
    v2.ElasticTransform(200.0, 2.0, NEAREST),
]
BLENDED = [
    v2.RandomAffine(30.0, (0.4, 0.4), interpolation=BILINEAR),
    v2.RandomPerspective(0.8, 1.0),
    v2.RandomRotation(90.0, BILINEAR),
    v2.ElasticTransform(200.0, 2.0),
]
RECOLOURED = [v2.AugMix(chain_depth=1), v2.AutoAugment(), v2.RandAugment(1), v2.TrivialAugmentWide()]


class Same(ImageDataModule):
    """Forty copies of one image."""

    def __init__(self, image: Tensor, augment: Sequence[v2.Transform]) -> None:
        super().__init__(augment=augment, batch_size=8)
        self.class_names, self.shape, self.image = ["a", "b"], tuple(image.shape), image  # type: ignore[assignment]

    def load(self) -> tuple[LabelledTensors, None, LabelledTensors]:
        samples = LabelledTensors(self.image.expand(40, *self.shape).clone(), torch.arange(40) % 2)
        return samples, None, samples


def drawn(image: Tensor, *augment: Any) -> Tensor:
    """All inputs of a training epoch."""
    data = Same(image, augment)
    data.setup("fit")
    return torch.cat([inputs for inputs, _ in data.train_dataloader()])


def test_all_transforms_of_torchvision_that_fill_are_tried_here() -> None:
    kinds = {kind for kind in vars(v2).values() if inspect.isclass(kind) and issubclass(kind, v2.Transform)}
    fill = {kind for kind in kinds if {"fill", "value"} & inspect.signature(kind).parameters.keys()}
    assert fill == {type(transform) for transform in (*MOVED, *RECOLOURED)}


@pytest.mark.parametrize("transform", MOVED, ids=lambda transform: type(transform).__name__)
@pytest.mark.parametrize(
    "wrapped",
    [lambda it: it, lambda it: v2.Compose([it]), lambda it: v2.RandomApply([v2.RandomChoice([it])], p=1.0)],
    ids=["alone", "in Compose", "in RandomChoice"],
)
def test_a_plain_image_stays_plain_wherever_it_is_moved(transform: Any, wrapped: Any) -> None:
    size = [v2.RandomCrop(16)] if isinstance(transform, v2.Pad | v2.RandomZoomOut) else []
    inputs = drawn(PLAIN, wrapped(transform), *size)
    assert torch.equal(inputs, PLAIN.expand_as(inputs))


@pytest.mark.parametrize("transform", BLENDED, ids=lambda transform: type(transform).__name__)
def test_a_plain_image_whose_pixels_are_blended_is_a_quarter_darker_at_most(transform: Any) -> None:
    """torchvision blends a pixel at the edge twice: of a share s of the image comes s^2, and 1 - s of the fill."""
    inputs = drawn(PLAIN, transform)
    assert (inputs.double() >= 0.75 * PLAIN - 1).all() and (inputs <= PLAIN).all()


@pytest.mark.parametrize("transform", RECOLOURED, ids=lambda transform: type(transform).__name__)
def test_a_plain_image_whose_colour_is_changed_too_gets_no_black_corner(transform: Any) -> None:
    assert drawn(PLAIN, *[transform] * 2).amin() > 0


def test_a_crop_repeats_the_edge_and_an_erased_part_has_the_mean_of_the_training_set() -> None:
    image = torch.randint(100, 256, (3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = np.pad(image.numpy(), ((0, 0), (4, 4), (4, 4)), mode="edge")
    allowed = {padded[:, y : y + 16, x : x + 16].tobytes() for y in range(9) for x in range(9)}
    assert {each.numpy().tobytes() for each in drawn(image, v2.RandomCrop(16, padding=4))} <= allowed
    mean = torch.tensor(image.numpy().mean((1, 2)).round(), dtype=torch.uint8)[:, None, None]
    inputs = drawn(image, v2.RandomErasing(1.0))
    is_erased = inputs != image
    assert is_erased.any() and torch.equal(inputs[is_erased], mean.expand_as(inputs)[is_erased])


@pytest.mark.parametrize(("fill", "corner"), [([0], (0, 0, 0)), ([0, 0, 0], (0, 0, 0)), (7, (7, 7, 7))])
def test_a_fill_that_is_given_stays(fill: Any, corner: tuple[int, ...]) -> None:
    for transform in (v2.RandomAffine((45.0, 45.0), fill=fill), v2.RandomPerspective(0.9, 1.0, NEAREST, fill)):
        colours = {tuple(colour) for colour in drawn(PLAIN, transform).movedim(1, 3).flatten(0, 2).tolist()}
        assert colours == {(200, 150, 100), corner} and transform.fill == fill


def test_transforms_are_filled_without_being_changed_themselves() -> None:
    inner, crop, erasing = v2.ElasticTransform(200.0, 2.0), v2.RandomCrop(16, padding=8), v2.RandomErasing(1.0)
    drawn(PLAIN, whole := v2.Compose([inner]), crop, erasing)
    assert whole.transforms == [inner] and (inner.fill, crop.padding_mode, erasing.value) == (0, "constant", [0.0])


def test_grey_images_get_one_number() -> None:
    assert drawn(PLAIN[:1], v2.RandomPerspective(0.8, 1.0, NEAREST), v2.RandomErasing(1.0)).unique().tolist() == [200]
