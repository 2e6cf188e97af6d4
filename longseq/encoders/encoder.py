"""What every encoder does: it makes normalised pictures of a batch, and a timm ViT turns their tokens into features."""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longseq.arguments import ArgumentError
from longseq.attention import Mechanism, plug
from longseq.attention.plug import token_grid
from longseq.compat.timm import add_positions, leaves_prefix_alone
from longseq.compat.torch import is_hooked
from longseq.encoders.block import run_block
from longseq.encoders.local import LocalMixing, add_local
from longseq.encoders.patches import embed_patches
from longseq.encoders.positions import Positions, sincos


class Encoder(nn.Module, ABC):
    """Turns a batch into features (b, dim) with a vision transformer whose attention is a mechanism's.

    Constructor arguments of every encoder are kept as attributes of the same name, so that a checkpoint can name them.

    An encoder that was not measured before its first training batch measures that batch, and warns: a model that is
    trained on unnormalised inputs becomes much less accurate.

    Args:
        trunk: timm's VisionTransformer without a head; its attention is replaced.
        attention: The mechanism that replaces it.
        picture_shape: (channels, height, width) of the pictures that the trunk takes.
        statistics: Shape of mean and std; it must broadcast over a picture.
        local: Local mixing of every block; None for none.
        checkpointing: Whether the backward pass computes the blocks' activations again, so that they are not kept.

    Attributes:
        num_tokens: n, the length of the sequence that the attention sees.
        dim, depth, heads: Width of the features, number of blocks, and heads of each block.
        mean, std: Mean and standard deviation of the training set's pictures: one value per channel for images, one per
            mel band for sound.
    """

    mean: Tensor
    std: Tensor
    takes_sounds: ClassVar[bool] = False  # True for sounds, False for images
    measured_by: ClassVar[tuple[str, ...]] = ()  # arguments on which mean and std depend, besides the data

    def __init__(
        self,
        trunk: nn.Module,
        attention: Mechanism,
        picture_shape: tuple[int, int, int],
        statistics: tuple[int, int, int],
        checkpointing: bool,
        local: LocalMixing | None = None,
    ) -> None:
        super().__init__()
        blocks: Any = trunk.blocks
        heads = blocks[0].attn.num_heads if hasattr(blocks[0], "attn") else 0  # plug refuses a block without attn
        self.trunk = plug(trunk, attention)
        if local is not None:
            add_local(self.trunk, local)
        self.trunk.set_grad_checkpointing(checkpointing)
        self.attention, self.local = attention, local
        self.picture_shape, self.checkpointing = picture_shape, checkpointing
        self.dim, self.depth, self.heads = self.trunk.num_features, len(self.trunk.blocks), heads
        self.register_buffer("mean", torch.zeros(statistics))
        self.register_buffer("std", torch.ones(statistics))
        self._is_measured = False

    @property
    def num_tokens(self) -> int:
        """n, the length of the sequence that the attention sees."""
        return self.trunk.patch_embed.num_patches + self.trunk.num_prefix_tokens

    @classmethod
    @abstractmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        """Small encoders of each form, each with a batch of inputs as data modules yield it.

        All tests of encoders use them. Each encoder sees 16 tokens or more, and has these options of its constructor.
        """

    @abstractmethod
    def front_end(self, inputs: Any) -> Float[Tensor, "b channels height width"]:
        """Make the pictures for the trunk, in float32 and not normalised. They may lack rows at the end; these rows are
        then padding."""

    def augment(self, picture: Float[Tensor, "b channels height width"]) -> Float[Tensor, "b channels height width"]:
        """Change normalised pictures at random, in training."""
        return picture

    def rows(self, inputs: Any) -> Int64[Tensor, " b"] | None:
        """How many rows of each picture come before its padding; None if no picture has padding."""
        return None

    def draw(self, pictures: Sequence[Float[Tensor, "channels _ width"]], names: Sequence[str]) -> Any:
        """A matplotlib figure of pictures as ``front_end`` makes them, without their padding, under their names."""
        from longseq.encoders.drawing import draw_images  # matplotlib takes half a second to import

        return draw_images(pictures, names)

    def sounds(self, inputs: Any) -> list[Float[Tensor, " samples"]]:
        """The waveforms of a batch, for people to listen to, without padding; an empty list for images."""
        return []

    def count_tokens(self, inputs: Any) -> Int64[Tensor, ""] | int:
        """The number of tokens in a batch, without padding."""
        rows = self.rows(inputs)
        return len(inputs) * self.num_tokens if rows is None else _count_tokens(self.trunk, rows).sum()

    def forward(self, inputs: Any) -> Float[Tensor, "b dim"]:
        """Encode a batch as its data module yields it."""
        return encode(self.trunk, *self.prepared(inputs))

    def prepared(self, inputs: Any) -> tuple[Float[Tensor, "b channels height width"], Int64[Tensor, " b"] | None]:
        """The pictures that the trunk sees, normalised and in training changed at random, and how many rows of each
        come before its padding."""
        picture, rows = self.front_end(inputs), self.rows(inputs)
        self._refuse_other_sizes(picture, may_be_lower=rows is not None)
        if self.training and not self._is_measured:
            self._measure_first_batch(inputs)
        picture = ((picture - self.mean) / self.std).to(self.mean.dtype)
        if self.training:
            picture = self.augment(picture)
        return picture, rows

    def _refuse_other_sizes(self, picture: Float[Tensor, "b channels height width"], may_be_lower: bool) -> None:
        channels, height, width = self.picture_shape
        shape = tuple(picture.shape[1:])
        if shape == self.picture_shape or (may_be_lower and shape == (channels, min(shape[1], height), width)):
            return
        raise ArgumentError(
            "inputs",
            f"must be of the shape {(channels, height, width)} that the encoder was built for, got {shape}; "
            "change the inputs, or carry the encoder to their size with longseq.resize",
        )

    @torch.no_grad()
    def measure(self, batches: Iterable[Any]) -> None:
        """Set mean and standard deviation to those of all pictures of the training set, without padding.

        Args:
            batches: Inputs as the data module yields them, on the encoder's device.
        """
        num_pixels = 0
        total = squares = torch.zeros(self.mean.shape, dtype=torch.float64, device=self.mean.device)
        for inputs in batches:
            picture, rows = self.front_end(inputs).double(), self.rows(inputs)
            num_rows = len(picture) * picture.shape[2]
            if rows is not None:
                picture = picture.masked_fill(~_is_present(rows, picture.shape[2])[:, None, :, None], 0)
                num_rows = int(rows.sum())
            num_pixels += num_rows * picture.shape[1] * picture.shape[3] // total.numel()
            total = total + picture.sum(0).sum_to_size(total.shape)
            squares = squares + picture.square().sum(0).sum_to_size(total.shape)
        mean = total / num_pixels
        if not mean.isfinite().all():  # num_pixels is 0 where there was no batch
            raise ArgumentError(
                "batches", "must hold inputs of finite numbers, got none, NaN or infinity; look at the training set"
            )
        std = (squares / num_pixels - mean.square()).clamp(min=0).sqrt()
        self.set_statistics(mean, torch.where(std > 0, std, 1.0))  # a constant is shifted, not divided by 0

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set mean and standard deviation to known values; 0 and 1 leave pictures as they are."""
        self.mean.copy_(mean)
        self.std.copy_(std)
        self._is_measured = True

    def _has_statistics(self) -> bool:
        """Whether mean or deviation differ from a new encoder's; True on the meta device, which has no values."""
        return self.mean.is_meta or bool(self.mean.any() or (self.std != 1).any())

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._is_measured = self._has_statistics()

    def _measure_first_batch(self, inputs: Any) -> None:
        """Measure the first batch of a training without a data module. With DistributedDataParallel each process
        measures its own batch; before the second step they all receive the values of the first process."""
        if self._has_statistics():  # the buffers were set directly
            self._is_measured = True
            return
        warnings.warn(
            "the encoder was never measured: mean and deviation of this first training batch normalise its inputs from "
            "now on; call encoder.measure(batches), with all inputs of the training set, before the training",
            stacklevel=3,
        )
        self.measure([inputs])


