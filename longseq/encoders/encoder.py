"""What every encoder is: a batch becomes a normalised picture, and a timm ViT turns its pixels into features."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from jaxtyping import Float
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from longseq.attention import Mechanism, plug


class Encoder(nn.Module, ABC):
    """Turns a batch into features (b, dim) with a vision transformer whose attention is a mechanism's.

    Constructor arguments of every encoder are kept as attributes of the same name, so that a checkpoint can name them.

    Attributes:
        trunk: timm's VisionTransformer, plugged.
        num_tokens: n, the length of the sequence that the attention sees.
        dim: Width of the features.
        picture_shape: (channels, height, width) of what the trunk takes.
        mean, std: Of the training set's pictures: one a channel for images, one a mel band for sound.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        picture_shape: tuple[int, int, int],
        statistics: tuple[int, int, int],
        patch: tuple[int, int],
        dim: int,
        depth: int,
        heads: int,
        attention: Mechanism,
        mlp_ratio: float,
        dropout: float,
        drop_path: float,
        pool: str,
    ) -> None:
        super().__init__()
        for name, value in {"dim": dim, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio}.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}; the README's configs have values that work")
        for name, value in {"dropout": dropout, "drop_path": drop_path}.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in 0..1 (1 excluded), got {value}; 0 turns it off")
        if dim % heads:
            raise ValueError(f"heads must divide dim, but {heads} does not divide {dim}; change one of them")
        if pool not in ("avg", "token"):
            raise ValueError(f"pool must be avg or token, got {pool!r}; choose one of them")
        self.dim, self.depth, self.heads, self.attention = dim, depth, heads, attention
        self.mlp_ratio, self.dropout, self.drop_path, self.pool = mlp_ratio, dropout, drop_path, pool
        self.picture_shape = picture_shape
        channels, height, width = picture_shape
        self.trunk = plug(
            VisionTransformer(
                img_size=(height, width),
                patch_size=patch,
                in_chans=channels,
                num_classes=0,
                global_pool=pool,
                class_token=pool == "token",
                embed_dim=dim,
                depth=depth,
                num_heads=heads,
                mlp_ratio=mlp_ratio,
                pos_drop_rate=dropout,
                proj_drop_rate=dropout,
                drop_path_rate=drop_path,
            ),
            attention,
        )
        self.register_buffer("mean", torch.zeros(statistics))
        self.register_buffer("std", torch.ones(statistics))

    @property
    def num_tokens(self) -> int:
        """n, the length of the sequence that the attention sees."""
        return self.trunk.patch_embed.num_patches + self.trunk.num_prefix_tokens

    @abstractmethod
    def picture(self, batch: Tensor) -> Float[Tensor, "b channels height width"]:
        """Make the picture that the trunk sees, before it is normalised; in float32."""

    def forward(self, batch: Tensor) -> Float[Tensor, "b dim"]:
        """Encode a batch as its data module yields it."""
        return self.trunk(((self.picture(batch) - self.mean) / self.std).to(self.mean.dtype))

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor]) -> None:
        """Set mean and standard deviation to those of all pictures of the training set."""
        num_pixels = 0
        total = squares = torch.zeros(self.mean.shape, dtype=torch.float64, device=self.mean.device)
        for batch in batches:
            pixels = self.picture(batch.to(self.mean.device)).double()
            num_pixels += pixels.numel() // total.numel()
            total = total + pixels.sum(0).sum_to_size(total.shape)
            squares = squares + pixels.square().sum(0).sum_to_size(total.shape)
        mean = total / num_pixels
        std = (squares / num_pixels - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 0, std, 1.0))  # what has one value only is shifted, not scaled
