"""Formulas that use random numbers, which are drawn again during a training."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from longseq.attention.layer import AttentionLayer


class Redrawn(nn.Module, ABC):
    """A formula whose random numbers follow from its seed and the step, which a checkpoint stores: a resumed training
    draws the same numbers. A subclass calls ``redraw(0)`` once its buffers exist.

    Args:
        redraw_every: Training steps from one drawing to the next; 0 never draws again.
    """

    def __init__(self, redraw_every: int) -> None:
        super().__init__()
        self.redraw_every = redraw_every
        self.seed = nn.Buffer(torch.randint(2**31, ()))
        self._read_seed: tuple[Tensor, int, int] | None = None  # the tensor, its version, and its value

    @abstractmethod
    def draw(self, seed: int) -> None:
        """Fill the buffers with random numbers of a seed."""

    @torch.no_grad()
    def redraw(self, number: int) -> None:
        """Draw for the n-th time: the same numbers for the same n, on every device and process."""
        if self.seed.is_meta:  # there are no values
            return
        seed, read = self.seed, self._read_seed
        if read is None or read[0] is not seed or read[1] != seed._version:  # each reading waits for the GPU
            read = self._read_seed = (seed, seed._version, int(seed))
        self.draw(read[2] + number)


class RedrawnLayer(AttentionLayer):
    """Attention with a formula that is drawn again during a training."""

    formula: Redrawn

    def at_step(self, step: int) -> None:
        every = self.formula.redraw_every
        if every and step % every == 0:
            self.formula.redraw(step // every)
