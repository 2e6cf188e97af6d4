"""MNIST, through torchvision, from the four original files."""

from pathlib import Path

from pytorch_lightning.trainer.states import TrainerFn
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from datamodules.base import DataError, LabelledTensors
from datamodules.images import ImageDataModule

_MD5_OF_ARCHIVE = dict(datasets.MNIST.resources)


class MNIST(ImageDataModule):
    """60,000 + 10,000 handwritten digits, uint8 (1, 28, 28), white on black, with the official test split.

    Source: LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition (1998).

    Args:
        root: Folder that holds MNIST/raw with the four files, packed (.gz) or not; packed ones are unpacked there.
        download: Fetch the files that are missing from the network.

    Raises:
        DataError: From prepare_data or setup, if files are missing or broken, or cannot be fetched or unpacked.
    """

    def __init__(
        self,
        root: str,
        download: bool = False,
        batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed)
        self.class_names = [str(digit) for digit in range(10)]
        self.root = root
        self.download = download
        self.shape = (1, 28, 28)

    @property
    def _folder(self) -> Path:
        return Path(self.root).expanduser() / "MNIST" / "raw"

    def prepare_data(self) -> None:
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING:
            return
        # torchvision's download() opens no connection for an archive whose checksum is right
        packed = all(check_integrity(self._folder / name, md5) for name, md5 in _MD5_OF_ARCHIVE.items())
        if self._missing() is None or not (packed or self.download):
            return  # setup says what is wrong, if anything is
        try:
            datasets.MNIST(Path(self.root).expanduser(), download=True)
        except OSError as error:
            what = f"cannot fetch or unpack the files here ({error.strerror or error})"
            raise DataError(f"{self._folder}: {what}; copy them to a folder that you can write") from error
        except RuntimeError as error:
            raise DataError(f"{self._folder}: download failed; check the network or put the files there") from error

    def load(self) -> tuple[LabelledTensors, LabelledTensors]:
        archive = self._missing()
        if archive is not None:
            what = "not the original file" if archive.is_file() else "no such file, packed or not"
            md5 = _MD5_OF_ARCHIVE[archive.name]
            raise DataError(f"{archive}: {what}; put it there (md5 {md5}), or set download to true")
        return self._split(train=True), self._split(train=False)

    def _missing(self) -> Path | None:
        """The archive of the first of the four files that is not there unpacked."""
        archives = (self._folder / name for name in _MD5_OF_ARCHIVE)
        return next((archive for archive in archives if not archive.with_suffix("").is_file()), None)

    def _split(self, train: bool) -> LabelledTensors:
        try:
            split = datasets.MNIST(Path(self.root).expanduser(), train=train)
        except Exception as error:  # torchvision's reader asserts, or fails to reshape
            raise DataError(f"{self._folder}: broken files; delete those without .gz and run again") from error
        return LabelledTensors(split.data[:, None], split.targets.long())