def encode(
    trunk: VisionTransformer, picture: Float[Tensor, "b channels height width"], rows: Int64[Tensor, " b"] | None = None
) -> Float[Tensor, "b dim"]:
    """The features that a plugged trunk makes of pictures: timm's forward pass, with three additions.

    Pictures may lack rows at their end. Each picture is then encoded as if it were alone, because padding is masked
    from the first token to the pooling. Activation checkpointing works with a mask too. Where the class token is all
    that leaves the trunk, the last block is computed for the prefix tokens alone.

    Args:
        trunk: A ViT whose attention is a mechanism's.
        picture: Normalised pictures; with rows, as high as the highest picture.
        rows: How many rows of each picture come before its padding; None without padding.
    """
    if is_hooked(trunk) or is_hooked(trunk.blocks):  # the shorter path below would not call the hooks
        if rows is not None:
            raise ArgumentError(
                "trunk", "must have no hooks for inputs of unlike lengths; hook into the encoder or its blocks"
            )
        return trunk(picture)
    last_queries = trunk.num_prefix_tokens if leaves_prefix_alone(trunk) else None
    tokens, present = encode_tokens(trunk, picture, rows, last_queries)
    if present is None or trunk.global_pool != "avg":
        return trunk.forward_head(tokens)
    prefix = trunk.num_prefix_tokens
    present = present[:, prefix:, None]
    mean = tokens[:, prefix:].masked_fill(~present, 0).sum(1) / present.sum(1).to(tokens.dtype)
    return trunk.head_drop(trunk.fc_norm(mean))


