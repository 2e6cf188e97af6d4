"""What every projection promises, tested on 23 tokens that become 5."""

from typing import Any

import torch
from torch import Tensor, nn

from longseq.attention import Linformer, Projection, TokenGrid, carry
from longseq.contract import mechanism as of_mechanisms
from longseq.contract.promise import Promise, promise, require, require_close

N, K, D, H = 23, 5, 12, 3  # k does not divide n: windows are 5 wide, and the last one holds 3 tokens
GRID = TokenGrid((1, N))


def built(projection: Projection, heads: int | None = None, grid: TokenGrid = GRID) -> Any:
    torch.manual_seed(0)
    return projection.build(grid, K, D, heads).double()


def tokens(n: int = N) -> Tensor:
    return torch.randn(2, n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@promise("k tokens at most come out", "return (b, k, d), with fewer windows only where `filled` is not needed for them")
def k_tokens_come_out(projection: Projection) -> None:
    X = tokens()
    for heads in (None, H):
        short = built(projection, heads).given(X, None)(X)
        is_right = short.ndim == 3 and (len(short), short.shape[2]) == (2, D) and 1 <= short.shape[1] <= K
        require(is_right, f"2 x {N} tokens of {D} channels, k = {K}, give {tuple(short.shape)}")


@promise("`commutes` says whether it commutes with a linear map of the features", "set `commutes` of the layer")
def it_says_whether_it_commutes(projection: Projection) -> None:
    X, W = tokens(), torch.randn(D, D, dtype=torch.float64)
    for heads in (None, H):
        layer = built(projection, heads)
        for weight in layer.parameters():
            nn.init.normal_(weight)  # otherwise the heads' matrices may all start as the same means, and commute
        layer = layer.given(X, None)
        agree = torch.allclose(layer(X @ W), layer(X) @ W, atol=1e-9)
        require(agree == layer.commutes, f"commutes is {layer.commutes}, with {heads or 'no'} heads of its own")


@promise("padding counts for nothing", "zero the absent tokens, divide by those that are there, and write `filled`")
def padding_counts_for_nothing(projection: Projection) -> None:
    X, length = tokens(), 12
    present = (torch.arange(N)[None, :, None] < length).expand(2, N, 1)
    for heads in (None, H):
        layer = built(projection, heads)
        alone = layer.given(X[:, :length], present[:, :length])(X[:, :length], present[:, :length])
        padded = layer.given(X, present)(X, present)
        filled = layer.filled(present)
        if filled is not None:
            require(not padded[~filled[..., 0]].any(), "a token that `filled` names empty is not zero")
            padded = padded[:, filled[0, :, 0]]
        require_close(padded, alone, f"{length} tokens before padding and alone", 1e-12)


@promise("carried to its own size it gives the same logits", "override carry of the layer, and copy its weights")
def carried_to_its_own_size_it_is_the_same(projection: Projection) -> None:
    for sharing in ("none", "key_value", "layerwise"):
        trained, other = (of_mechanisms.model(Linformer(7, sharing, projection)).eval() for _ in range(2))
        for weight in trained.parameters():
            nn.init.normal_(weight, std=0.1)
        fresh, images = carry(trained, other), of_mechanisms.images()
        require(not fresh, f"with sharing {sharing} these get new weights: {fresh}")
        require(torch.equal(other(images), trained(images)), f"with sharing {sharing} the logits differ")


def _in_linformer(of_mechanism: Promise) -> Promise:
    """The promise of a mechanism, tested on Linformer with a projection."""
    return promise(f"in Linformer, {of_mechanism.says}", of_mechanism.remedy)(
        lambda projection: of_mechanism.test(Linformer(7, projection=projection))
    )


OWN = (k_tokens_come_out, it_says_whether_it_commutes, padding_counts_for_nothing,
       carried_to_its_own_size_it_is_the_same)  # fmt: skip
PROMISES = (*OWN, *map(_in_linformer, of_mechanisms.PROMISES))
