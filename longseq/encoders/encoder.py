"""What every encoder does: it normalises a batch, and a timm ViT turns its tokens into features."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from longseq.arguments import ArgumentError, argument_names, require
from longseq.attention import Mechanism, plug
from longseq.compat.torch import ExactBuffers
from longseq.encoders.forward_pass import count_tokens, encode, encode_tokens, of_grid, pooled, token_features
from longseq.encoders.local import add_local
from longseq.encoders.patches import without_padding
from longseq.encoders.trunk import Sizes

_AT_ONCE = 2**25  # numbers that are measured in float64 at a time: a bag of 200,000 tokens would take gigabytes


class Encoder(ExactBuffers, ABC):
    """Turns a batch into features (b, dim) with a vision transformer whose attention is a mechanism's.

    Constructor arguments of every encoder are kept as attributes of the same name, so that a checkpoint can name them.

    If mean and deviation are not measured before the first training batch, the encoder measures that batch and warns: a
    model that is trained on unnormalised inputs is much less accurate.

    In this package a picture is an input of the trunk, (channels, height, width): an image, a spectrogram, or a
    waveform of one column.

    Args:
        trunk: timm's VisionTransformer without a head; its attention is replaced.
        attention: The mechanism that replaces it.
        picture_shape: (channels, height, width) of the trunk's inputs; with any_length those of a typical one.
        statistics: Shape of mean and std; it must broadcast over the trunk's input.
        sizes: Those that are arguments of the constructor become attributes.

    Raises:
        ValueError: If any_length is True and the mechanism is bound to a length, if a class token is pooled and the
            mechanism mixes no tokens, or if reversible comes with checkpointing or bf16_residual.

    Attributes:
        num_tokens: n, the length of the sequence in the attention; with any_length that of a typical input.
        dim, depth, heads: Width of the features, number of blocks, and heads of each block.
        mean, std: Mean and standard deviation of the training set: one value per channel for images, one per mel band
            for sound. They stay in float32 in a bfloat16 model: an input far from 0, such as a temperature in kelvin,
            has too few digits in bfloat16.
    """

    mean: Tensor
    std: Tensor
    _of_weights: Tensor
    exact = "mean", "std"
    checkpointing: bool
    kind: ClassVar[str] = "images"  # what the inputs are: images, sounds or features
    varying: ClassVar[tuple[str, int] | None] = None  # of inputs with lengths: their name in a batch, and their axis
    gaps: bool = False  # whether NaN in the inputs of the trunk stands for what is missing
    measured_by: ClassVar[tuple[str, ...]] = ()  # arguments on which mean and std depend, besides the data

    def __init__(
        self,
        trunk: nn.Module,
        attention: Mechanism,
        picture_shape: tuple[int, int, int],
        statistics: tuple[int, int, int],
        sizes: Sizes,
    ) -> None:
        super().__init__()
        if sizes.any_length and not attention.any_length:
            projection = getattr(attention, "projection", None)
            bound = type(attention if projection is None else projection).__name__
            what = f"must take sequences of any length, but {bound} is bound to one"
            remedy = "Verma without k and Linformer with Dynamic are not, or give any_length false"
            raise ArgumentError("attention", f"{what}; {remedy}")
        what = f"must mix tokens for a class token, which sees no other with {type(attention).__name__}"
        is_class_token = getattr(trunk, "global_pool", None) == "token"
        require(attention.mixes_tokens or not is_class_token, "attention", f"{what}; give pool avg, or a mechanism")
        what = "must be false with reversible blocks, which keep no activations either; leave out one of the two"
        require(not (sizes.reversible and sizes.checkpointing), "checkpointing", what)
        what = "must be false with reversible blocks, which need exact outputs; leave out one of the two"
        require(not (sizes.reversible and sizes.bf16_residual), "bf16_residual", what)
        first: Any = next(iter(getattr(trunk, "blocks", ())), None)  # plug refuses what has no such blocks
        heads = first.attn.num_heads if hasattr(first, "attn") else 0
        self.trunk = plug(trunk, attention)
        if sizes.local is not None:
            add_local(self.trunk, sizes.local)
        self.trunk.set_grad_checkpointing(sizes.checkpointing)
        self.trunk.reversible = self.reversible = sizes.reversible
        self.trunk.bf16_residual = sizes.bf16_residual
        self.attention, self.picture_shape, self.any_length = attention, picture_shape, sizes.any_length
        self.dim, self.depth, self.heads = self.trunk.num_features, len(self.trunk.blocks), heads
        for name in argument_names(type(self)):
            if hasattr(sizes, name):
                setattr(self, name, getattr(sizes, name))
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("mean", torch.zeros(statistics, dtype=dtype))
        self.register_buffer("std", torch.ones(statistics, dtype=dtype))
        self.register_buffer("_of_weights", torch.empty(0), persistent=False)  # has their precision
        self._is_measured = False
        self.keeps_statistics = False  # True if the weights expect the mean and deviation of their own training

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights, and of the inputs of the trunk."""
        return self._of_weights.dtype

    @property
    def row_seconds(self) -> float | None:
        """Seconds from one row of tokens to the next; None for images."""
        return None

    @property
    def longest(self) -> int | None:
        """The length of the longest input; with any_length that of a typical one; None for inputs without lengths."""
        return None

    @property
    def num_tokens(self) -> int:
        """n, the length of the sequence in the attention."""
        return self.trunk.patch_embed.num_patches + self.trunk.num_prefix_tokens

    @classmethod
    @abstractmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        """Small encoders of each form, each with a batch of inputs as data modules yield it.

        All tests of encoders use them. Each encoder has 16 tokens or more; options are arguments of its constructor.
        """

    @abstractmethod
    def front_end(self, inputs: Any) -> Float[Tensor, "b channels height width"]:
        """Compute the inputs of the trunk, in float32 and not normalised. Missing rows at the end are padding. With
        ``gaps``, NaN stands for what is missing."""

    def augment(self, picture: Float[Tensor, "b channels height width"]) -> Float[Tensor, "b channels height width"]:
        """Change normalised inputs at random, in training."""
        return picture

    def rows(self, inputs: Any) -> Int64[Tensor, " b"] | None:
        """The number of rows of each picture before its padding; None without padding."""
        return None

    def draw(
        self,
        pictures: Sequence[Float[Tensor, "channels _ width"]],
        names: Sequence[str],
        limits: tuple[float, float] | None = (0, 255),
    ) -> Any:
        """Draw pictures, as ``front_end`` returns them but without padding, with their names: a matplotlib figure.

        Args:
            pictures: The pictures.
            names: One for each.
            limits: The smallest and the largest number that an input may contain; None if there are no limits.
        """
        from longseq.encoders.drawing import draw_images  # matplotlib takes half a second to import

        return draw_images(pictures, names, limits)

    def sounds(self, inputs: Any) -> list[Float[Tensor, " samples"]]:
        """The waveforms of a batch without padding, for listening; an empty list for images."""
        return []

    def count_tokens(self, inputs: Any) -> Int64[Tensor, ""] | int:
        """The number of tokens in a batch, without padding."""
        rows = self.rows(inputs)
        if rows is not None:
            return count_tokens(self.trunk, rows).sum()
        if not self.any_length:
            return len(inputs) * self.num_tokens
        rows, columns = self.trunk.patch_embed.patch_size
        height, width = inputs.shape[-2:]
        return len(inputs) * (height // rows * (width // columns) + self.trunk.num_prefix_tokens)

    def forward(self, inputs: Any) -> Float[Tensor, "b dim"]:
        """Encode a batch as its data module yields it."""
        return encode(self.trunk, *self.prepared(inputs))

    def token_features(self, inputs: Any) -> tuple[Float[Tensor, "b n dim"], Bool[Tensor, "b n"] | None]:
        """The features of every token of a batch except prefix tokens, and which tokens are present; None without
        padding."""
        return token_features(self.trunk, *self.prepared(inputs))

    def all_features(
        self, inputs: Any
    ) -> tuple[Float[Tensor, "b dim"], Float[Tensor, "b n dim"], Bool[Tensor, "b n"] | None]:
        """The features of a batch, and what ``token_features`` returns, from one pass."""
        tokens, present = encode_tokens(self.trunk, *self.prepared(inputs))
        return pooled(self.trunk, tokens, present), *of_grid(self.trunk, tokens, present)

    def prepared(
        self, inputs: Any, is_augmented: bool = True
    ) -> tuple[Float[Tensor, "b channels height width"], Int64[Tensor, " b"] | None]:
        """The inputs of the trunk, normalised and, in training, augmented unless ``is_augmented`` is False; and the
        number of rows of each before its padding. With ``gaps``, what is missing is NaN."""
        picture, rows = self.front_end(inputs), self.rows(inputs)
        self._refuse_other_sizes(picture, may_be_lower=rows is not None)
        self.measure_if_new(inputs)
        picture = (picture - self.mean).div_(self.std)  # a third copy of a large bag would count
        if self.training and is_augmented:
            missing = picture.isnan() if self.gaps else None
            picture = self.augment(picture)
            if missing is not None:  # a mask of zeros must not look like something that is there
                picture = picture.masked_fill(missing, float("nan"))
        return self.finished(picture, rows).to(self.dtype), rows

    def finished(
        self, picture: Float[Tensor, "b channels height width"], rows: Int64[Tensor, " b"] | None
    ) -> Float[Tensor, "b channels height width"]:
        """The inputs of the trunk in float32, from normalised ones."""
        return picture

    def _refuse_other_sizes(self, picture: Float[Tensor, "b channels height width"], may_be_lower: bool) -> None:
        channels, height, width = self.picture_shape
        shape = tuple(picture.shape[1:])
        if self.any_length and channels == shape[0]:
            patch = self.trunk.patch_embed.patch_size
            if may_be_lower or not any(side % of_patch for side, of_patch in zip(shape[1:], patch, strict=True)):
                return
            raise ArgumentError("inputs", f"must be filled by patches of {patch}, got {shape[1:]}; crop them")
        if shape == self.picture_shape or (may_be_lower and shape == (channels, min(shape[1], height), width)):
            return
        remedy = "change the inputs, or carry the encoder to their size with longseq.resize"
        if shape == (height, width, channels):
            remedy = "put the channels first"
        what = f"must be of the shape {(channels, height, width)} that the encoder was built for, got {shape}"
        raise ArgumentError("inputs", f"{what}; {remedy}")

    @torch.no_grad()
    def measure(self, batches: Iterable[Any]) -> None:
        """Set mean and standard deviation to those of the training set, without padding and gaps. If
        ``keeps_statistics``, do nothing.

        Args:
            batches: Inputs as the data module yields them, on the encoder's device.
        """
        if self.keeps_statistics:
            return
        num_pixels: Any = 0
        total = squares = torch.zeros(self.mean.shape, dtype=torch.float64, device=self.mean.device)
        for inputs in batches:
            rows = self.rows(inputs)
            picture = without_padding(self.front_end(inputs), rows)
            num_rows = len(picture) * picture.shape[2] if rows is None else int(rows.sum())
            num_pixels = num_pixels + num_rows * picture.shape[1] * picture.shape[3] // total.numel()
            if self.gaps:
                num_pixels = num_pixels - picture.isnan().sum(0).sum_to_size(total.shape)
                picture = picture.masked_fill(picture.isnan(), 0)
            for part in picture.split(max(_AT_ONCE // max(picture[:, :, :1].numel(), 1), 1), dim=2):
                part = part.double()
                total = total + part.sum(0).sum_to_size(total.shape)
                squares = squares + part.square().sum(0).sum_to_size(total.shape)
        mean = total / num_pixels
        what = "must hold inputs of finite numbers, got none, NaN or infinity; look at the training set"
        require(bool(mean.isfinite().all()), "batches", what)  # num_pixels is 0 if there was no batch
        std = (squares / num_pixels - mean.square()).clamp(min=0).sqrt()
        self.set_statistics(mean, torch.where(std > 0, std, 1.0))  # a constant input is not divided by 0

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set mean and standard deviation to known values; 0 and 1 leave inputs unchanged. Loading weights later marks
        the encoder as not measured if their statistics are 0 and 1: then call this again."""
        self.mean.copy_(mean)
        self.std.copy_(std)
        self._is_measured = True

    def _has_statistics(self) -> bool:
        """Whether mean or deviation differ from a new encoder's; True on the meta device, which has no values."""
        return self.mean.is_meta or bool(self.mean.any() or (self.std != 1).any())

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._is_measured = self._has_statistics()

    def measure_if_new(self, inputs: Any) -> None:
        """Measure the first batch of a training without a data module. With DistributedDataParallel each process
        measures its own batch; before the second step all receive the values of the first process."""
        if not self.training or self._is_measured:
            return
        if self._has_statistics():  # the buffers were set directly
            self._is_measured = True
            return
        warnings.warn(
            "the encoder was never measured: mean and deviation of this first training batch normalise its inputs from "
            "now on; call encoder.measure(batches), with all inputs of the training set, before the training",
            stacklevel=3,
        )
        self.measure([inputs])
