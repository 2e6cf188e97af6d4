"""Whether mirroring an image may change its class: of digits, letters and arrows it does, of most photographs not."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from datamodules.images import scale

MOST = 2000  # images: with more, it would take more than a second or two
_SIDE = 16  # pixels
_FOLDS = 3
_SIGNIFICANT, _MUCH = 0.01, 0.1


class Mirrored(NamedTuple):
    """How well held-out images are recognised as they are and mirrored from left to right.

    Attributes:
        plain: The accuracy on the images as they are.
        mirrored: The accuracy on the same images, mirrored.
        p: How likely so large a loss is by chance, if mirroring changes no class: the one-sided sign test over the
            images that are recognised in one way only (McNemar, 1947).
    """

    plain: float
    mirrored: float
    p: float

    @property
    def changes_classes(self) -> bool:
        """Whether mirrored images are recognised significantly and much worse. A small loss may be that of photographs
        in which one side is more frequent: of teapots whose spouts mostly point to the left."""
        return self.p < _SIGNIFICANT and self.plain - self.mirrored >= _MUCH


def mirrored_accuracy(images: UInt8[Tensor, "n c h w"], labels: Int64[Tensor, " n"], seed: int = 0) -> Mirrored | None:
    """Recognise images by a support vector machine on their pixels, at 16 x 16 at most, that was fitted to other ones.

    A film looks like digits, if its frames are in several folds: they are recognised by each other, mirrored ones not.

    Args:
        images: Those of the training split; of more than 2,000 a random part is taken.
        labels: Their classes.
        seed: Decides the part and the folds.

    Returns:
        None if fewer than two classes have three images or more: nothing can be learned of them.
    """
    from sklearn.decomposition import PCA  # scikit-learn takes a second to import
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import SVC

    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:MOST]
    counts = labels[chosen].bincount()
    chosen = chosen[counts[labels[chosen]] >= _FOLDS]
    if len(labels[chosen].unique()) < 2:
        return None
    small = scale(images[chosen], *(min(side, _SIDE) for side in images.shape[2:]))
    pixels, flipped = (each.flatten(1).float().numpy() for each in (small, small.flip(3)))
    classes = labels[chosen].numpy()
    is_right = {"plain": 0, "mirrored": 0, "plain alone": 0, "mirrored alone": 0}
    for train, held in StratifiedKFold(_FOLDS, shuffle=True, random_state=seed).split(pixels, classes):
        model = make_pipeline(PCA(0.99), SVC(C=10)).fit(pixels[train], classes[train])
        plain, mirrored = (model.predict(each[held]) == classes[held] for each in (pixels, flipped))
        is_right["plain"] += int(plain.sum())
        is_right["mirrored"] += int(mirrored.sum())
        is_right["plain alone"] += int((plain & ~mirrored).sum())
        is_right["mirrored alone"] += int((mirrored & ~plain).sum())
    p = sign_test(is_right["plain alone"], is_right["mirrored alone"])
    return Mirrored(is_right["plain"] / len(chosen), is_right["mirrored"] / len(chosen), p)


def sign_test(more: int, less: int) -> float:
    """The probability that of ``more + less`` fair coins ``more`` or more show heads."""
    trials = more + less
    return sum(math.comb(trials, heads) for heads in range(more, trials + 1)) / 2**trials
