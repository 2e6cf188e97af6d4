"""timm: the parts of its vision transformer that longseq replaces by a shorter path."""

import hashlib
import inspect
from typing import Any

import timm
import torch
from jaxtyping import Float
from timm.layers.attention import Attention, AttentionRope
from timm.layers.mlp import Mlp
from timm.layers.patch_embed import PatchEmbed
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor

Trunk = VisionTransformer | Eva  # the models that can be plugged

# forward_pass.encode replaces the methods of VisionTransformer, block.run_block those of Block and Mlp, and
# patches.embed_patches that of PatchEmbed. AttentionLayer takes over the attributes that the constructor of Attention,
# or of its relatives with rotary positions, sets.
_REPLACED: dict[str, Any] = {
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
    "Eva.forward_features": Eva.forward_features,
    "Eva._pos_embed": Eva._pos_embed,
    "EvaAttention.forward": EvaAttention.forward,
    "AttentionRope.forward": AttentionRope.forward,
}


def version() -> str:
    return timm.__version__


def digests() -> dict[str, str]:
    """A digest of the source of each method that longseq replaces."""
    sources = {name: inspect.getsource(method).encode() for name, method in _REPLACED.items()}
    return {name: hashlib.sha256(source).hexdigest()[:16] for name, source in sources.items()}


def leaves_prefix_alone(trunk: Trunk) -> bool:
    """Whether the features of a ViT depend only on the prefix tokens of the last block."""
    return trunk.global_pool == "token" and trunk.attn_pool is None


def add_positions(
    trunk: Trunk, patches: Float[Tensor, "..."], own: slice | None = None
) -> tuple[Float[Tensor, "b n d"], list[dict[str, Any]]]:
    """The tokens of a ViT (prefix tokens and patches, with position embeddings), and further arguments for each block:
    rotary positions.

    Args:
        trunk: The ViT.
        patches: All its patches, or those of some places; for an Eva all.
        own: These places on the grid; None for all.
    """
    depth = len(trunk.blocks)
    if isinstance(trunk, Eva):
        tokens, rope = trunk._pos_embed(patches)
        by_block: Any = rope if trunk.rope_mixed else [rope] * depth
        return tokens, [{"rope": of_block} for of_block in by_block]
    if own is None or trunk.pos_embed is None:
        return trunk._pos_embed(patches), [{}] * depth
    of_prefix = 0 if trunk.no_embed_class else trunk.num_prefix_tokens
    prefix, of_grid = trunk.pos_embed[:, :of_prefix], trunk.pos_embed[:, of_prefix:]
    trunk.__dict__["pos_embed"] = torch.cat([prefix, of_grid[:, own]], dim=1)  # hides the parameter
    try:
        return trunk._pos_embed(patches), [{}] * depth
    finally:
        del trunk.__dict__["pos_embed"]
