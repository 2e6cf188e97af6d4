"""Which heads, keys and values, and layers hold the same projection object (Linformer, section 4)."""

from typing import Literal, get_args

from longseq.attention.projection import Projection, ProjectionLayer

Sharing = Literal["none", "headwise", "key_value", "layerwise"]


def shared_projections(
    projection: Projection, sharing: Sharing, *, n: int, k: int, heads: int, depth: int
) -> list[tuple[ProjectionLayer, ProjectionLayer]]:
    """Build E, for the keys, and F, for the values, of each layer of a stack.

    Args:
        projection: What E and F are.
        sharing: ``none``: an E and an F for each head; ``headwise``: an E and an F a layer; ``key_value``: one E = F a
            layer; ``layerwise``: one E = F in all. At 12 layers of 12 heads these are 288, 24, 12 and 1 matrices.
        n: Tokens of the sequence.
        k: Tokens of the shortened sequence.
        heads: Heads of a layer.
        depth: Layers of the stack.

    Raises:
        ValueError: If k is not in 1..n, or there is no such sharing.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k must be in 1..{n} (the sequence length), got {k}; lower k or lengthen the sequence")
    match sharing:
        case "none":
            return [(projection.build(n, k, heads), projection.build(n, k, heads)) for _ in range(depth)]
        case "headwise":
            return [(projection.build(n, k), projection.build(n, k)) for _ in range(depth)]
        case "key_value":
            return [(shared, shared) for shared in (projection.build(n, k) for _ in range(depth))]
        case "layerwise":
            shared = projection.build(n, k)
            return [(shared, shared)] * depth
    raise ValueError(f"sharing must be one of {', '.join(get_args(Sharing))}, got {sharing!r}; choose one of them")
