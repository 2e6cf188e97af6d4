"""A transformer block as timm has it, computed with less memory and for fewer tokens."""

from typing import Any

from jaxtyping import Bool, Float
from timm.models.vision_transformer import Block
from torch import Tensor


def run_block(
    block: Any, tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b 1 1 n"] | None, num_queries: int | None
) -> Float[Tensor, "b q d"]:
    """What a block makes of the first q tokens, or of all where num_queries is None."""
    if type(block) is not Block:
        return block(tokens, attn_mask=mask)
    mixed = block.attn(block.norm1(tokens), attn_mask=mask, num_queries=num_queries)
    tokens = tokens[:, :num_queries] + block.drop_path1(block.ls1(mixed))
    return tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))
