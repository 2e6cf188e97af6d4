"""Formulas with random numbers of their own, which are drawn anew in the course of a training."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from longseq.attention.layer import AttentionLayer


class Redrawn(nn.Module, ABC):
    """A formula whose random numbers follow from its seed and the step, so that a resumed training draws the same. A
    checkpoint holds both. A subclass draws number 0 when it has its buffers.

    Args:
        redraw_every: Steps of a training after which they are drawn anew; 0 never does.
    """

    def __init__(self, redraw_every: int) -> None:
        super().__init__()
        self.redraw_every = redraw_every
        self.seed = nn.Buffer(torch.randint(2**31, ()))
        self._seed_was_read: tuple[Tensor, int, int] | None = None

    @abstractmethod
    def draw(self, seed: int) -> None:
        """Fill the buffers: the same for the same seed."""

    @torch.no_grad()
    def redraw(self, number: int) -> None:
        """Draw the numbers of this number: the same ones whenever and wherever they are asked for."""
        if self.seed.is_meta:  # it has no value, and the buffers none to fill
            return
        seed, read = self.seed, self._seed_was_read
        if read is None or read[0] is not seed or read[1] != seed._version:  # to read it each time would wait for a GPU
            read = self._seed_was_read = (seed, seed._version, int(seed))
        self.draw(read[2] + number)


class RedrawnLayer(AttentionLayer):
    """Attention by a formula that is drawn anew."""

    formula: Redrawn

    def at_step(self, step: int) -> None:
        every = self.formula.redraw_every
        if every and step % every == 0:
            self.formula.redraw(step // every)
