"""The order of samples. It depends on the seed and the epoch only, not on the number of workers or on earlier runs."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DistributedSampler

from datamodules.errors import DataError, counted
from datamodules.labels import Labels, weights_of_balanced_draw
from datamodules.samples import mix

_FAR = 2**20  # epochs: more than any training has
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
