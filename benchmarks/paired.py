r"""Compare two models on the same test samples: McNemar's exact test, and an interval of the difference.

    python benchmarks/paired.py --first runs/none/*/best.ckpt --second runs/verma/*/best.ckpt --group '(\w+)_nohash'

The checkpoints are pairs, in order: seeds, or folds. Each pair is tested on the test split of its own data, which must
be the same for both. McNemar's test is of one pair. The interval, for 95 %, is of the difference of the accuracies over
all pairs, from a bootstrap of groups: what --group matches in a sample's name, such as its speaker; by default the
sample itself. The samples of a group are not independent, and neither are the seeds of a sample.
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from longseq.training.classifier import model_and_data


class Tested(NamedTuple):
    """What a model answers on its test split: the samples' names, their labels, and whether each answer is right."""

    names: list[str]
    labels: list[int]
    right: np.ndarray

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._replace(right=self.right.tolist())))

    @classmethod
    def load(cls, path: Path) -> "Tested":
        names, labels, right = json.loads(path.read_text())
        return cls(names, labels, np.array(right))


def mcnemar(first: np.ndarray, second: np.ndarray) -> tuple[int, int, float]:
    """How many samples only the first model and only the second model has right, and the two-sided p of McNemar's exact
    test: that of a fair coin which falls at least as unevenly."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    n, fewer = only_first + only_second, min(only_first, only_second)
    p = 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n
    return only_first, only_second, min(p, 1.0)


def interval(
    first: np.ndarray, second: np.ndarray, groups: Sequence[str], draws: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """The accuracy of the second model minus that of the first, and the bounds of its 95 % interval: percentiles over
    draws of as many groups as there are, with replacement."""
    _, numbers = np.unique(np.asarray(groups), return_inverse=True)
    gains = np.bincount(numbers, second.astype(float) - first.astype(float))
    counts = np.bincount(numbers).astype(float)
    drawn = np.random.default_rng(seed).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=draws)
    low, high = np.percentile((drawn @ gains) / (drawn @ counts), [2.5, 97.5])
    return float(gains.sum() / counts.sum()), float(low), float(high)


def answers_of(ckpt_path: Path, root: str | None = None, allow_class: Sequence[str] = ()) -> Tested:
    """Run a model of one class a sample on its test split."""
    model, data = model_and_data(ckpt_path, allow_class, root)
    data.setup("test")
    samples = data.splits()["test"]
    answers, labels = [], []
    with torch.inference_mode():
        for batch in torch.arange(len(samples)).split(data.batch_size):  # a loader sorts sounds by their lengths
            inputs, of_batch = samples.__getitems__(batch.tolist())
            predicted, expected = model.task.measured(model.head, model.task.predicted(model(inputs)), of_batch)
            answers.append(predicted.argmax(1) if predicted.ndim > 1 else predicted)
            labels.append(expected)
    truth = torch.cat(labels)
    if truth.ndim != 1 or truth.is_floating_point():
        raise SystemExit(f"error: {ckpt_path}: must be of a model that gives each sample one class; give another")
    return Tested(list(samples.names), truth.tolist(), (torch.cat(answers) == truth).numpy())


def group_of(name: str, pattern: str | None) -> str:
    """The group of a sample: what the pattern matches in its name (its first group in brackets, if it has one)."""
    if pattern is None:
        return name
    match = re.search(pattern, name)
    if match is None:
        raise SystemExit(
            f"error: group: {pattern} matches nothing in {name}; look at the names in the run's splits.csv"
        )
    return match[1 if match.re.groups else 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", nargs="+", type=Path, required=True, help="checkpoints of the first system")
    parser.add_argument("--second", nargs="+", type=Path, required=True, help="those of the second, in the same order")
    parser.add_argument("--group", help="a regular expression: what it matches in a name is the sample's group")
    parser.add_argument("--root", help="folder of the data, if it has moved")
    parser.add_argument("--allow_class", nargs="*", default=(), help="packages whose classes checkpoints may name")
    given = parser.parse_args()
    if len(given.first) != len(given.second):
        raise SystemExit(f"error: second: must hold {len(given.first)} checkpoints as first does; give pairs")
    right: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    groups: list[str] = []
    for pair in zip(given.first, given.second, strict=True):
        one, other = (answers_of(path, given.root, given.allow_class) for path in pair)
        if one[:2] != other[:2]:
            raise SystemExit(f"error: {pair[1]}: must have the test samples of {pair[0]}, in their order; give a pair")
        only_one, only_other, p = mcnemar(one.right, other.right)
        n = len(one.right)
        print(f"{pair[0]}: {one.right.sum()} of {n}; {pair[1]}: {other.right.sum()} of {n}")
        print(f"right with one alone: {only_one}, {only_other}; McNemar's exact p = {p:.3g}")
        right[0].append(one.right)
        right[1].append(other.right)
        groups += [group_of(name, given.group) for name in one.names]
    difference, low, high = interval(np.concatenate(right[0]), np.concatenate(right[1]), groups)
    print(f"second minus first: {difference:+.3f} ({low:+.3f} to {high:+.3f}), {len(set(groups))} groups")


if __name__ == "__main__":
    main()
