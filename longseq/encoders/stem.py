"""A convolutional stem: stages of convolutions before the tokens, for images and for spectrograms.

A transformer does not learn edges from a few thousand samples. Convolutions combine neighbours from the start, so their
outputs are better tokens, and fewer: the attention works at the resolution of the last stage.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn

from longseq.arguments import ArgumentError, require
from longseq.encoders.patches import is_present, patches_of, without_padding

NOT_OF_ALL_PROCESSES = (
    "trainer.sync_batchnorm: not together with a stem, whose statistics leave out the padding of each process; "
    "leave it out"
)
Rows = Int64[Tensor, " b"] | None  # the number of rows of each input before its padding; None without padding


class Stage(nn.Module, ABC):
    """A map to ``width`` channels and 1 / ``stride`` of the rows and columns, rounded up.

    The rows after the first ``rows`` of an input are padding: they change nothing.
    """

    width: int
    stride: tuple[int, int]

    @abstractmethod
    def forward(
        self, picture: Float[Tensor, "b channels height width"], rows: Rows = None
    ) -> Float[Tensor, "b _ _ _"]: ...

    def rows_after(self, rows: Any) -> Any:
        """The number of rows after the stage, from the number before it."""
        return None if rows is None else (rows + self.stride[0] - 1) // self.stride[0]


class Convolution(Stage):
    """A convolution with an odd kernel, zero padding that keeps the size, and no bias; then BatchNorm.

    Args:
        channels: Channels of the input.
        width: Channels of the output.
        stride: Strides along rows and columns.
        kernel_size: Side of the kernel.
    """

    def __init__(self, channels: int, width: int, stride: tuple[int, int] = (1, 1), kernel_size: int = 3) -> None:
        super().__init__()
        self.width, self.stride = width, stride
        kind = Pointwise if kernel_size == 1 else nn.Conv2d
        self.convolution = kind(channels, width, kernel_size, stride, kernel_size // 2, bias=False)
        self.norm = RaggedBatchNorm(width)

    def forward(self, picture: Float[Tensor, "b channels height width"], rows: Rows = None) -> Float[Tensor, "b _ _ _"]:
        return self.norm(self.convolution(without_padding(picture, rows)), self.rows_after(rows))


class Pointwise(nn.Conv2d):
    """A convolution of 1 x 1 without bias.

    The gradient of its weight has the memory layout of the weight. With torch's own and channels_last it has not, and
    DistributedDataParallel warns about that. Pixels between the strides are left out before the convolution: on a
    processor with AVX-512, torch 2.14's gradient of a strided one with four channels, channels_last and two threads
    overwrites other memory.
    """

    def forward(self, input: Float[Tensor, "b channels height width"]) -> Tensor:
        rows, columns = self.stride
        return F.conv2d(input[:, :, ::rows, ::columns], self.weight.flatten(1)[..., None, None])


class RaggedBatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm2d, with statistics of a batch that leave padding out."""

    def forward(self, input: Float[Tensor, "b channels height width"], rows: Rows = None) -> Tensor:
        if self.training and input.numel() == input.shape[1]:  # a single place has no variance
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if rows is None or not self.training:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        exact = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        is_padding = ~is_present(rows, exact.shape[2])[:, None]
        number = (rows.sum() * exact.shape[3]).to(exact.dtype)
        mean = exact.sum(3).masked_fill(is_padding, 0).sum((0, 2)) / number  # masking sums of rows takes half the time
        centred = exact - mean[:, None, None]
        variance = centred.square().sum(3).masked_fill(is_padding, 0).sum((0, 2)) / number
        with torch.no_grad():  # the running variance is unbiased, as in torch
            share = self.momentum or 1 / (self.num_batches_tracked + 1)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * number / (number - 1).clamp(min=1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        scale = self.weight * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias[:, None, None], centred, scale[:, None, None]).to(input.dtype)


