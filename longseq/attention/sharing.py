"""Which heads, keys and values, and layers hold the same projection object (Linformer, section 4)."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from longseq.arguments import require
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.projection import Projection, ProjectionLayer, RaggedProjection

Sharing = Literal["none", "headwise", "key_value", "layerwise"]

# The shortened length k: one for all layers, one per layer, or one per head of each layer.
Lengths = int | list[int] | list[list[int]]

_Pair = tuple[ProjectionLayer, ProjectionLayer] | tuple[RaggedProjection, RaggedProjection]


def shared_projections(
    projection: Projection, sharing: Sharing, *, k: Lengths, grid: TokenGrid, stack: Stack
) -> list[_Pair]:
    """Build E, for the keys, and F, for the values, of each layer of a stack.

    Args:
        projection: What E and F are.
        sharing: ``none``: an E and an F per head; ``headwise``: an E and an F per layer; ``key_value``: one E = F per
            layer; ``layerwise``: one E = F for all layers. For 12 layers of 12 heads these are 288, 24, 12 and 1
            matrices.
        k: Tokens of the shortened sequence.
        grid: The tokens of the sequence.
        stack: The layers, which have the width of keys and values and the number of heads.

    Raises:
        ValueError: If the sharing is unknown, a k is not in 1..n, there are not as many k as layers or heads, or the
            sharing does not allow different k.
    """
    kinds = get_args(Sharing)
    require(sharing in kinds, "sharing", f"must be one of {', '.join(kinds)}, got {sharing!r}; choose one of them")
    dim, heads, depth = stack[0].attn_dim, stack[0].num_heads, len(stack)
    by_layer = _by_layer(k, sharing, grid.num_tokens, heads, depth)
    if sharing == "layerwise":
        return [projection.pair(True, grid, by_layer[0], dim)] * depth  # type: ignore[arg-type]  # one k, as checked
    pairs: list[_Pair] = []
    for length in by_layer:
        if isinstance(length, list):
            what = f"must be one number per layer with {type(projection).__name__}, got {length}; give one"
            require(projection.takes_lengths_of_heads, "k", what)
            of_heads = [projection.pair(False, grid, of_head, dim // heads) for of_head in length]
            pairs.append((RaggedProjection(E for E, _ in of_heads), RaggedProjection(F for _, F in of_heads)))
        elif sharing == "none":
            pairs.append(projection.pair(False, grid, length, dim, heads))
        else:
            pairs.append(projection.pair(sharing == "key_value", grid, length, dim))
    return pairs


def examples_of_lengths(mechanism: Callable[..., Any]) -> list[Any]:
    """A mechanism with every sharing, with one k per layer, and with one k per head."""
    return [
        *(mechanism(7, sharing=sharing) for sharing in ("key_value", "none", "headwise", "layerwise")),
        mechanism([5, 7]),
        mechanism([[3, 4, 5, 6], [7, 7, 7, 7]], sharing="none"),
    ]


def _by_layer(k: Lengths, sharing: Sharing, n: int, heads: int, depth: int) -> list[int] | list[list[int]]:
    """The k of each layer, checked against the sharing, n, and the numbers of heads and layers."""
    by_layer = k if isinstance(k, list) else [k] * depth
    what = f"must be one number or one for each of the {depth} layers, got {len(by_layer)}; count them"
    require(len(by_layer) == depth, "k", what)
    for lengths in by_layer:
        if isinstance(lengths, list):
            what = f"must be none for a k of each head, got {sharing!r}, whose heads share a matrix"
            require(sharing == "none", "sharing", f"{what}; give one k per layer, or set sharing to none")
            what = f"must be one number for each of the {heads} heads, got {lengths}; count them"
            require(len(lengths) == heads, "k", what)
        for length in lengths if isinstance(lengths, list) else [lengths]:
            what = f"must be in 1..{n} (the sequence length), got {length}; lower k or lengthen the sequence"
            require(1 <= length <= n, "k", what)
    is_one = sharing != "layerwise" or len(set(by_layer)) == 1  # type: ignore[arg-type]  # numbers, as checked
    what = f"must not be layerwise for a k of each layer, got k = {k}: one matrix has one k"
    require(is_one, "sharing", f"{what}; give one k, or set sharing to key_value")
    return by_layer  # type: ignore[return-value]
