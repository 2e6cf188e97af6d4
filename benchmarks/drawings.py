"""A control of Pathfinder: one threshold on how bright an image is, so a question that it answers needs no path."""

from functools import partial
from pathlib import Path

import numpy as np
from paired import Tested
from sklearn.tree import DecisionTreeClassifier
from words import Peer

from datamodules import Pathfinder


def _threshold(dashes: int, split: str) -> tuple[DecisionTreeClassifier, np.ndarray, np.ndarray, list[str]]:
    """A threshold on the mean of an image, and the means, labels and names of a split."""
    data = Pathfinder(dashes=dashes)
    data.setup("fit")
    splits = data.splits()
    means = {name: splits[name].inputs.double().flatten(1).mean(1, keepdim=True).numpy() for name in ("train", split)}
    tree = DecisionTreeClassifier(max_depth=1).fit(means["train"], splits["train"].labels.numpy())
    return tree, means[split], splits[split].labels.numpy(), list(splits[split].names)


def _fit(dashes: int, folder: Path, run: Path, minutes: float, seed: int) -> dict[str, object]:
    tree, means, labels, _ = _threshold(dashes, "val")
    return {"validation": float(tree.score(means, labels))}


def _answers(dashes: int, folder: Path, run: Path, seed: int) -> Tested:
    tree, means, labels, names = _threshold(dashes, "test")
    return Tested(names, labels.tolist(), tree.predict(means) == labels)


def brightness(dashes: int) -> Peer:
    """The control for images with so many dashes in a path; it takes seconds, so it is not kept."""
    return Peer("one threshold", partial(_fit, dashes), partial(_answers, dashes))
