"""Local mixing: depthwise convolutions over the token grid, in every block before the attention and before the MLP.

Attention treats the tokens as a set, but a pixel has a meaning only among its neighbours. A depthwise convolution adds
the neighbours, and costs 2 n d FLOPs for each number of its kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from longseq.arguments import require
from longseq.attention.grid import TokenGrid
from longseq.attention.plug import token_grid
from longseq.attention.shard import Split, with_halo
from longseq.compat.timm import leaves_prefix_alone
from longseq.compat.torch import is_plain, without_autocast
from longseq.encoders.local_kernel import mixed_locally, suits_local_kernel


class LocalLayer(Split):
    """X + W * X, a depthwise convolution over the grid of tokens, with a residual connection: (b, n, d) -> (b, n, d).

    Prefix tokens stay unchanged. Padding is zero, like the outside of the grid. The weights start at zero, so adding
    this layer to a trained model changes nothing at first. No weight depends on the length of the sequence.

    Args:
        dim: d.
        kernel_size: Height and width of the kernel, both odd.
        columns: Columns of the grid, if forward gets no others; the rows follow from the tokens. None to mix along the
            sequence, whatever the grid.
        num_prefix_tokens: Tokens before the grid.
    """

    is_neutral_at_start = True  # so a trained model may lack it (attention/plug.py)

    def __init__(self, dim: int, kernel_size: tuple[int, int], columns: int | None, num_prefix_tokens: int) -> None:
        super().__init__()
        padding = (kernel_size[0] // 2, kernel_size[1] // 2)
        self.convolution = nn.Conv2d(dim, dim, kernel_size, padding=padding, groups=dim)
        nn.init.zeros_(self.convolution.weight)
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]
        self.columns, self.num_prefix_tokens = columns, num_prefix_tokens

    def forward(
        self, tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b 1 1 n"] | None = None, columns: int | None = None
    ) -> Tensor:
        prefix, columns = self.num_prefix_tokens, 1 if self.columns is None else columns or self.columns
        grid = tokens[:, prefix:]
        if not grid.shape[1]:
            return tokens
        weight, bias = self.convolution.weight, self.convolution.bias
        is_plain_here = self.shard is None and is_plain(self.convolution, nn.Conv2d)
        if is_plain_here and bias is not None and suits_local_kernel(tokens, weight[0].numel()):
            return mixed_locally(tokens, weight, bias, None if mask is None else mask[:, 0, 0], prefix, columns)
        if mask is not None:
            grid = grid.masked_fill(~mask[:, 0, 0, prefix:, None], 0)
        # (b, d, rows, columns) without a copy: the channels of a token are contiguous, as in torch's channels_last
        image = grid.mT.unflatten(2, (-1, columns))
        # on a CPU, depthwise convolutions in bfloat16 take ten times as long as in float32
        with without_autocast(tokens) if tokens.device.type == "cpu" else nullcontext():
            change = self._convolved(image.to(weight.dtype)).flatten(2).mT.to(tokens.dtype)
        return tokens + change if not prefix else torch.cat([tokens[:, :prefix], tokens[:, prefix:] + change], dim=1)

    def _convolved(self, image: Float[Tensor, "b d rows columns"]) -> Float[Tensor, "b d rows columns"]:
        if self.shard is None:
            return self.convolution(image)
        rows, columns = (size // 2 for size in self.convolution.kernel_size)
        between = with_halo(image, rows, self.shard)
        weight, bias = self.convolution.weight, self.convolution.bias
        return F.conv2d(between, weight, bias, padding=(0, columns), groups=self.convolution.groups)


@dataclass(frozen=True)
class LocalMixing(ABC):
    """A description of local mixing, as in a configuration.

    Args:
        kernel_size: Length of the kernel along an axis, in tokens; odd.
    """

    kernel_size: int = 3

    def __post_init__(self) -> None:
        is_odd = self.kernel_size >= 1 and self.kernel_size % 2 == 1
        require(is_odd, "kernel_size", f"must be odd and positive, got {self.kernel_size}; 3 is usual")

    @classmethod
    def examples(cls) -> "Sequence[LocalMixing]":
        """Examples of each form; all tests of local mixing use them."""
        return [cls(), cls(5)]

    @abstractmethod
    def build(self, dim: int, grid: TokenGrid) -> LocalLayer:
        """Build one layer; a block has two."""


@dataclass(frozen=True)
class Conv2d(LocalMixing):
    """Over rows and columns: those of an image, or time and mels if a token is a patch of a spectrogram."""

    def build(self, dim: int, grid: TokenGrid) -> LocalLayer:
        kernel = (self.kernel_size, self.kernel_size if grid.size[1] > 1 else 1)
        return LocalLayer(dim, kernel, grid.size[1], grid.num_prefix_tokens)


@dataclass(frozen=True)
class Conv1d(LocalMixing):
    """Along the sequence, row after row, as Long Range Arena (arXiv:2011.04006) presents an image."""

    def build(self, dim: int, grid: TokenGrid) -> LocalLayer:
        return LocalLayer(dim, (self.kernel_size, 1), None, grid.num_prefix_tokens)


class LocalBlock(Block):
    """timm's block with local mixing before the attention and before the MLP; all other weights keep their names.

    Args:
        block: timm's block, whose parts this one takes over.
        local1: Local mixing before the attention.
        local2: Local mixing before the MLP; None if only prefix tokens leave the block, because it would not change
            them.
    """

    def __init__(self, block: Block, local1: LocalLayer, local2: LocalLayer | None) -> None:
        nn.Module.__init__(self)
        for name, part in block.named_children():
            self.add_module(name, part)
        self.local1, self.local2 = local1, local2

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, columns: int | None = None
    ) -> Tensor:
        x = self.local1(x, attn_mask, columns)
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        if self.local2 is not None:
            x = self.local2(x, attn_mask, columns)
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def add_local(trunk: VisionTransformer, local: LocalMixing) -> None:
    """Put local mixing into every block of a timm ViT, in place.

    Raises:
        ValueError: If a block is not timm's Block.
    """
    blocks: list[Any] = list(trunk.blocks)
    dim, grid = trunk.embed_dim, token_grid(trunk)
    for depth, block in enumerate(blocks):
        what = f"must be left out for block {depth}, a {type(block).__name__}; only timm's Block has a place"
        require(type(block) is Block, "local", what)
        # a weight without a gradient would stop a training on several processes
        is_unseen = depth == len(blocks) - 1 and leaves_prefix_alone(trunk)
        mixing = LocalBlock(block, local.build(dim, grid), None if is_unseen else local.build(dim, grid))
        trunk.blocks[depth] = mixing.train(block.training)
