"""MNIST and Fashion-MNIST, through torchvision, from their four original files."""

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from datamodules.cache import cache_folder, locked
from datamodules.errors import DataError, require
from datamodules.images import ImageDataModule, checked_size, scale
from datamodules.samples import LabelledTensors


class MNIST(ImageDataModule):
    """60,000 + 10,000 handwritten digits, uint8 (1, size, size), white on black, with the official test split.

    Source: LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition (1998).

    Args:
        root: Folder that holds MNIST/raw with the four files, packed (.gz) or not; packed ones are unpacked there.
        download: Fetch missing files from the network.
        size: Height and width to which the images are resized; 28 is the original.
        permutation: Seed of a random order of the pixels, the same for all images, as in "permuted MNIST"
            (arXiv:1504.00941); null keeps the original order.
        common: Arguments of ImageDataModule.

    Raises:
        ArgumentError: If permutation is not a seed, or is used with transforms, which need pixels in their places.
        DataError: From setup, if files are missing or broken, or cannot be fetched or unpacked.
    """

    source: ClassVar[type[datasets.MNIST]] = datasets.MNIST
    names: ClassVar[list[str]] = [str(digit) for digit in range(10)]

    def __init__(
        self, root: str, download: bool = False, size: int = 28, permutation: int | None = None, **common: Any
    ) -> None:
        super().__init__(**common)
        is_seed = permutation is None or 0 <= permutation < 2**63
        require(is_seed, "permutation", "0 or more, or null", permutation, "0 is usual")
        is_alone = permutation is None or not self.augment
        require(is_alone, "augment", "empty with permutation", self.augment, "transforms need pixels in their places")
        self.class_names = self.names
        self.root = root
        self.download = download
        self.size = checked_size(size, original=28)
        self.permutation = permutation
        self.shape = (1, size, size)

    @property
    def _folder(self) -> Path:
        return Path(self.root).expanduser() / self.source.__name__ / "raw"

    def _unpack(self) -> None:
        # torchvision's download() does not use the network for archives with the right checksum
        packed = all(check_integrity(self._folder / name, md5) for name, md5 in self.source.resources)
        if self._missing() is None or not (packed or self.download):
            return
        try:
            self.source(Path(self.root).expanduser(), download=True)
        except OSError as error:
            what = f"cannot fetch or unpack the files here ({error.strerror or error})"
            raise DataError(f"{self._folder}: {what}; copy them to a folder that you can write") from error
        except RuntimeError as error:
            raise DataError(f"{self._folder}: download failed; check the network or put the files there") from error

    def read(self, path: str | os.PathLike[str]) -> UInt8[Tensor, "1 h w"]:
        return self._permuted(super().read(path))

    def _permuted(self, images: UInt8[Tensor, "*b 1 h w"]) -> UInt8[Tensor, "*b 1 h w"]:
        if self.permutation is None:
            return images
        order = torch.randperm(self.size**2, generator=torch.Generator().manual_seed(self.permutation))
        return images.flatten(-2)[..., order].reshape(images.shape)

    def load(self) -> tuple[LabelledTensors, None, LabelledTensors]:
        with locked(cache_folder() / self.source.__name__):
            self._unpack()
        archive = self._missing()
        if archive is not None:
            what = "not the original file" if archive.is_file() else "no such file, packed or not"
            md5 = dict(self.source.resources)[archive.name]
            raise DataError(f"{archive}: {what}; put it there (md5 {md5}), or set data.download to true")
        return self._split(train=True), None, self._split(train=False)

    def _missing(self) -> Path | None:
        """The archive of the first of the four files that is not unpacked yet; None if all are."""
        archives = (self._folder / name for name, _ in self.source.resources)
        return next((archive for archive in archives if not archive.with_suffix("").is_file()), None)

    def _split(self, train: bool) -> LabelledTensors:
        try:
            split = self.source(Path(self.root).expanduser(), train=train)
        except Exception as error:  # torchvision's reader fails in an assert or in a reshape
            raise DataError(f"{self._folder}: broken files; delete those without .gz and run again") from error
        images = scale(split.data[:, None], self.size, self.size)
        return LabelledTensors(self._permuted(images), split.targets.long())


class FashionMNIST(MNIST):
    """60,000 + 10,000 images of clothes in MNIST's format, in FashionMNIST/raw, with the official test split.

    Source: Xiao, Rasul and Vollgraf, Fashion-MNIST (2017), MIT licence.
    """

    source = datasets.FashionMNIST
    names = datasets.FashionMNIST.classes
