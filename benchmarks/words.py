"""The ten words of Speech Commands with few clips each, and two systems beside longseq's that learn them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from paired import Tested
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import log_loss

from datamodules import AudioFolder
from longseq.reports.baseline import features

RATE_HZ = 16000


class Peer(NamedTuple):
    """A system that longseq does not have. It is given its experiment's folder and that of its training."""

    setting: str
    fit: Callable[[Path, Path, float, int], Mapping[str, object]]  # for so many minutes, with this seed; its figures
    answers: Callable[[Path, Path, int], Tested]  # to the test, with this seed


def write(clips: int, data: Path, folder: Path) -> None:
    """Link so many clips of each word, the first ones, to train on, and all others as the published lists say."""
    from front_door import speech_commands

    counts: dict[str, int] = {}
    for split, word, file in speech_commands(data):
        counts[split + word] = counts.get(split + word, 0) + 1
        if split == "train" and counts[split + word] > clips:
            continue
        (target := folder / "words" / split / word).mkdir(parents=True, exist_ok=True)
        if not (link := target / Path(str(file)).name).exists():
            link.symlink_to(Path(str(file)).resolve())


def _forest(folder: Path, seed: int, split: str) -> tuple[RandomForestClassifier, np.ndarray, np.ndarray, list[str]]:
    """A random forest on statistics of log-mel spectrograms, and the vectors, labels and names of a split."""
    data = AudioFolder(root=str(folder / "words"), sample_rate_hz=RATE_HZ)
    data.setup("fit")
    splits = data.splits()
    vectors = {name: torch.cat([*features(RATE_HZ, splits[name])]).numpy() for name in ("train", split)}
    forest = RandomForestClassifier(500, random_state=seed).fit(vectors["train"], splits["train"].labels.numpy())
    return forest, vectors[split], splits[split].labels.numpy(), list(splits[split].names)


def fit_forest(folder: Path, run: Path, minutes: float, seed: int) -> dict[str, object]:
    """It takes seconds, whatever the minutes are, so it is not kept."""
    forest, vectors, labels, _ = _forest(folder, seed, "val")
    loss = log_loss(labels, forest.predict_proba(vectors), labels=forest.classes_)
    return {"validation": float(forest.score(vectors, labels)), "loss": float(loss)}


def answers_of_forest(folder: Path, run: Path, seed: int) -> Tested:
    forest, vectors, labels, names = _forest(folder, seed, "test")
    return Tested(names, labels.tolist(), forest.predict(vectors) == labels)


_RATE = 2e-3  # of the CNN


def fit_cnn(folder: Path, run: Path, minutes: float, seed: int) -> dict[str, object]:
    from front_door import SETS, fit_cnn

    cnn = fit_cnn(folder / "words", SETS["speech_commands"], minutes, seed, _RATE)
    run.mkdir(parents=True, exist_ok=True)
    torch.save(cnn.network.state_dict(), run / "cnn.pt")
    return {"validation": cnn.validation, "epochs": cnn.passes, "minutes": minutes}


def answers_of_cnn(folder: Path, run: Path, seed: int) -> Tested:
    from front_door import SETS, untrained_cnn

    cnn = untrained_cnn(folder / "words", SETS["speech_commands"])
    cnn.network.load_state_dict(torch.load(run / "cnn.pt", weights_only=True))
    return cnn.tested(folder / "words")


PEERS = {
    "random forest": Peer("500 trees", fit_forest, answers_of_forest),
    "CNN": Peer(f"{_RATE:g}", fit_cnn, answers_of_cnn),
}
