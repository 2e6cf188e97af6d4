"""benchmarks/paired.py: the test and the interval against scipy and cases by hand, and the command on two trainings."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_sets
import torch
from scipy.stats import binomtest

from datamodules import AudioFolder, Digits
from longseq.tasks import Ordinal, SingleLabel, Task

SCRIPT = Path(__file__).parents[2] / "benchmarks/paired.py"


@pytest.fixture(scope="module")
def paired() -> Any:
    spec: Any = importlib.util.spec_from_file_location("paired", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rights(both: int, first: int, second: int, none: int = 0) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(True, True)] * both + [(True, False)] * first + [(False, True)] * second + [(False, False)] * none
    one, other = zip(*pairs, strict=True)
    return np.array(one), np.array(other)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (5, 20), (7, 7), (20, 5), (0, 300), (480, 520)])
def test_mcnemars_p_is_that_of_a_binomial_test_of_the_discordant_pairs(paired: Any, first: int, second: int) -> None:
    p = paired.mcnemar(*rights(10, first, second, 3))
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert p == (first, second, pytest.approx(expected, rel=1e-9))


def test_the_interval_of_single_samples_is_that_of_a_mean(paired: Any) -> None:
    one, other = rights(600, 100, 200, 100)
    difference, low, high = paired.interval(one, other, list(map(str, range(1000))))
    half = 1.96 * np.std(other.astype(float) - one) / np.sqrt(1000)
    assert difference == pytest.approx(0.1)
    assert (low, high) == pytest.approx((0.1 - half, 0.1 + half), abs=0.003)


def test_of_groups_that_agree_within_the_interval_is_that_of_the_groups(paired: Any) -> None:
    """Ten speakers of a hundred clips: the second model is right on all clips of six of them, and the first of none."""
    second = np.repeat([True] * 6 + [False] * 4, 100)
    groups = np.repeat(list("abcdefghij"), 100).tolist()
    difference, low, high = paired.interval(np.zeros(1000, bool), second, groups)
    quantiles = [np.quantile(np.random.default_rng(1).binomial(10, 0.6, 100_000) / 10, q) for q in (0.025, 0.975)]
    assert difference == pytest.approx(0.6) and (low, high) == pytest.approx(quantiles, abs=1e-9)


def test_groups_of_unlike_sizes_count_by_their_samples(paired: Any) -> None:
    second = np.array([True] * 3 + [False])
    assert paired.interval(np.zeros(4, bool), second, ["a", "a", "a", "b"])[0] == 0.75
    assert paired.interval(np.zeros(4, bool), second, ["a"] * 4) == (0.75, 0.75, 0.75)


def test_a_group_is_what_the_pattern_matches(paired: Any) -> None:
    assert paired.group_of("yes/0a7c_nohash_0.wav", r"([0-9a-f]+)_nohash") == "0a7c"
    assert paired.group_of("7_theo_0.wav", "_[a-z]+_") == "_theo_"
    assert paired.group_of("7_theo_0.wav", None) == "7_theo_0.wav"
    with pytest.raises(SystemExit, match=r"^error: group: x matches nothing in 7.wav"):
        paired.group_of("7.wav", "x")


class LongIsHorns:
    """Answers horns for each clip of more than 90 ms, and else bells."""

    task, head = SingleLabel(), None

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        is_long = batch["lengths"] > 720
        return torch.stack([~is_long, is_long], dim=1).float()


def test_an_answer_stands_beside_the_name_of_its_sample_though_a_loader_sorts_by_length(
    paired: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, count in (("train", 4), ("val", 4), ("test", 12)):  # clip 9 of 50 + 5 * 9 ms is the first long one
        for number in range(count):
            kind = ("bells", "horns")[number % 2]
            small_sets.noise(tmp_path / f"{split}/{kind}/{number}.wav", 8000, 0.05 + 0.005 * number)
    data = AudioFolder(str(tmp_path), sample_rate_hz=8000, seconds=0.2, batch_size=5)
    monkeypatch.setattr(paired, "model_and_data", lambda *_: (LongIsHorns(), data))
    answered = paired.answers_of(Path("any.ckpt"))
    numbers = [int(Path(name).stem) for name in answered.names]
    assert sorted(numbers) == list(range(12)) and answered.labels == [number % 2 for number in numbers]
    assert answered.right.tolist() == [(number >= 9) == (number % 2) for number in numbers]


def test_the_answer_of_grades_is_their_median(paired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of Ordinal are questions, not classes: this model says yes to two of three for every digit."""

    class Second:
        task: Task = Ordinal()
        head = None

        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            return torch.tensor([3.0, 1.0, -2.0]).expand(len(images), 3)

    monkeypatch.setattr(paired, "model_and_data", lambda *_: (Second(), Digits()))
    answered = paired.answers_of(Path("any.ckpt"))
    assert answered.right.tolist() == [label == 2 for label in answered.labels]


def test_two_trainings_are_compared_by_one_command(
    command, paired: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    small = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.max_epochs", "1"]
    both, figures = [], []
    for control in ("none", "one_key"):
        flags = ["--config", f"controls/{control}", "--experiment", control, "--trainer.default_root_dir", tmp_path]
        assert command("fit", "--config", "image/digits", *flags, *small, "--baseline", "false").code == 0
        run = tmp_path / f"runs/{control}/0"
        both.append(str(run / "best.ckpt"))
        figures.append(json.loads((run / "metrics.json").read_text())["test/accuracy"])

    def printed(*checkpoints: str) -> str:
        monkeypatch.setattr("sys.argv", ["paired.py", "--first", both[0], "--second", *checkpoints])
        paired.main()
        return capsys.readouterr().out

    capsys.readouterr()
    out = printed(both[1])
    counts = [int(part.split(" of 359")[0]) for part in out.split("best.ckpt: ")[1:]]
    assert [count / 359 for count in counts] == pytest.approx(figures, abs=1e-6)
    assert f"second minus first: {figures[1] - figures[0]:+.3f} (" in out and "359 groups" in out
    assert "right with one alone: 0, 0; McNemar's exact p = 1\n" in printed(both[0])
    with pytest.raises(SystemExit, match=r"^error: second: must hold 1 checkpoints as first does; give pairs"):
        printed(*both)
