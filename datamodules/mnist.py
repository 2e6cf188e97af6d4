"""MNIST and Fashion-MNIST, through torchvision, from their four original files."""

from pathlib import Path
from typing import Any, ClassVar

from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from datamodules.cache import cache_folder, locked
from datamodules.errors import DataError
from datamodules.images import ImageDataModule, checked_size, scale
from datamodules.samples import LabelledTensors


class MNIST(ImageDataModule):
    """60,000 + 10,000 handwritten digits, uint8 (1, size, size), white on black, with the official test split.

    Source: LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition (1998).

    Args:
        root: Folder that holds MNIST/raw with the four files, packed (.gz) or not; packed ones are unpacked there.
        download: Fetch missing files from the network.
        size: Height and width to which the images are resized; 28 is the original.
        common: Arguments of ImageDataModule.

    Raises:
        DataError: From setup, if files are missing or broken, or cannot be fetched or unpacked.
    """

    source: ClassVar[type[datasets.MNIST]] = datasets.MNIST
    names: ClassVar[list[str]] = [str(digit) for digit in range(10)]

    def __init__(self, root: str, download: bool = False, size: int = 28, **common: Any) -> None:
        super().__init__(**common)
        self.class_names = self.names
        self.root = root
        self.download = download
        self.size = checked_size(size, original=28)
        self.shape = (1, size, size)

    @property
    def _folder(self) -> Path:
        return Path(self.root).expanduser() / self.source.__name__ / "raw"

    def _unpack(self) -> None:
        # torchvision's download() opens no connection for an archive whose checksum is right
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
        """The archive of the first of the four files that is not there in unpacked form; None if all are."""
        archives = (self._folder / name for name, _ in self.source.resources)
        return next((archive for archive in archives if not archive.with_suffix("").is_file()), None)

    def _split(self, train: bool) -> LabelledTensors:
        try:
            split = self.source(Path(self.root).expanduser(), train=train)
        except Exception as error:  # torchvision's reader fails in an assert or a reshape
            raise DataError(f"{self._folder}: broken files; delete those without .gz and run again") from error
        return LabelledTensors(scale(split.data[:, None], self.size, self.size), split.targets.long())


class FashionMNIST(MNIST):
    """60,000 + 10,000 pictures of clothes in MNIST's format, in FashionMNIST/raw, with the official test split.

    Source: Xiao, Rasul and Vollgraf, Fashion-MNIST (2017), MIT licence.
    """

    source = datasets.FashionMNIST
    names = datasets.FashionMNIST.classes