def encode_tokens(
    trunk: VisionTransformer,
    picture: Float[Tensor, "b channels height width"],
    rows: Int64[Tensor, " b"] | None = None,
    last_queries: int | None = None,
    replaced: tuple[Bool[Tensor, "b _"], Float[Tensor, " d"]] | None = None,
) -> tuple[Float[Tensor, "b q d"], Bool[Tensor, "b n"] | None]:
    """The tokens that leave a plugged trunk, before they are pooled, and which of them are there.

    Args:
        trunk: As for encode.
        picture: As for encode.
        rows: As for encode.
        last_queries: How many tokens leave the last block; None for all.
        replaced: Which patches are hidden, and the token that stands in their places.
    """
    present = None
    if rows is not None:
        height, whole_height = picture.shape[2], trunk.patch_embed.img_size[0]
        present = _is_present(_count_tokens(trunk, rows), _count_tokens(trunk, height))
        picture = picture.masked_fill(~_is_present(rows, height)[:, None, :, None], 0)
        picture = F.pad(picture, (0, 0, 0, whole_height - height))
    patches = embed_patches(trunk.patch_embed, picture)
    if replaced is not None:
        where, token = replaced
        patches = torch.where(where[..., None], token.to(patches.dtype), patches)
    tokens = add_positions(trunk, patches)
    if present is not None:
        tokens = tokens[:, : present.shape[1]]
    # timm's convolution leaves a token's channels n numbers apart: without contiguous() every later layer copies them
    tokens = trunk.norm_pre(trunk.patch_drop(tokens).contiguous())
    mask = None if present is None else present[:, None, None]
    for depth, block in enumerate(trunk.blocks, start=1):
        num_queries = last_queries if depth == len(trunk.blocks) else None
        if trunk.grad_checkpointing and torch.is_grad_enabled():
            tokens = checkpoint(run_block, block, tokens, mask, num_queries, use_reentrant=False)
        else:
            tokens = run_block(block, tokens, mask, num_queries)
    return trunk.norm(tokens), present


