"""The order of samples. It depends on the seed and the epoch only, not on the number of workers or on earlier runs."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DistributedSampler

from datamodules.errors import DataError, counted
from datamodules.labels import Labels, weights_of_balanced_draw
from datamodules.samples import mix

_FAR = 2**20  # epochs: more than any training has
_SIZES = 4  # classes of sizes for each doubling: batches differ from epoch to epoch, and little of one is padding
_POOL = 50  # batches that are sorted by length together: enough for little padding, few enough for a random order


Ranks = Callable[[], tuple[int, int]]  # returns the number of this process, and how many get different samples


def all_ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


class CountedSampler(DistributedSampler):
    """Indices of a training epoch, in an order that (seed, epoch) decides. The ranks get them in turn.

    The batches of all ranks together depend on their size only, not on the number of ranks. A rank without a sample in
    the last batch gets a spare, the first sample of the epoch again, and must not count it.

    Args:
        num_samples: Size of the training set.
        batch_size: Batch size of each rank; finished work is counted in batches.
        seed: Decides the order, together with the epoch.
        lengths: Length of each sample. If given, a batch has samples of similar lengths, for little padding.
        labels: Label of each sample. If given, an epoch draws `num_samples` samples with replacement, and all classes
            equally often.
        ranks: Returns the part of the samples that this process gets.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        lengths: Int64[Tensor, " n"] | None = None,
        labels: Labels | None = None,
        ranks: Ranks = all_ranks,
    ) -> None:
        # subclasses DistributedSampler only so that Lightning does not replace this sampler
        self.num_all, self.batch_size, self.seed = num_samples, batch_size, seed
        self.lengths, self.labels, self.ranks = lengths, labels, ranks
        self.epoch = 0
        self._start = (0, 0)

    def start(self, epoch: int, batches: int) -> None:
        """Start in an epoch after its first `batches` batches; all other epochs are whole."""
        self._start = (epoch, batches)
        self.epoch = epoch

    def __len__(self) -> int:
        """Samples of a whole epoch on this rank, with finished ones and a spare."""
        rank, world = self.ranks()
        return len(range(rank, self.num_all, world)) + self._has_spare()

    def __iter__(self) -> Iterator[int]:
        """Yield epoch * num_samples + index for each sample, so that its random changes can depend on the epoch.

        A sample that is repeated in an epoch gets the changes of another, much later epoch.
        """
        done = self._start[1] if self.epoch == self._start[0] else 0
        for key in self._dealt()[done * self.batch_size :]:
            yield self.epoch * self.num_all + key

    def batch(self, number: int) -> list[int]:
        """The samples of a batch, by its number in this epoch."""
        return [key % self.num_all for key in self._dealt()[number * self.batch_size :][: self.batch_size]]

    def is_spare(self, number: int) -> bool:
        """Whether a batch, by its number in the epoch, is only a spare."""
        return self._has_spare() and number == self.num_all // (self.ranks()[1] * self.batch_size)

    def _has_spare(self) -> bool:
        rank, world = self.ranks()
        return 0 < self.num_all % (world * self.batch_size) <= rank

    def _dealt(self) -> list[int]:
        """The keys that this rank would yield in this order in epoch 0."""
        rank, world = self.ranks()
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        if self.labels is None:
            order = torch.randperm(self.num_all, generator=generator)
        else:
            weights = weights_of_balanced_draw(self.labels)
            order = torch.multinomial(weights, self.num_all, replacement=True, generator=generator)
        if self.lengths is not None:
            order = self._by_length(order, world * self.batch_size, generator)
        if self.labels is not None:
            order = order + _times_before(order) * _FAR * self.num_all
        own = order[rank::world]
        return (torch.cat([own, order[:1]]) if self._has_spare() else own).tolist()

    def _by_length(self, order: Int64[Tensor, " n"], batch: int, generator: torch.Generator) -> Int64[Tensor, " n"]:
        """Sort within pools of batches, and shuffle the batches. The last batch, which may be short, stays last."""
        assert self.lengths is not None
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(_POOL * batch)]
        *batches, last = torch.cat(pools).split(batch)
        return torch.cat([*(batches[number] for number in torch.randperm(len(batches), generator=generator)), last])


