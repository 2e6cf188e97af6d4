"""Data in files whose inputs may be the tokens of a frozen network."""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from datamodules.base import Part
from datamodules.cache import cached, sha256_of_text
from datamodules.errors import require
from datamodules.inputs import InputSpec
from datamodules.networks import Network, refuse_other_inputs
from datamodules.on_disk import OnDisk
from datamodules.own.scan import progress
from datamodules.samples import Bags, Samples, chosen
from datamodules.splits import Columns

_VERSION = 1  # increased when the same settings give other tokens
_BLOCK_SECONDS = 600.0  # of a recording in memory at a time; a day would take gigabytes


class Embeds(OnDisk):
    """Sounds or images in files. With a network, an input is the tokens that the network makes of one: (n, f + p).

    All files are embedded once, without augmentation. The tokens are cached by the contents of the files, the digest of
    the network and all settings. Files for predictions are embedded as they are read.

    Args:
        network: Makes tokens of each sound or image; None: the inputs are sounds or images.
        common: Arguments of OnDisk.

    Attributes:
        num_features, num_coordinates, most_tokens, token_seconds: What FeatureEncoder needs; absent without a network,
            so that other encoders take what they need.
    """

    def __init__(self, network: Network | None = None, **common: Any) -> None:
        self.network = network  # the properties below ask for it
        super().__init__(**common)

    # What an encoder of features needs

    @property
    def num_features(self) -> int:
        return self._of_network().num_features

    @property
    def num_coordinates(self) -> int:
        return self._of_network().num_coordinates

    @property
    def most_tokens(self) -> int:
        network = self._of_network()
        return network.num_tokens(self.shape[-1] if network.kind == "sounds" else self.shape[1:])

    @property
    def token_seconds(self) -> float | None:
        return self._of_network().token_seconds

    def _of_network(self) -> Network:
        """The network.

        Raises:
            AttributeError: If there is none.
            DataError: If it takes other inputs.
        """
        if self.network is None:
            raise AttributeError("there is no network, so the inputs are not features")
        refuse_other_inputs(self.network, self.raw_inputs.kind, self)
        return self.network

    @property
    def raw_inputs(self) -> InputSpec:
        """What one sound or image is, before a network."""
        return super().inputs

    @property
    def inputs(self) -> InputSpec:
        if self.network is None:
            return self.raw_inputs
        rate_hz = None if self.token_seconds is None else 1 / self.token_seconds
        return InputSpec("features", torch.float32, (None, self.num_features + self.num_coordinates), rate_hz=rate_hz)

    # Tokens

    def embedded(self, values: Tensor) -> Float[Tensor, "n f_and_p"]:
        """The tokens of one sound or image; NaN for one that could not be read."""
        network = self._of_network()
        if values.is_floating_point() and values.isnan().all():
            return values.new_full(
                (network.num_tokens(values.shape[-1]), self.num_features + self.num_coordinates), torch.nan
            )
        return network(values)

    def read_input(self, part: Part) -> Tensor:
        return super().read_input(part) if self.network is None else torch.cat([*self.token_blocks(part)])

    def token_blocks(self, part: Part) -> Iterator[Float[Tensor, "n f_and_p"]]:
        """The tokens of a part of a file; of a long recording in blocks, so that little of it is in memory at a time.
        If the recording breaks off, so do the tokens; all are NaN if none of it could be read."""
        path, start, end = part
        network, hop = self._of_network(), self.token_seconds
        if hop is None or end is None or end - start <= _BLOCK_SECONDS:
            yield self.embedded(self.read_part(part))
            return
        assert network.rate_hz is not None
        beyond = network.window / network.rate_hz - hop  # the last window of a block reaches into the next one
        number = max(int(_BLOCK_SECONDS / hop), 1)
        whole = network.num_tokens(math.ceil((end - start) * network.rate_hz - 1e-6))
        for first in range(0, whole, number):
            begin = start + first * hop
            of_block = self.embedded(self.read_part((path, begin, min(begin + number * hop + beyond, end))))
            wanted = min(number, whole - first)
            if first and of_block.isnan().all():
                return
            yield of_block[:wanted]
            if len(of_block) < wanted:
                return  # tokens after a place that cannot be read would get the times of earlier ones

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        return (super().samples_of if self.network is None else Bags)(inputs, *arguments, **details)

    def samples_at(self, table: Columns, rows: Int64[Tensor, " m"]) -> Samples:
        if self.network is None:
            return super().samples_at(table, rows)
        require(not self.augment, "augment", "left out with data.network", self.augment, "tokens are made only once")
        tokens, lengths = self._embedded(table.sources)
        digest = sha256_of_text(f"{self._identity} {self.content_of(chosen(table.sources, rows))!r}")
        return Bags(chosen(tokens, rows), table.labels[rows], chosen(table.names, rows), digest, lengths[rows])

    @property
    def _identity(self) -> str:
        return f"{_VERSION} {self._of_network().identity} {self.settings_of_reading()}"

    def _embedded(self, sources: Any) -> tuple[Sequence[Tensor], Int64[Tensor, " n"]]:
        """The tokens of each source, from the cache, and their numbers."""

        def of_all() -> dict[str, Tensor]:
            bar = progress(sources, f"embedding {self.root}", len(sources))
            tokens = [self.embedded(self._whole(source)) for source in bar]
            return {"tokens": torch.cat(tokens), "lengths": torch.tensor([len(of_input) for of_input in tokens])}

        content = sha256_of_text(repr(self.content_of(sources)))
        stored = cached("features", f"{self._identity} {content}", of_all, mmap=True)
        return stored["tokens"].split(stored["lengths"].tolist()), stored["lengths"]

    def _whole(self, source: Any) -> Tensor:
        """The sound or image of a source, as long as an input at most."""
        return super().samples_of([self.read_item(source)], torch.zeros(1, dtype=torch.int64)).sample(0)

    # What a network teaches

    def outputs_of(self, network: Network) -> Float32[Tensor, "n f"]:
        """See DataModule. Files are read again, as the network takes them; those of all splits, for other folds."""
        refuse_other_inputs(network, self.raw_inputs.kind, self)
        reader, table = self.reader_for(network), self.table_of_samples
        sources = table.sources

        def of_all() -> dict[str, Tensor]:
            bar = progress(sources, f"teaching {self.root}", len(sources))
            return {"outputs": torch.stack([network.mean_of(reader._whole(source)) for source in bar])}

        content = sha256_of_text(repr(self.content_of(sources)))
        outputs = cached("taught", f"{reader._identity} {content}", of_all, mmap=True)["outputs"]
        places = {name: place for place, name in enumerate(table.names)}
        return outputs[[places[name] for name in self.train_set.names]]

    def reader_for(self, network: Network) -> Self:
        """A copy that reads files as a network takes them."""
        reader = copy(self)
        reader.network = network
        return reader

    # What is of sounds or images alone

    def figures(self, samples: Samples) -> dict[str, Any]:
        return samples.figures(self.num_features) if isinstance(samples, Bags) else super().figures(samples)

    def write_shards(self, folder: Path, samples_per_shard: int) -> int:
        is_raw = self.network is None
        require(is_raw, "network", "left out, because shards hold files", type(self.network).__name__, "leave it out")
        return super().write_shards(folder, samples_per_shard)