def _count_tokens(trunk: VisionTransformer, rows: Int64[Tensor, " b"] | int) -> Any:
    patch, in_row = trunk.patch_embed.patch_size[0], trunk.patch_embed.grid_size[1]
    return trunk.num_prefix_tokens + -(-rows // patch) * in_row


def refuse_beyond_memory(dim: int, depth: int, mlp_ratio: float) -> None:
    """Check that this machine can hold the matrices of a ViT: it would fill its memory until it is killed.

    Raises:
        MemoryError: If the matrices are larger than the memory.
    """
    size = 4 * depth * (4 + 2 * mlp_ratio) * dim * dim
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise MemoryError(
            f"the weights of {depth} blocks of dim {dim} take {size / 2**30:.3g} GiB, and this machine has "
            f"{memory / 2**30:.3g} in all"
        )


def make_trunk(
    picture_shape: tuple[int, int, int],
    patch: tuple[int, int],
    dim: int,
    depth: int,
    heads: int,
    mlp_ratio: float,
    dropout: float,
    drop_path: float,
    pool: str,
    positions: Positions = "learned",
) -> VisionTransformer:
    """A new timm ViT without a head.

    Where a token is one pixel, position embeddings start with a deviation of 1 and not timm's 0.02: a pixel means
    little without its place, and exact attention does not learn the places within a short training (accuracy 0.52 on
    digits with 0.02, 0.91 with 1; docs/results). Frames mean more and learn better with timm's 0.02: 0.99 on spoken
    digits, 0.97 with 1.

    Raises:
        ValueError: If a number is out of its range, the heads do not divide the width, or pool is unknown.
        MemoryError: If this machine has no room for the weights.
    """
    for name, value in {"dim": dim, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio}.items():
        if not value > 0:  # not (value <= 0), which NaN would pass
            raise ArgumentError(name, f"must be positive, got {value}; the README's configs have values that work")
    if dim * mlp_ratio < 1:
        raise ArgumentError(
            "mlp_ratio", f"must leave the perceptron a width of 1 or more, got {mlp_ratio} times {dim}; 4 is usual"
        )
    for name, value in {"dropout": dropout, "drop_path": drop_path}.items():
        if not 0 <= value < 1:
            raise ArgumentError(name, f"must be in 0..1 (1 excluded), got {value}; 0 turns it off")
    if dim % heads:
        raise ArgumentError("heads", f"must divide dim, but {heads} does not divide {dim}; change one of them")
    if pool not in ("avg", "token"):
        raise ArgumentError("pool", f"must be avg or token, got {pool!r}; choose one of them")
    if positions not in get_args(Positions):
        raise ArgumentError("positions", f"must be learned, sincos or none, got {positions!r}; choose one of them")
    refuse_beyond_memory(dim, depth, mlp_ratio)
    channels, height, width = picture_shape
    trunk = VisionTransformer(
        img_size=(height, width),
        patch_size=patch,  # type: ignore[arg-type]  # timm takes a pair too
        in_chans=channels,
        num_classes=0,
        global_pool=pool,  # type: ignore[arg-type]
        class_token=pool == "token",
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio,
        pos_drop_rate=dropout,
        proj_drop_rate=dropout,
        drop_path_rate=drop_path,
        pos_embed="learn" if positions == "learned" else "none",
    )
    if positions == "sincos":
        del trunk.pos_embed
        trunk.pos_embed = nn.Buffer(sincos(token_grid(trunk), dim))  # type: ignore[assignment]
    elif positions == "learned" and patch == (1, 1):
        nn.init.normal_(trunk.pos_embed)  # type: ignore[arg-type]
    return trunk


def picture_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Check the shape of an image.

    Raises:
        ValueError: If it is not three positive numbers: channels, height and width.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ArgumentError("shape", f"must be channels, height and width, got {list(shape)}; for example [3, 32, 32]")
    channels, height, width = shape
    return channels, height, width


def _is_present(counts: Int64[Tensor, " b"], length: int) -> Tensor:
    """(b, length), True in the first counts[i] places of row i."""
    return torch.arange(length, device=counts.device) < counts[:, None]
