"""CIFAR-10 and CIFAR-100, through torchvision, from their original archives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torchvision import datasets
from torchvision.datasets.utils import check_integrity
from torchvision.transforms.v2.functional import rgb_to_grayscale

from datamodules.cache import cache_folder, locked
from datamodules.errors import DataError
from datamodules.images import ImageDataModule, checked_size, scale
from datamodules.samples import LabelledTensors

_TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_HUNDRED = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
    maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail
    snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
    tulip turtle wardrobe whale willow_tree wolf woman worm
"""


class CIFAR10(ImageDataModule):
    """50,000 + 10,000 photographs of ten classes, uint8 (3, size, size), with the official test split.

    Long Range Arena's task "Image" uses these images in grey, with each of the 1,024 pixels as a token, without
    augmentation. Source: Krizhevsky, Learning multiple layers of features from tiny images (2009).

    Args:
        root: Folder that holds cifar-10-batches-py, or its archive, which is unpacked there.
        grayscale: Whether the images are grey, of one channel.
        download: Fetch the archive if it is missing.
        size: Height and width to which the images are resized; 32 is the original.
        common: Arguments of ImageDataModule.

    Raises:
        DataError: From setup, if files are missing or are not the original ones, or cannot be fetched or unpacked.
    """

    source: ClassVar[type[datasets.CIFAR10]] = datasets.CIFAR10
    names: ClassVar[Sequence[str]] = _TEN

    def __init__(
        self, root: str, grayscale: bool = False, download: bool = False, size: int = 32, **common: Any
    ) -> None:
        super().__init__(**common)
        self.class_names = list(self.names)
        self.root = root
        self.grayscale = grayscale
        self.download = download
        self.size = checked_size(size, original=32)
        self.shape = (1 if grayscale else 3, size, size)

    def load(self) -> tuple[LabelledTensors, None, LabelledTensors]:
        root, source = Path(self.root).expanduser(), self.source
        folder = root / source.base_folder
        is_packed = check_integrity(root / source.filename, source.tgz_md5)
        try:
            with locked(cache_folder() / source.__name__):
                # torchvision checks the md5 of each file, uses an existing archive, and unpacks incomplete data again
                train = source(root, train=True, download=self.download or is_packed)
            return self._tensors(train), None, self._tensors(source(root, train=False))
        except RuntimeError as error:
            what = "not the original files" if folder.is_dir() else "no such folder"
            raise DataError(
                f"{folder}: {what}; put {source.filename} in {root} (md5 {source.tgz_md5}), or set "
                "data.download to true"
            ) from error
        except OSError as error:
            raise DataError(
                f"{folder}: cannot be fetched or unpacked ({error.strerror or error}); put {source.filename} in {root}"
            ) from error

    def _tensors(self, split: datasets.CIFAR10) -> LabelledTensors:
        images = torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous()
        images = scale(rgb_to_grayscale(images) if self.grayscale else images, self.size, self.size)
        return LabelledTensors(images, torch.tensor(split.targets))


class CIFAR100(CIFAR10):
    """50,000 + 10,000 photographs of 100 classes, in the format of CIFAR-10; the folder is cifar-100-python."""

    source = datasets.CIFAR100
    names = _HUNDRED.split()
