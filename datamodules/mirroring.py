"""Whether mirroring changes the class of images: it does for digits, letters and arrows, not for most photographs."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from datamodules.images import scale

MOST = 2000  # images: more would take longer than a second or two
_SIDE = 16  # pixels
_FOLDS = 3
_SIGNIFICANT, _MUCH = 0.01, 0.1


class Mirrored(NamedTuple):
    """The accuracy on held-out images, and on the same images mirrored from left to right.

    Attributes:
        plain: The accuracy on the images.
        mirrored: The accuracy on the mirrored images.
        p: The probability of so large a loss by chance, if mirroring changes no class: the one-sided sign test over the
            images of which one version only is recognised (McNemar, 1947).
    """

    plain: float
    mirrored: float
    p: float

    @property
    def changes_classes(self) -> bool:
        """Whether the loss by mirroring is significant and large.

        Photographs may have a small loss, if most of them show the same side, such as teapots with the spout on the
        left.
        """
        return self.p < _SIGNIFICANT and self.plain - self.mirrored >= _MUCH


def mirrored_accuracy(images: UInt8[Tensor, "n c h w"], labels: Int64[Tensor, " n"], seed: int = 0) -> Mirrored | None:
    """The accuracy of a support vector machine on the pixels of held-out images, at 16 x 16 pixels at most.

    The frames of a film look like digits here: a frame is recognised by its neighbours in other folds, but not its
    mirror image.

    Args:
        images: The images of the training split; of more than 2,000, a random part is used.
        labels: Their classes.
        seed: Decides the part and the folds.

    Returns:
        None if fewer than two classes have three images or more.
    """
    from sklearn.decomposition import PCA  # this import takes a second
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import SVC

    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:MOST]
    counts = labels[chosen].bincount()
    chosen = chosen[counts[labels[chosen]] >= _FOLDS]
    if len(labels[chosen].unique()) < 2:
        return None
    small = scale(images[chosen], *(min(side, _SIDE) for side in images.shape[2:]))
    pixels, flipped = (version.flatten(1).float().numpy() for version in (small, small.flip(3)))
    classes = labels[chosen].numpy()
    is_right = {"plain": 0, "mirrored": 0, "plain alone": 0, "mirrored alone": 0}
    for train, held in StratifiedKFold(_FOLDS, shuffle=True, random_state=seed).split(pixels, classes):
        model = make_pipeline(PCA(0.99), SVC(C=10)).fit(pixels[train], classes[train])
        plain, mirrored = (model.predict(version[held]) == classes[held] for version in (pixels, flipped))
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
