"""The order of samples, by counting: a function of seed and epoch, whatever ran before, and on however many workers."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


def _ranks() -> tuple[int, int]:
    """This process's rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


class CountedSampler(DistributedSampler):
    """Indices of a training epoch: a permutation that (seed, epoch) decides, dealt to the ranks in turn.

    Every rank gets as many: where the ranks do not divide the samples, the first ones are dealt again.

    Args:
        num_samples: Of the training set.
        batch_size: Of each rank; what was done is counted in batches.
        seed: Of the order.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        # a DistributedSampler by kind alone, for Lightning puts its own in the place of every other
        self.num_all, self.batch_size, self.seed = num_samples, batch_size, seed
        self.epoch = 0
        self._start = (0, 0)

    def start(self, epoch: int, batches: int) -> None:
        """Go on in an epoch of which some batches are done; other epochs are whole."""
        self._start = (epoch, batches)
        self.epoch = epoch

    def __len__(self) -> int:
        """Of a whole epoch, on one rank: what is done counts too."""
        return -(-self.num_all // _ranks()[1])

    def __iter__(self) -> Iterator[int]:
        done = self._start[1] if self.epoch == self._start[0] else 0
        yield from self._dealt()[done * self.batch_size :]

    def batch(self, number: int) -> list[int]:
        """The samples of a batch of this epoch, by the number of the batch."""
        return self._dealt()[number * self.batch_size :][: self.batch_size]

    def _dealt(self) -> list[int]:
        """What this rank has of the epoch."""
        rank, world = _ranks()
        generator = torch.Generator().manual_seed(_mix(self.seed, self.epoch))
        order = torch.randperm(self.num_all, generator=generator)
        return order.repeat(world)[: len(self) * world][rank::world].tolist()


class RankSampler(DistributedSampler):
    """Indices of an evaluation: 0..n-1, dealt to the ranks in turn, each sample once."""

    def __init__(self, num_samples: int) -> None:
        self.num_all = num_samples

    def set_epoch(self, epoch: int) -> None:
        """The order is the same in every epoch."""

    def __len__(self) -> int:
        rank, world = _ranks()
        return len(range(rank, self.num_all, world))

    def __iter__(self) -> Iterator[int]:
        rank, world = _ranks()
        return iter(range(rank, self.num_all, world))


def _mix(seed: int, epoch: int) -> int:
    """A seed that has nothing to do with that of the next epoch, or of the same epoch of the next seed (splitmix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor % 2**64
    return (mixed ^ mixed >> 31) % 2**63
