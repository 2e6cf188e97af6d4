"""The contract of an attention mechanism, and the letters of dimensions in all files of this folder.

b batch, n tokens, k shortened tokens, d width, h heads, c = d / h channels of a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mixer import TokenMixer


class Mechanism(ABC):
    """A small description of an attention mechanism, which builds all the layers of a stack at once.

    It builds them together because sharing a projection is a property of the stack: two layers share weights if and
    only if they hold the same object. A mechanism is a frozen dataclass of plain values, so that a checkpoint can name
    it.
    """

    any_length: ClassVar[bool] = False  # whether its layers also take sequences longer than the grid
    mixes_tokens: ClassVar[bool] = True  # False if a token sees only itself; a class token is then of no use

    @classmethod
    @abstractmethod
    def examples(cls) -> "Sequence[Mechanism]":
        """Examples of every form of the mechanism, the simplest first; all tests of mechanisms use them.

        Each example fits a stack of two layers of four heads, over 16 tokens or more.
        """

    @abstractmethod
    def layers(self, stack: Stack, grid: TokenGrid) -> Sequence[TokenMixer]:
        """Build one layer for each of timm's attention layers, taking over its weights.

        Args:
            stack: timm's layers, or those of an earlier mechanism, in the order of the blocks.
            grid: The tokens of the layers; its ``num_tokens`` is the length of the longest sequence.

        Returns:
            One TokenMixer per block.

        Raises:
            ValueError: If the mechanism does not fit the stack; the message names the wrong argument.
        """
