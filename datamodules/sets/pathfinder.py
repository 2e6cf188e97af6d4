"""Pathfinder: are two dots joined by one dashed path? The question of Long Range Arena, in drawings of our own."""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from datamodules.cache import cached
from datamodules.errors import require, require_in
from datamodules.images import ImageDataModule
from datamodules.samples import LabelledTensors

SIZES = (32, 64, 128, 256)
_VERSION = 1  # increased when the drawing changes
_FROM_DOTS = 3.0  # the least distance of other paths from a possible dot
_CHUNK = 50  # images that one process makes at a time


class Pathfinder(ImageDataModule):
    """SYNTHETIC images, uint8 (1, size, size): two long dashed paths, shorter paths that distract, and two dots.

    In half of the images, the dots are at the two ends of one long path ("joined"). In the others, each long path has a
    dot at one end ("apart"). Everything scales with the size, so the task is the same at every sequence length. Source:
    Linsley, Kim, Veerabadran, Windolf and Serre, Learning long-range spatial dependencies with horizontal gated
    recurrent units (2018); Tay et al., Long Range Arena (2021), with 160,000 training images of 32x32 or 128x128
    pixels. The drawing is our own (draw_paths has the rules), and there are fewer images, so accuracies cannot be
    compared with those of Long Range Arena.

    Args:
        size: Height and width: 32, 64, 128 or 256.
        dashes: Dashes of a long path, 1 to 14; 6, 9 and 14 are the paper's degrees of difficulty. With 1, joined dots
            overlap, so the brightness of an image tells them.
        distractors: The number of shorter paths, which have a third as many dashes.
        num_train: Images to train on, validation included.
        num_test: Images to test on.
        common: Arguments of ImageDataModule.
    """

    def __init__(
        self,
        size: int = 32,
        dashes: int = 9,
        distractors: int = 5,
        num_train: int = 20_000,
        num_test: int = 2_000,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(size in SIZES, "size", "one of 32, 64, 128, 256", size, "32 is a start")
        require_in("dashes", dashes, 1, 14, "9 is of middle difficulty")
        require_in("distractors", distractors, 0, 12, "more would find no room")
        require(num_train >= 20, "num_train", "20 or more", num_train, "20000 trains a small model")
        require(num_test >= 2, "num_test", "2 or more", num_test, "2000 measures to a percent")
        self.size, self.dashes, self.distractors = size, dashes, distractors
        self.num_train, self.num_test = num_train, num_test
        self.class_names = ["apart", "joined"]
        self.shape = (1, size, size)

    def load(self) -> tuple[LabelledTensors, None, LabelledTensors]:
        count = self.num_train + self.num_test
        what = (_VERSION, self.size, self.dashes, self.distractors, self.seed, count)
        images = cached(
            "pathfinder", repr(what), lambda: torch.from_numpy(np.concatenate([*self._make(count)]))[:, None]
        )
        labels = torch.arange(count) % 2
        train = LabelledTensors(images[: self.num_train], labels[: self.num_train])
        return train, None, LabelledTensors(images[self.num_train :], labels[self.num_train :])

    def _make(self, count: int) -> Iterator[np.ndarray]:
        chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
        with (
            ProcessPoolExecutor(os.cpu_count()) as pool,
            tqdm(total=count, desc="drawing paths", delay=2, disable=None) as bar,
        ):
            settings = (self.size, self.dashes, self.distractors, self.seed)
            for images in pool.map(partial(_draw, *settings), chunks):
                bar.update(len(images))
                yield images


def _draw(size: int, dashes: int, distractors: int, seed: int, numbers: range) -> np.ndarray:
    return np.stack([draw_paths(size, dashes, distractors, number % 2 == 1, [seed, number]) for number in numbers])


def draw_paths(size: int, dashes: int, distractors: int, joined: bool, seed: list[int]) -> np.ndarray:
    """One image, uint8 (size, size).

    Lengths are in 32nds of the side. Dashes are 2 long and 0.6 thick, with gaps of 1. From one dash to the next a path
    turns by up to 30 degrees, or more if there is no room. Two paths are at least 2 apart. The dots have a radius of
    1.5, and no other path is closer to them than 3.

    Args:
        size: Height and width.
        dashes: Dashes of each of the two long paths.
        distractors: The number of paths with a third as many dashes.
        joined: Whether the dots are on one path.
        seed: Decides the image, together with the arguments above.
    """
    generator = np.random.default_rng(seed)
    paths: list[np.ndarray] | None = None
    while paths is None:
        paths = _place([dashes, dashes] + [max(dashes // 3, 1)] * distractors, generator)
    scale = size / 32
    centres = np.stack(np.meshgrid(*2 * [np.arange(size) + 0.5], indexing="ij"), axis=-1) / scale
    ink = np.zeros((size, size))
    for path in paths:
        for begin, end in zip(path[:-1:2], path[1::2], strict=True):
            distance = _distance(centres, begin, end)
            ink = np.maximum(ink, 0.75 * (0.5 + (0.3 - distance) * scale).clip(0, 1))
    first, second = paths[0], paths[0] if joined else paths[1]
    for dot in (first[0], second[-1]):
        distance = np.linalg.norm(centres - dot, axis=-1)
        ink = np.maximum(ink, (0.5 + (1.5 - distance) * scale).clip(0, 1))
    return (255 * ink).round().astype(np.uint8)


def _place(lengths: list[int], generator: np.random.Generator) -> list[np.ndarray] | None:
    """The begin and end of each dash, for paths that keep their distance; None if there is no room."""
    paths, taken, ends = [], np.empty((0, 2)), np.empty((0, 2))
    for length in lengths:
        may_have_dots = len(paths) < 2
        for _ in range(40):
            path = _walk(length, taken, ends, generator)
            if path is not None and not (may_have_dots and not _apart(path[[0, -1]], taken, _FROM_DOTS)):
                break
        else:
            return None
        paths.append(path)
        taken = np.concatenate([taken, _along(path)])
        if may_have_dots:
            ends = np.concatenate([ends, path[[0, -1]]])
    return paths


def _walk(length: int, taken: np.ndarray, ends: np.ndarray, generator: np.random.Generator) -> np.ndarray | None:
    position, angle = generator.uniform(2, 30, 2), generator.uniform(0, 2 * math.pi)
    corners: list[np.ndarray] = []
    own = np.empty((0, 2))
    for _ in range(length):
        for most in np.linspace(math.pi / 6, math.pi / 2, 10):  # a sharper turn only if a gentler one has no room
            turned = angle + generator.uniform(-most, most)
            ahead = np.array([math.cos(turned), math.sin(turned)])
            dash = position + ahead * np.array([[0.0], [1.0], [2.0]])
            inside = (dash > 1.7).all() and (dash < 30.3).all()
            if inside and _apart(dash, taken, 2.0) and _apart(dash, ends, _FROM_DOTS) and _apart(dash, own[:-4], 2.0):
                break
        else:
            return None
        corners += [dash[0], dash[2]]
        own = np.concatenate([own, dash])
        position, angle = dash[2] + ahead, turned
    return np.array(corners)


def _apart(points: np.ndarray, others: np.ndarray, least: float) -> bool:
    return not len(others) or bool((np.linalg.norm(points[:, None] - others, axis=-1) >= least).all())


def _along(path: np.ndarray) -> np.ndarray:
    """Points on dashes and in gaps, at most one unit apart."""
    return np.concatenate([path, (path[:-1] + path[1:]) / 2])


def _distance(points: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The distance of points (..., 2) from the line segment between two points."""
    line = end - begin
    along = ((points - begin) @ line / (line @ line)).clip(0, 1)
    return np.linalg.norm(points - begin - along[..., None] * line, axis=-1)