def _times_before(order: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """How often each number occurs before its position in this order."""
    places = order.argsort(stable=True)
    numbers = order[places]
    times = torch.arange(len(order)) - torch.searchsorted(numbers, numbers)
    return torch.empty_like(order).scatter_(0, places, times)


class SizedSampler(CountedSampler):
    """Whole batches of a training epoch, as lists of indices, with few tokens in each. The ranks share each batch.

    A batch has samples of similar sizes: at most `batch_size` on each rank, and so many that they have at most
    `max_tokens` there once they are padded; a larger sample is alone. Sizes are rounded up to classes. (seed, epoch)
    decide the order in a class and that of the batches. Their number is the same in every epoch, because it depends on
    the classes alone.

    Args:
        num_samples, batch_size, seed, ranks: See CountedSampler.
        lengths: Tokens of each sample.
        max_tokens: The most tokens in a batch of each rank, with padding.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        lengths: Int64[Tensor, " n"],
        max_tokens: int,
        ranks: Ranks = all_ranks,
    ) -> None:
        super().__init__(num_samples, batch_size, seed, lengths, ranks=ranks)
        self._bounds = (2 ** ((lengths.double().log2() * _SIZES).ceil() / _SIZES)).ceil().long()
        self._counts = lru_cache(lambda world: counts_of_batches(self._bounds.sort()[0], batch_size, max_tokens, world))

    def __len__(self) -> int:
        """Batches of a whole epoch, finished ones included; the same on each rank."""
        return len(self._counts(self.ranks()[1]))

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        done = self._start[1] if self.epoch == self._start[0] else 0
        for batch in self._batches()[done:]:
            yield [self.epoch * self.num_all + index for index in batch]

    def batch(self, number: int) -> list[int]:
        return self._batches()[number]

    def is_spare(self, number: int) -> bool:
        rank, world = self.ranks()
        counts = self._counts(world)
        return number == len(counts) - 1 and rank >= counts[-1]

    def _batches(self) -> list[list[int]]:
        rank, world = self.ranks()
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        order = torch.randperm(self.num_all, generator=generator)
        order = order[self._bounds[order].argsort(stable=True)]
        batches = list(order.split(counts := self._counts(world)))
        last = [batches.pop()] if counts and counts[-1] < world else []  # some ranks get a spare there
        batches = [*(batches[number] for number in torch.randperm(len(batches), generator=generator)), *last]
        return [(batch[rank::world] if rank < len(batch) else batches[0][:1]).tolist() for batch in batches]


def counts_of_batches(lengths: Int64[Tensor, " n"], batch_size: int, max_tokens: int, world: int) -> list[int]:
    """The number of samples in each batch of all ranks, for samples in ascending order of their lengths.

    Args:
        lengths: The sorted lengths.
        batch_size: The most samples of a rank in a batch.
        max_tokens: The most tokens of a rank in a batch with padding, unless it has a single sample.
        world: The number of ranks. All batches except the last have as many samples on each of them.
    """
    counts: list[int] = []
    on_each = 0  # samples of the open batch on each rank
    for longest in [*lengths.tolist()[world - 1 :: world], *lengths[len(lengths) // world * world :][-1:].tolist()]:
        if on_each and (on_each == batch_size or (on_each + 1) * longest > max_tokens):
            counts.append(on_each * world)
            on_each = 0
        on_each += 1
    return [*counts, len(lengths) - sum(counts)] if on_each else counts


class RankSampler(DistributedSampler):
    """Indices of an evaluation, each once, sorted by length if lengths are given. The ranks get them in turn."""

    def __init__(self, num_samples: int, lengths: Int64[Tensor, " n"] | None = None, ranks: Ranks = all_ranks) -> None:
        self.ranks, world = ranks, ranks()[1]
        if num_samples < world > 1:  # a rank without samples would skip the evaluation, and the others would wait
            raise DataError(
                f"trainer.devices: {world} processes for {counted(num_samples, 'sample')} of a split; ask for fewer"
            )
        self.order = list(range(num_samples)) if lengths is None else lengths.argsort(stable=True).tolist()

    def set_epoch(self, epoch: int) -> None:
        """The order is the same in every epoch."""

    def __len__(self) -> int:
        rank, world = self.ranks()
        return len(self.order[rank::world])

    def __iter__(self) -> Iterator[int]:
        rank, world = self.ranks()
        return iter(self.order[rank::world])


class SizedRankSampler(RankSampler):
    """Whole batches of an evaluation, as lists of indices in the order of their lengths, with few tokens in each.

    Args:
        batch_size, lengths, max_tokens: See SizedSampler.
        ranks: See RankSampler.
    """

    def __init__(
        self, batch_size: int, lengths: Int64[Tensor, " n"], max_tokens: int, ranks: Ranks = all_ranks
    ) -> None:
        super().__init__(len(lengths), lengths, ranks)
        self._of_batches = batch_size, lengths.sort()[0], max_tokens

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        return iter(self._batches())

    def _batches(self) -> list[list[int]]:
        (rank, world), (batch_size, lengths, max_tokens) = self.ranks(), self._of_batches
        order = iter(self.order)
        batches = [
            [next(order) for _ in range(count)] for count in counts_of_batches(lengths, batch_size, max_tokens, world)
        ]
        return [batch[rank::world] for batch in batches if rank < len(batch)]
