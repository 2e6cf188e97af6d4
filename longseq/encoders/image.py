"""Images as sequences: one token per pixel or per patch."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention import Mechanism
from longseq.encoders.encoder import Encoder
from longseq.encoders.pretrained import TimmEncoder
from longseq.encoders.pretrained_stem import Pretrained
from longseq.encoders.stem import Residual, refuse_stem
from longseq.encoders.trunk import Sizes, filled_size, make_trunk, picture_shape


class ImageEncoder(Encoder):
    """A vision transformer (arXiv:2010.11929) over pixels or patches: (b, channels, height, width) -> (b, dim).

    Args:
        shape: Channels, height and width of an image, in pixels.
        attention: The mechanism of every block.
        patch_size: Side of a patch, in pixels; 1 makes every pixel a token.
        sizes: Arguments of ``Sizes``.

    Raises:
        ValueError: If the patch does not divide the image, the heads do not divide dim, or the mechanism does not fit.
    """

    def __init__(
        self, shape: Sequence[int], attention: Mechanism, patch_size: int = 1, **sizes: Annotated[Any, Sizes]
    ) -> None:
        channels, height, width = picture_shape(shape)
        if patch_size < 1 or height % patch_size or width % patch_size:
            what = f"must divide the image, but {patch_size} does not divide {height} x {width} pixels"
            raise ArgumentError("patch_size", f"{what}; {_remedy(patch_size, height, width)}")
        patch = (patch_size, patch_size)
        described = Sizes(**sizes)
        if described.stem is not None:
            refuse_stem(described.stem, patch, "patch_size")
        size = channels, height, width
        super().__init__(make_trunk(size, patch, described), attention, size, (channels, 1, 1), described)
        self.shape, self.patch_size = list(shape), patch_size
        if isinstance(described.stem, Pretrained):
            self.stem = described.stem.without_weights()  # a checkpoint has them
            self.set_statistics(*described.stem.statistics(channels))
            self.keeps_statistics = True

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        small = {"dim": 16, "depth": 2, "heads": 4, "mlp_ratio": 2.0, **options}
        bytes_ = torch.randint(256, (3, 3, 6, 8), dtype=torch.uint8)
        trained, pretrained = Residual([4, 6], [1, 2]), Pretrained("test_efficientnet", 1, pretrained=False)
        return [
            (cls((3, 6, 8), attention, **small), bytes_),
            (cls((1, 12, 8), attention, patch_size=2, pool="token", **small), 255 * torch.rand(3, 1, 12, 8)),
            (cls((3, 12, 16), attention, patch_size=2, stem=trained, **small), 255 * torch.rand(3, 3, 12, 16)),
            (cls((3, 16, 16), attention, patch_size=4, stem=pretrained, **small), 255 * torch.rand(3, 3, 16, 16)),
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
    size = filled_size((height, width), (patch_size, patch_size))
    return f"give --data.size {size}, or 1, which makes every pixel a token"
