"""The user's own features: files of the outputs of a trained network for many tokens, such as the tiles of a slide."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from datamodules.base import Part
from datamodules.decoding.feature_files import COORDINATES, SUFFIXES, FeatureFile, opened
from datamodules.errors import DataError, require
from datamodules.inputs import InputSpec
from datamodules.order import CountedSampler, RankSampler, SizedRankSampler, SizedSampler
from datamodules.own.files import Item
from datamodules.own.own_files import OwnFiles
from datamodules.own.scan import Facts
from datamodules.samples import Bags, Samples
from datamodules.windows import windows_of


class FeatureFolder(OwnFiles):
    """Bags of features in one folder for each class, or in such folders inside train, val and test, or in a table.

    A file is a bag of 1 to 200,000 or more tokens: a .h5 as TRIDENT and CLAM write it, .npy, .npz, .safetensors, or a
    .pt of tensors. It holds an array (tokens, features) called features, feats or embeddings, or with the name `key`;
    an only array may have any name. It may hold coordinates (tokens, 2) of each token, called coords or coordinates, in
    any unit that all files share; and times in seconds, (tokens,) or (tokens, 2), or token_seconds. Float16 becomes
    float32. Nothing in a file is ever unpickled.

    An input is a float32 tensor (tokens, features), with the coordinates in two more columns. Inputs are
    {"features": (b, n, f + p), "lengths": (b,)}, with zeros after smaller bags. The bags of a batch have similar sizes.

    Args:
        key: The name of the array of features in each file.
        coordinates: Whether inputs have coordinates; if absent, they have if all files do.
        num_features: Numbers of each token; if absent, those in the files, which must be the same in all.
        most_tokens: Tokens of the largest bag; if absent, of the largest in the files. Only a model of any length takes
            larger ones.
        token_seconds: Seconds from one token to the next, or 0 if tokens have no times; if absent, as the files state.
        max_tokens: The most tokens in a batch of each process, with padding; a larger bag is a batch of its own. Such
            batches have fewer bags than batch_size. Null is no limit.
        augment: Transforms of each bag in training, which keep its shape.
        common: Arguments of OwnFiles.

    Raises:
        DataError: From setup, if there is no class folder, the table lacks a column, or a file is broken.
    """

    kind: ClassVar[str] = "feature file"
    predict_suffixes: ClassVar[frozenset[str]] = SUFFIXES
    reading: ClassVar[tuple[str, ...]] = ("key", "coordinates")

    def __init__(
        self,
        root: str,
        key: str | None = None,
        coordinates: bool | None = None,
        num_features: int | None = None,
        most_tokens: int | None = None,
        token_seconds: float | None = None,
        max_tokens: int | None = 100_000,
        augment: Sequence[nn.Module] = (),
        **common: Any,
    ) -> None:
        super().__init__(root=root, **common)
        is_width = num_features is None or num_features >= 1
        require(is_width, "num_features", "1 or more", num_features, "leave it out to take that of the files")
        is_size = most_tokens is None or most_tokens >= 1
        require(is_size, "most_tokens", "1 or more", most_tokens, "leave it out to take that of the files")
        is_time = token_seconds is None or 0 <= token_seconds < math.inf
        require(is_time, "token_seconds", "0 or more", token_seconds, "0 is for tokens without times")
        is_limit = max_tokens is None or max_tokens >= 1
        require(is_limit, "max_tokens", "1 or more", max_tokens, "100000 of 1024 features take 400 MB")
        is_counted = max_tokens is None or not self.balanced  # an epoch must always have as many batches
        require(is_counted, "max_tokens", "null with balanced", max_tokens, "give a small batch_size, such as 1")
        self.key, self.max_tokens, self.augment = key, max_tokens, augment
        # absent values are taken from the files when they are first needed
        self._coordinates_given, self._width_given, self._size_given = coordinates, num_features, most_tokens
        self._token_seconds = token_seconds

    # What all files have in common

    @property
    def coordinates(self) -> bool:
        if self._coordinates_given is None:
            remedy = "add them, or --data.coordinates false ignores them"
            self._coordinates_given = self._common("coordinates", {True: "coordinates", False: "none"}, remedy)
        return self._coordinates_given

    @property
    def num_features(self) -> int:
        if self._width_given is None:
            self._width_given = self._common("features", " features of a token", "take those of one network")
        return self._width_given

    @property
    def most_tokens(self) -> int:
        if self._size_given is None:
            self._size_given = max(facts["tokens"] for facts in self._readable().values())
        return self._size_given

    @property
    def token_seconds(self) -> float | None:
        """Seconds from one token to the next; None if tokens have no times."""
        if self._token_seconds is None:
            remedy = "give data.token_seconds, or 0 if times do not matter"
            self._token_seconds = self._common("token_seconds", " s from one token to the next", remedy) or 0.0
        return self._token_seconds or None

    def _common(self, fact: str, words: str | dict[Any, str], remedy: str) -> Any:
        """A fact that is the same for all files.

        Raises:
            DataError: If it is not; the message names two files.
        """
        readable = self._readable()
        first = next(iter(readable))
        for path in readable:
            one, other = readable[first][fact], readable[path][fact]
            if one != other:
                has, has_other = (
                    words[value] if isinstance(words, dict) else "none" if value is None else f"{value:g}{words}"
                    for value in (one, other)
                )
                raise DataError(f"{self.root}: {first} has {has}, and {path} has {has_other}; {remedy}")
        return readable[first][fact]

    @property
    def num_coordinates(self) -> int:
        return 2 if self.coordinates else 0

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return self.most_tokens, self.num_features + self.num_coordinates

    @property
    def inputs(self) -> InputSpec:
        return InputSpec("features", torch.float32, (None, self.shape[1]))

    # Samples

    def examine(self, path: Path) -> Facts:
        with opened(path, self.key) as file:
            return file.examine()

    def examined_with(self) -> str:
        return "" if self.key is None else f" key {self.key}"

    def wrong_part(self, item: Item) -> str:
        facts = self.facts[item.path]
        return self._wrong(facts["features"], facts["coordinates"])

    def _wrong(self, num_features: int, has_coordinates: bool) -> str:
        if num_features != self.num_features:
            return f"{num_features} features of a token, not {self.num_features}; take those of the same network"
        if self.coordinates and not has_coordinates:
            return f"no coordinates of its tokens; add them as {COORDINATES[0]}, (tokens, 2)"
        return ""

    @contextmanager
    def _opened(self, path: str | os.PathLike[str]) -> Iterator[FeatureFile]:
        """A file that fits the model.

        Raises:
            DataError: If it is broken, or has features of another width or no coordinates.
        """
        with opened(path, self.key) as file:
            if what := self._wrong(file.num_features, file.has_coordinates):
                raise DataError(f"{path}: {what}")
            yield file

    def read_item(self, item: Item) -> Float32[Tensor, "n f_and_p"]:
        return self.read(self.folder / item.path)

    def bytes_of(self, sources: Sequence[Item]) -> int:
        return 4 * self.shape[1] * int(self._lengths_of(sources).sum())

    def details(self, sources: Sequence[Item]) -> dict[str, Any]:
        return {"lengths": self._lengths_of(sources)}

    def _lengths_of(self, sources: Sequence[Item]) -> Int64[Tensor, " m"]:
        return torch.tensor([self.facts[item.path]["tokens"] for item in sources], dtype=torch.int64)

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        return Bags(inputs, *arguments, **details)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if hasattr(self, "test_set"):  # else the files may be gone
            self._token_seconds = self.token_seconds or 0.0  # a checkpoint needs the value

    def figures(self, samples: Samples) -> dict[str, Any]:
        assert isinstance(samples, Bags)
        figures = samples.figures(self.num_features)
        if self.coordinates:
            facts = [self.facts[self._item_of[name].path] for name in samples.names]
            lowest, highest = torch.tensor([of["corners"] for of in facts]).unbind(1)
            ranges = zip(lowest.amin(0).tolist(), highest.amax(0).tolist(), strict=True)
            figures["coordinates, x and y"] = [f"{low:g}..{high:g}" for low, high in ranges]
        if self.token_seconds is not None:
            figures["seconds from one token to the next"] = self.token_seconds
        return figures

    # Batches

    def _order_of_training(self, train: Samples) -> CountedSampler:
        if self.max_tokens is None:
            return super()._order_of_training(train)
        lengths = self._whole_lengths(train)
        return SizedSampler(len(train), self.batch_size, self.seed, lengths, self.max_tokens, self._ranks)

    def _order_of_evaluation(self, samples: Samples) -> RankSampler:
        if self.max_tokens is None:
            return super()._order_of_evaluation(samples)
        return SizedRankSampler(self.batch_size, self._whole_lengths(samples), self.max_tokens, self._ranks)

    def _whole_lengths(self, samples: Samples) -> Int64[Tensor, " n"]:
        assert isinstance(samples, Bags)
        return samples.whole_lengths

    def longest_batch(self) -> Any:
        if self.max_tokens is None:
            return super().longest_batch()
        lengths = self._whole_lengths(self.train_set)
        order: Any = self._order_of_training(self.train_set)  # of the first epoch, where a sample's key is its index
        return self.train_set[max(order, key=lambda batch: len(batch) * int(lengths[batch].max()))]

    def _share_batches(self, batch_size: int, before: int, now: int) -> None:
        if now != before and self.max_tokens is not None:
            what = f"the batches of max_tokens were those of {before} processes, got {now}"
            raise DataError(f"trainer.devices: {what}; resume with {before}")
        super()._share_batches(batch_size, before, now)

    def write_shards(self, folder: Path, samples_per_shard: int) -> int:
        raise DataError("data: features are not written as shards; train on their files, which are read as they are")

    # Files of features to predict

    def read(self, path: str | os.PathLike[str]) -> Float32[Tensor, "n f_and_p"]:
        with self._opened(path) as file:
            return file.read(0, file.num_tokens, self.coordinates)

    def parts(
        self, path: str, window: float | None = None, hop: float | None = None, any_length: bool = False
    ) -> list[Part]:
        """The whole bag, or windows that cover it if its tokens have times.

        There are windows if `window` or `hop` is given, or if the bag is larger than `most_tokens` and the model does
        not take larger ones.
        """
        with self._opened(path) as file:
            num_tokens = file.num_tokens
        seconds = self.token_seconds
        if seconds is not None:
            # with a whole token as the least remainder, one could be in no window
            lengths = num_tokens * seconds, self.most_tokens * seconds, seconds / 2
            return windows_of(path, *lengths, window, hop, any_length)
        has_windows = window is not None or hop is not None
        require(not has_windows, "window", "left out", window, "the tokens of these features have no times")
        if num_tokens > self.most_tokens and not any_length:
            what = f"{num_tokens} tokens, and the model takes {self.most_tokens} at most"
            raise DataError(f"{path}: {what}; train it with --model.encoder.any_length true")
        return [(path, 0.0, None)]

    def read_part(self, part: Part) -> Float32[Tensor, "n f_and_p"]:
        path, start, end = part
        seconds = self.token_seconds
        if seconds is None or end is None:
            return self.read(path)
        with self._opened(path) as file:
            first, stop = round(start / seconds), min(round(end / seconds), file.num_tokens)
            return file.read(min(first, stop - 1), stop, self.coordinates)

    def _predict_options(self) -> dict[str, Any]:
        return {"batch_size": 1}  # the sizes of bags are not known, and a batch of the largest may not fit into memory
