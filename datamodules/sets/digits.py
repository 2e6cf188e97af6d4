"""scikit-learn's handwritten digits: a real data set that needs no download."""

from typing import Any

import torch

from datamodules.base import hold_out
from datamodules.images import ImageDataModule, checked_size, scale
from datamodules.samples import LabelledTensors

_TEST_FRACTION, _TEST_SEED = 0.2, 1797  # fixed: the test split is the same in every experiment


class Digits(ImageDataModule):
    """1,797 handwritten digits of 8x8 pixels, uint8 (1, size, size), white on black; a fixed fifth is the test split.

    Source: the test part of UCI Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), with 17 grey
    levels, from sklearn.datasets.load_digits.

    Args:
        size: Height and width to which the images are resized; 8 is the original.
        common: Arguments of ImageDataModule.
    """

    def __init__(self, size: int = 8, **common: Any) -> None:
        super().__init__(**common)
        self.class_names = [str(digit) for digit in range(10)]
        self.size = checked_size(size, original=8)
        self.shape = (1, size, size)

    def load(self) -> tuple[LabelledTensors, None, LabelledTensors]:
        from sklearn.datasets import load_digits  # this import takes a quarter of a second

        pixels, targets = load_digits(return_X_y=True)
        levels = torch.from_numpy(pixels).mul(255 / 16).round().to(torch.uint8)
        images = scale(levels.view(-1, 1, 8, 8), self.size, self.size)
        labels = torch.from_numpy(targets).long()
        train, test = hold_out(labels, _TEST_FRACTION, _TEST_SEED)
        return LabelledTensors(images[train], labels[train]), None, LabelledTensors(images[test], labels[test])
