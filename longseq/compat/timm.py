"""timm: the parts of its vision transformer that longseq runs by a shorter path."""

import hashlib
import inspect
from typing import Any

import timm
import torch
from jaxtyping import Float
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor

# encoder.encode stands in for the methods of VisionTransformer, block.run_block for those of Block and Mlp,
# patches.embed_patches for that of PatchEmbed, and AttentionLayer takes over what Attention's constructor makes.
REPLACED: dict[str, Any] = {
    "VisionTransformer.forward": VisionTransformer.forward,
    "VisionTransformer.forward_features": VisionTransformer.forward_features,
    "VisionTransformer._pos_embed": VisionTransformer._pos_embed,
    "VisionTransformer.pool": VisionTransformer.pool,
    "VisionTransformer.forward_head": VisionTransformer.forward_head,
    "Block.forward": Block.forward,
    "Mlp.forward": Mlp.forward,
    "PatchEmbed.forward": PatchEmbed.forward,
    "Attention.__init__": Attention.__init__,
    "Attention.forward": Attention.forward,
}


def version() -> str:
    return timm.__version__


def digests() -> dict[str, str]:
    """A digest of the source of each method that longseq runs in another way."""
    return {
        name: hashlib.sha256(inspect.getsource(method).encode()).hexdigest()[:16] for name, method in REPLACED.items()
    }


def leaves_prefix_alone(trunk: VisionTransformer) -> bool:
    """Whether only prefix tokens of the last block count for the features of a ViT."""
    return trunk.global_pool == "token" and trunk.attn_pool is None


def add_positions(
    trunk: VisionTransformer, patches: Float[Tensor, "..."], own: slice | None = None
) -> Float[Tensor, "b n d"]:
    """The tokens of a ViT: its patches and prefix tokens, with their position embeddings.

    Args:
        trunk: The ViT.
        patches: All its patches, or those of some places.
        own: These places on the grid; None for all.
    """
    if own is None or trunk.pos_embed is None:
        return trunk._pos_embed(patches)
    of_prefix = 0 if trunk.no_embed_class else trunk.num_prefix_tokens
    prefix, of_grid = trunk.pos_embed[:, :of_prefix], trunk.pos_embed[:, of_prefix:]
    trunk.__dict__["pos_embed"] = torch.cat([prefix, of_grid[:, own]], dim=1)  # found before the parameter
    try:
        return trunk._pos_embed(patches)
    finally:
        del trunk.__dict__["pos_embed"]
