"""How many of a table's events are found: recall and precision of held-out recordings."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from tones import SMALL, tone

import longseq
from longseq.training.board.event_figures import joined, pairs

WINDOW = 0.5


def naive_pairs(found: list[tuple[float, float]], true: list[tuple[float, float]]) -> int:
    """The size of a maximum matching of those that overlap."""
    if not found or not true:
        return 0
    overlaps = [[int(max(a, start) < min(b, end)) for start, end in true] for a, b in found]
    return int((maximum_bipartite_matching(csr_array(overlaps)) >= 0).sum())


def test_as_many_pairs_are_counted_as_a_maximum_matching_has() -> None:
    assert pairs([(0.0, 9.0)], [(1.0, 2.0), (3.0, 4.0)]) == 1  # two calls in one event
    assert pairs([(1.0, 1.2), (1.4, 1.6)], [(1.0, 2.0)]) == 1  # one call in two pieces
    assert pairs([(1.0, 2.0)], [(2.0, 3.0)]) == 0  # they only touch
    random = np.random.default_rng(0)
    counted = 0
    for _ in range(300):
        kinds = []
        for _ in range(2):
            times = np.unique(random.integers(0, 40, 2 * random.integers(0, 8)))
            kinds.append(list(zip(times[:-1:2].tolist(), times[1::2].tolist(), strict=True)))
        assert pairs(*kinds) == naive_pairs(*kinds)
        counted += pairs(*kinds)
    assert counted > 300


def test_rows_that_overlap_are_one_event() -> None:
    assert joined([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5), (0.1, 0.2)]) == [(0.0, 2.5), (3.0, 4.0)]
    assert joined([]) == []


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of 1.9 s with low and high tones, and a table of when they are heard; the last two are the test."""
    folder = tmp_path_factory.mktemp("field")
    rows = []
    for number in range(12):
        sound = np.random.default_rng(number).normal(0, 0.02, round(1.9 * 8000))
        for hertz, start, name in ((300, 0.1 + 0.07 * number, "low"), (2000, 1.25, "high"), (2000, 1.6, "high")):
            if number % 3 or name == "high":
                first = round(start * 8000)
                sound[first : first + 800] += tone(hertz, 0.1)
                split = "test" if number > 9 else "val" if number > 7 else "train"
                rows.append((f"{number}.wav", round(start, 3), round(start + 0.1, 3), name, split))
        soundfile.write(folder / f"{number}.wav", sound, 8000)
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "start", "end", "label", "split"), *rows])
    return folder


def test_fit_test_and_validate_say_how_many_true_events_are_found(field: Path, command, tmp_path: Path) -> None:
    flags = ["--data", "AudioFolder", "--data.root", field, "--data.table", "labels.csv", "--data.clip_seconds", WINDOW]
    flags += ["--data.labels_separator", ";", "--data.batch_size", "4", "--model.task", "MultiLabel", "--model.pool"]
    flags += ["max", "--model.encoder", "SpectrogramEncoder", "--model.encoder.attention", "Verma", *SMALL]
    flags += ["--model.encoder.num_mels", "16", "--model.encoder.any_length", "true"]
    flags += ["--model.encoder.positions", "none", "--model.learning_rate", "1e-2", "--trainer.max_epochs", "8"]
    flags += ["--trainer.default_root_dir", tmp_path, "--trainer.logger", "false"]
    done = command("fit", *flags, "--experiment", "tones")
    assert done.code == 0, done.err
    run = tmp_path / "runs/tones/0"
    model = longseq.load(run / "best.ckpt")
    printed = {"fit": done.out}
    for name, split in (("test", "test"), ("validate", "val")):
        done = command(name, "--ckpt_path", run / "best.ckpt")
        assert done.code == 0, done.err
        printed[split] = done.out
    metrics = json.loads((run / "metrics.json").read_text())
    for split in ("test", "val"):
        with open(field / "labels.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["split"] == split]
        both = of_truth = of_found = 0
        for path in {row["path"] for row in rows}:
            events = model.events(field / path, window=WINDOW)
            for label in ("low", "high"):
                of_class = [row for row in rows if (row["path"], row["label"]) == (path, label)]
                true = [(float(row["start"]), float(row["end"])) for row in of_class]
                found = [event[:2] for event in events if event.class_name == label]
                both, of_truth, of_found = both + naive_pairs(found, true), of_truth + len(true), of_found + len(found)
        assert both > 0
        for what, share in (("recall", both / of_truth), ("precision", both / of_found)):
            assert f"{split} event_{what}: {share:.4f}" in printed[split]
            if split == "test":
                assert f"test event_{what}: {share:.4f}" in printed["fit"]
                assert metrics[f"test/event_{what}"] == pytest.approx(share)
                assert f"| event {what} |" in (run / "README.md").read_text()