class _Rectified(Stage):
    """A convolution with BatchNorm, and ReLU."""

    def __init__(self, channels: int, width: int, stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.width, self.stride = width, stride
        self.convolution = Convolution(channels, width, stride)

    def forward(self, picture: Float[Tensor, "b channels height width"], rows: Rows = None) -> Float[Tensor, "b _ _ _"]:
        return F.relu(self.convolution(picture, rows))


class _ResidualBlock(Stage):
    """ResNet's basic block (arXiv:1512.03385): ReLU(BN(C2 ReLU(BN(C1 X))) + X), and BN(C3 X) in place of X where the
    width or the stride changes."""

    def __init__(self, channels: int, width: int, stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.width, self.stride = width, stride
        self.first, self.second = Convolution(channels, width, stride), Convolution(width, width)
        is_same = stride == (1, 1) and channels == width
        self.shortcut = None if is_same else Convolution(channels, width, stride, kernel_size=1)

    def forward(self, picture: Float[Tensor, "b channels height width"], rows: Rows = None) -> Float[Tensor, "b _ _ _"]:
        change = self.second(F.relu(self.first(picture, rows)), self.rows_after(rows))
        return F.relu(change + (picture if self.shortcut is None else self.shortcut(picture, rows)))


class Stages(Stage):
    """Several stages, one after the other."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.width, self.stride = stages[-1].width, _total_stride([stage.stride for stage in stages])

    def forward(self, picture: Float[Tensor, "b channels height width"], rows: Rows = None) -> Float[Tensor, "b _ _ _"]:
        stages: Any = self.stages
        for stage in stages:
            if rows is None:  # with padding only the convolutions gain by it, and copies take as long
                picture = channels_last(picture)
            picture, rows = stage(picture, rows), stage.rows_after(rows)
        return picture


class Stem(ABC):
    """A description of a stem, as in a configuration."""

    @classmethod
    @abstractmethod
    def examples(cls) -> "Sequence[Stem]":
        """Small examples of each form, with a stride of 2 or less; all tests of stems use them."""

    @property
    @abstractmethod
    def stride(self) -> tuple[int, int]:
        """The factors by which the stem reduces rows and columns."""

    @abstractmethod
    def build(self, channels: int) -> Stage:
        """Build the layers for inputs of this number of channels."""


@dataclass(frozen=True)
class Residual(Stem):
    """A convolution of 3 x 3, then residual blocks, each with BatchNorm and ReLU.

    Args:
        widths: Channels of each stage; the first stage is the convolution.
        strides: Stride of each stage: a number, or one for rows and one for columns; for sound, time and mels.
    """

    widths: list[int] = field(default_factory=lambda: [32, 64, 128])
    strides: list[int | list[int]] = field(default_factory=lambda: [1, 2, 2])

    def __post_init__(self) -> None:
        what = f"must be positive, one for each stage, got {self.widths}; [32, 64, 128]"
        require(bool(self.widths) and min(self.widths) >= 1, "widths", what)
        is_right = all(isinstance(stride, int) or len(stride) == 2 for stride in self.strides)
        is_right = is_right and all(min(_pair(stride)) >= 1 for stride in self.strides)
        what = f"must be {len(self.widths)} as there are widths, each positive, or a pair [rows, columns]"
        what = f"{what}, got {self.strides}; [1, 2, 2] goes with three widths"
        require(len(self.strides) == len(self.widths) and is_right, "strides", what)

    @classmethod
    def examples(cls) -> "Sequence[Residual]":
        return [cls([4, 6], [1, 2]), cls([4, 4], [[1, 2], 1])]

    @property
    def stride(self) -> tuple[int, int]:
        return _total_stride([_pair(stride) for stride in self.strides])

    def build(self, channels: int) -> Stages:
        stages: list[Stage] = []
        for width, stride in zip(self.widths, map(_pair, self.strides), strict=True):
            kind = _ResidualBlock if stages else _Rectified
            stages.append(kind(stages[-1].width if stages else channels, width, stride))
        return Stages(stages)


class StemEmbed(PatchEmbed):
    """timm's patch embedding after a stem. ``patch_size`` is that of a patch of the input; the stem's strides divide
    it."""

    stem: Stage

    def put_behind(self, stem: Stem) -> None:
        """Build the stem. This comes after building the ViT, because timm initialises all linear layers in it again,
        pretrained ones too."""
        channels, dim = self.proj.in_channels, self.proj.out_channels
        self.stem = stem.build(channels)
        patch: Any = self.patch_size
        rows, columns = (side // stride for side, stride in zip(patch, stem.stride, strict=True))
        self.proj = nn.Conv2d(self.stem.width, dim, (rows, columns), (rows, columns))

    def forward(self, x: Float[Tensor, "b channels height width"], rows: Rows = None) -> Float[Tensor, "b n d"]:
        picture = without_padding(self.stem(x, rows), self.stem.rows_after(rows))
        # not a convolution, which is wrong in bfloat16 for some kernels of one row (patches.py)
        patches = patches_of(picture, *self.proj.kernel_size)  # type: ignore[arg-type]
        return self.norm(F.linear(patches, self.proj.weight.flatten(1), self.proj.bias))


def refuse_stem(stem: Stem, patch: tuple[int, int], name: str) -> None:
    """Check that a stem's strides divide the patch of a token.

    Args:
        stem: The stem.
        patch: Rows and columns of the patch.
        name: The argument that sets the patch.

    Raises:
        ValueError: If they do not.
    """
    if any(side % stride for side, stride in zip(patch, stem.stride, strict=True)):
        (rows, columns), (high, wide) = stem.stride, patch
        what = f"must be a multiple of the stem's strides, {rows} x {columns}, got a patch of {high} x {wide}"
        raise ArgumentError(name, f"{what}; enlarge it, or lower the strides")


def channels_last(picture: Float[Tensor, "b channels height width"]) -> Float[Tensor, "b channels height width"]:
    """The same input in torch's memory layout channels_last, without a copy if it has this layout already. With it, a
    stem's training step takes three quarters of the time on a CPU."""
    return picture.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # contiguous(memory_format) fails under vmap


def _total_stride(strides: Sequence[tuple[int, int]]) -> tuple[int, int]:
    rows, columns = zip(*strides, strict=True)
    return math.prod(rows), math.prod(columns)


def _pair(stride: int | Sequence[int]) -> tuple[int, int]:
    rows, columns = (stride, stride) if isinstance(stride, int) else stride
    return rows, columns
