"""Images as sequences: one token per pixel or per patch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention import Mechanism
from longseq.encoders.encoder import Encoder
from longseq.encoders.local import LocalMixing
from longseq.encoders.positions import Positions
from longseq.encoders.pretrained import TimmEncoder
from longseq.encoders.pretrained_stem import Pretrained
from longseq.encoders.stem import Residual, Stem, refuse_stem
from longseq.encoders.trunk import make_trunk, picture_shape


class ImageEncoder(Encoder):
    """A vision transformer (arXiv:2010.11929) over pixels or patches: (b, channels, height, width) -> (b, dim).

    Args:
        shape: Channels, height and width of an image, in pixels.
        patch_size: Side of a patch, in pixels; 1 makes every pixel a token.
        dim: Width of a token.
        depth: Number of blocks; 0 with a stem, for its tokens alone.
        heads: Attention heads; they divide dim.
        attention: The mechanism of every block.
        mlp_ratio: Width of the hidden layer of a block's perceptron, as a multiple of dim.
        dropout: Dropout rate of position embeddings, attention outputs and perceptrons.
        drop_path: Rate of stochastic depth in the last block, growing linearly from 0.
        pool: What the features are: ``avg``, the mean of the tokens, or ``token``, a class token.
        local: Depthwise convolutions over the tokens in every block, ``Conv2d`` or ``Conv1d``; None for none.
        positions: What tells a token its place: ``learned`` vectors, ``sincos``, fixed waves, or ``none``: with local
            mixing, edges tell.
        checkpointing: Whether to compute the blocks' activations again and not keep them: less memory, more time.
        any_length: Whether images may be of any size that patches fill, without a resize; ``shape`` is then a usual
            one. Positions must be ``none``, and the attention must not be bound to a length.
        reversible: Whether blocks are the Reformer's, whose activations are computed again from their outputs: memory
            for one block, whatever the depth, and more time.
        stem: Convolutions in front of the tokens (stem.py), whose strides divide the patch; None for none.
        layer_scale: Where the learned scale of what each attention and perceptron adds starts (LayerScale,
            arXiv:2103.17239); 0 for no scale.

    Raises:
        ValueError: If the patch does not divide the image, the heads do not divide dim, or the mechanism does not fit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        attention: Mechanism,
        patch_size: int = 1,
        dim: int = 128,
        depth: int = 6,
        heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        pool: str = "avg",
        checkpointing: bool = False,
        local: LocalMixing | None = None,
        positions: Positions = "learned",
        any_length: bool = False,
        reversible: bool = False,
        stem: Stem | None = None,
        layer_scale: float = 0.0,
    ) -> None:
        picture = picture_shape(shape)
        height, width = picture[1:]
        if patch_size < 1 or height % patch_size or width % patch_size:
            raise ArgumentError(
                "patch_size",
                f"must divide the image, but {patch_size} does not divide {height} x {width} pixels; "
                + _remedy(patch_size, height, width),
            )
        patch = (patch_size, patch_size)
        if stem is not None:
            refuse_stem(stem, patch, "patch_size")
        sizes = dim, depth, heads, mlp_ratio, dropout, drop_path
        trunk = make_trunk(picture, patch, *sizes, pool, positions, any_length, stem, layer_scale)
        super().__init__(trunk, attention, picture, (picture[0], 1, 1), checkpointing, local, any_length, reversible)
        self.shape, self.patch_size, self.pool = list(shape), patch_size, pool
        self.mlp_ratio, self.dropout, self.drop_path, self.positions = mlp_ratio, dropout, drop_path, positions
        self.stem, self.layer_scale = stem, layer_scale
        if isinstance(stem, Pretrained):
            self.stem = stem.without_weights()  # a checkpoint holds them itself
            self.set_statistics(*stem.statistics(picture[0]))
            self.keeps_statistics = True
        self.heads = heads  # with depth 0 no block tells

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        small = {"dim": 16, "depth": 2, "heads": 4, "mlp_ratio": 2.0, **options}
        bytes_ = torch.randint(256, (3, 3, 6, 8), dtype=torch.uint8)
        return [
            (cls((3, 6, 8), attention, **small), bytes_),
            (cls((1, 12, 8), attention, patch_size=2, pool="token", **small), 255 * torch.rand(3, 1, 12, 8)),
            (
                cls((3, 12, 16), attention, patch_size=2, stem=Residual([4, 6], [1, 2]), **small),
                255 * torch.rand(3, 3, 12, 16),
            ),
            (
                cls(
                    (3, 16, 16),
                    attention,
                    patch_size=4,
                    stem=Pretrained("test_efficientnet", 1, pretrained=False),
                    **small,
                ),
                255 * torch.rand(3, 3, 16, 16),
            ),
        ]

    def front_end(self, inputs: Shaped[Tensor, "b channels height width"]) -> Float[Tensor, "b channels height width"]:
        return inputs.float()

    @staticmethod
    def from_timm(model: str, attention: Mechanism, **options: Any) -> TimmEncoder:
        """Plug a timm vision transformer, with its pretrained weights: a TimmEncoder with these arguments."""
        return TimmEncoder(model, attention, **options)


def _remedy(patch_size: int, height: int, width: int) -> str:
    token = "1 makes every pixel a token"
    if patch_size < 1 or min(height, width) < patch_size:
        return token
    rows, columns = height // patch_size * patch_size, width // patch_size * patch_size
    size = rows if rows == columns else f"[{rows},{columns}]"
    return f"give --data.size {size}, or 1, which makes every pixel a token"
