"""An image encoder that is any vision transformer of timm to which ``plug`` applies, with pretrained weights."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from timm.layers.patch_embed import PatchEmbed
from timm.models.naflexvit import NaFlexVit
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention import Mechanism
from longseq.attention.plug import REFUSED
from longseq.encoders._timm_models import config_of, created, statistics_of
from longseq.encoders.encoder import Encoder
from longseq.encoders.local import LocalMixing
from longseq.encoders.naflex import at_one_size
from longseq.encoders.trunk import Sizes, picture_shape, refuse_unfilled


class TimmEncoder(Encoder):
    """A timm vision transformer with its attention replaced: (b, channels, height, width) of 0..255 -> (b, dim).

    Pixels are normalised by the mean and deviation that the model was trained with, not by those of the data. If
    ``shape`` is not the model's own, position embeddings are resampled and the first convolution is adapted. EVA and
    DINOv3 keep their rotary positions; a NaFlexViT becomes a plain ViT for images of this shape. docs/pretrained.md
    lists the models.

    Args:
        model: timm's name, such as ``vit_tiny_patch16_224``; its blocks must hold timm's Attention, or
            its relatives with rotary positions.
        attention: The mechanism of every block.
        shape: Channels, height and width of an image, in pixels; None for the model's own.
        pretrained: True for timm's weights, which it downloads once; the path of a file of weights that timm can read;
            False for random ones.
        dropout: Dropout rate of position embeddings, attention outputs and MLPs.
        drop_path: Rate of stochastic depth in the last block, growing linearly from 0.
        local: Depthwise convolutions over the tokens in every block, ``Conv2d`` or ``Conv1d``; None for none.
        checkpointing: Whether the blocks' activations are recomputed instead of stored: less memory, more time.

    Raises:
        ValueError: If timm has no such model, its weights cannot be loaded, it is not a plain vision transformer, or
            the mechanism does not fit.
    """

    def __init__(
        self,
        model: str,
        attention: Mechanism,
        shape: Sequence[int] | None = None,
        pretrained: bool | str = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        checkpointing: bool = False,
        local: LocalMixing | None = None,
    ) -> None:
        config = config_of(model, "vit_tiny_patch16_224")
        channels, height, width = picture_shape(config.input_size if shape is None else shape)
        options: dict[str, Any] = {"proj_drop_rate": dropout, "pos_drop_rate": dropout, "drop_path_rate": drop_path}
        try:
            trunk = created(model, pretrained, img_size=(height, width), in_chans=channels, num_classes=0, **options)
        except Exception as error:
            if "unexpected keyword argument" not in str(error):
                raise
            # its constructor lacks img_size or another option
            why = next((why for kind, why in REFUSED.items() if kind in str(error)), error)
            what = f"must be a plain vision transformer, got {model!r} ({why}); try deit3 or vit"
            raise ArgumentError("model", what) from error
        embed = getattr(trunk, "patch_embed", None)
        if type(embed) is PatchEmbed and not embed.dynamic_img_pad:
            rows, columns = embed.proj.kernel_size
            refuse_unfilled((height, width), (rows, columns))
        # all other sizes are timm's
        sizes = Sizes(dropout=dropout, drop_path=drop_path, checkpointing=checkpointing, local=local)
        if isinstance(trunk, NaFlexVit):
            trunk = at_one_size(trunk, (height, width))
        try:
            super().__init__(trunk, attention, (channels, height, width), (channels, 1, 1), sizes)
        except ValueError as error:
            if not str(error).startswith("vit must"):
                raise
            raise ArgumentError("model", f"must be one that can be plugged, got {model!r}: {error}") from error
        self.model, self.shape = model, [channels, height, width]
        self.pretrained = False  # a checkpoint has the weights, so building from it must not load timm's
        self.keeps_statistics = True
        self.set_statistics(*statistics_of(config, channels))

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        image = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
        return [(cls("test_vit", attention, shape=(3, 64, 64), pretrained=False, **options), image)]

    def front_end(self, inputs: Shaped[Tensor, "b channels height width"]) -> Float[Tensor, "b channels height width"]:
        return inputs.float()

    measured_by = ("model", "shape")
