"""Every experiment of benchmarks/experiments.py, on real data and for seconds."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LEVELS = [f"pathfinder/{dashes} dashes" for dashes in (1, 2, 4, 6, 14)]
NAMES = [
    "same",
    "few",
    "more/words",
    "more/speakers",
    "more/level",
    "more/level-kept",
    "needles",
    "pixels",
    "pixels/permuted",
    *LEVELS,
    "pathfinder/2 dashes, longer",
    "order",
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for path in (ROOT / "benchmarks").glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module("controlled")


def test_every_experiment_has_a_system_for_each_part_of_its_comparison(script: Any) -> None:
    assert list(script.EXPERIMENTS) == NAMES
    for name, experiment in script.EXPERIMENTS.items():
        compared = {system for group in experiment.primary for system in group}
        assert compared <= {*experiment.systems, *experiment.peers}, name
        others = experiment.after, experiment.rates_of, experiment.steps_of
        assert all(other in NAMES[: NAMES.index(name)] for other in others if other)


# What makes an experiment's trainings short, by a word of its flags.
SHORT = {
    "audio/needles": ["--data.num_train", "20", "--data.num_test", "10"],
    "image/pathfinder": ["--data.num_train", "40", "--data.num_test", "10"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_all_systems_of_every_experiment_train(
    name: str, script: Any, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path / "cache"))
    experiment = script.EXPERIMENTS[name]._replace(after="")
    flags = [flag for word, flags in SHORT.items() if word in experiment.flags for flag in flags]
    flags += ["--data.batch_size", "4", "--model.encoder.dim", "16", "--trainer.limit_val_batches", "1"]
    often = ["--trainer.check_val_every_n_epoch", "null", "--trainer.val_check_interval", "1"]
    start = " ".join([experiment.start.replace("epochs 10", "epochs 1"), *flags]) if experiment.start else ""
    trainer = script.Trainer(name, experiment._replace(start=start), real_data, tmp_path, tmp_path / "runs.csv")
    trainer.prepare()
    for number, system in enumerate(experiment.systems):
        trainer.fit_system(system, tmp_path / str(number), 2, *flags, *often)
        assert trainer.checkpoint(tmp_path / str(number)).exists()


@pytest.mark.thorough
def test_the_two_systems_beside_longseq_answer_the_same_clips(
    script: Any, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, front_door = importlib.import_module("words"), importlib.import_module("front_door")
    trained: list[Any] = []
    fit_cnn = front_door.fit_cnn
    monkeypatch.setattr(front_door, "fit_cnn", lambda *given: trained.append(fit_cnn(*given)) or trained[-1])
    words.write(30, real_data, tmp_path)
    folders = [sorted((tmp_path / "words" / split).glob("*/*.wav")) for split in ("train", "test")]
    assert [len(clips) for clips in folders] == [300, 124]
    tested = {}
    for name, peer in words.PEERS.items():
        figures = peer.fit(tmp_path, tmp_path / name, 0.05, 0)
        tested[name] = peer.answers(tmp_path, tmp_path / name, 0)
        assert 0 <= figures["validation"] <= 1
    assert tested["random forest"][:2] == tested["CNN"][:2]
    assert tested["CNN"].names == [path.relative_to(tmp_path / "words").as_posix() for path in folders[1]]
    assert tested["random forest"].right.mean() > 0.4  # chance is 0.1
    assert (tested["CNN"].right == trained[0].right("test").numpy()).all()  # the weights that were trained
