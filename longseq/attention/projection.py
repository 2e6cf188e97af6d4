"""Projections shorten a sequence from n to k tokens before it becomes keys and values (Linformer, section 4)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError, require_choice, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.mixer import blank
from longseq.attention.shard import Split, summed

Start = Literal["random", "mean", "singular"]
_DAMPING = 0.1  # from 8 x 8 to 32 x 32 digits a separable E loses 0.6 points with it, 1.0 without (docs/resize.md)


@runtime_checkable
class Shortening(Protocol):
    """A projection as an attention layer uses it, once the tokens of the sequence are known."""

    commutes: bool

    def __call__(self, tokens: Tensor, present: Bool[Tensor, "b n 1"] | None = None) -> Tensor: ...

    def filled(self, present: Bool[Tensor, "b n 1"]) -> Bool[Tensor, "b k 1"] | None: ...


class ProjectionLayer(Split, ABC):
    """Shortens tokens: (b, n, d) -> (b, k, d).

    Attributes:
        commutes: Whether shortening commutes with a linear map of the features, E (X W) = (E X) W. If so, keys and
            values are computed from the k shortened tokens; otherwise they are computed from n tokens, then shortened.
        can_be_sharded: Whether it can shorten tokens that lie on several processes, once its ``shard`` is set.
    """

    commutes: bool
    can_be_sharded: ClassVar[bool] = False

    @abstractmethod
    def forward(self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None) -> Tensor:
        """Shorten to (b, k, d), as if padding did not exist.

        Args:
            tokens: A sequence. If it is shorter than the configured n, the first columns or windows are used.
            present: False where a token is padding, which comes after all other tokens; None without padding.

        Raises:
            ValueError: If the projection takes only the n tokens that it was built for, and got another number.
        """

    def given(self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None) -> Shortening:
        """The projection of a sequence x: this one, unless E depends on the tokens."""
        return self

    def filled(self, present: Bool[Tensor, "b n 1"]) -> Bool[Tensor, "b k 1"] | None:
        """Which of the k shortened tokens contain any token; None if each of them sums over all tokens."""
        return None

    @torch.no_grad()
    def carry(self, trained: Any, old: TokenGrid, new: TokenGrid) -> None:
        """Take over the weights of a trained projection of the same k, resampled from the old grid to the new one."""


class Projection(ABC):
    """A description of a projection, as in a configuration; it builds the layers once n, k and heads are known."""

    takes_lengths_of_heads: ClassVar[bool] = True  # whether each head may have a k of its own
    any_length: ClassVar[bool] = False  # whether its layers also take sequences longer than the grid

    @classmethod
    def examples(cls) -> "Sequence[Projection]":
        """Examples of every form of the projection; all tests of projections use them."""
        return [cls()]

    @abstractmethod
    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> ProjectionLayer:
        """Build one projection.

        Args:
            grid: The n tokens that it shortens.
            k: Tokens out, 1 <= k <= n.
            dim: Width of a token.
            heads: The number of heads, if each has its own projection; None if all heads share one.
        """

    def pair(
        self, tied: bool, grid: TokenGrid, k: int, dim: int, heads: int | None = None
    ) -> tuple[ProjectionLayer, ProjectionLayer]:
        """Build E, for the keys, and F, for the values: the same object if they are tied."""
        keys = self.build(grid, k, dim, heads)
        return keys, keys if tied else self.build(grid, k, dim, heads)


class LinearProjection(ProjectionLayer):
    """Shorten a sequence with a matrix, E X: Linformer (arXiv:2006.04768), equation 7.

    Args:
        weight: E, (k, n), or (h, k, n) with one matrix for the channels of each head: learned if it is a Parameter,
            fixed if it is a Buffer.
    """

    can_be_sharded = True

    def __init__(self, weight: nn.Parameter | nn.Buffer) -> None:
        super().__init__()
        self.weight = weight
        self.commutes = weight.ndim == 2  # matrices of heads differ by channel

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        refuse_other_lengths(tokens, self.weight.shape[-1], present)
        E = self.weight[..., : tokens.shape[1]]  # a shorter sequence has the first tokens, as its mask says
        shorten = short_product if E.ndim == 2 else shorten_by_head
        return summed(shorten(E, blank(tokens, present)), self.shard)

    @torch.no_grad()
    def carry(self, trained: "LinearProjection", old: TokenGrid, new: TokenGrid) -> None:
        self.weight.copy_(resample_columns(trained.weight, old, new))


class RaggedProjection(nn.ModuleList):
    """One projection per head, each to a length of its own: (b, n, d) -> a list of (b, k of the head, c)."""

    commutes = False

    def given(self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None) -> "RaggedProjection":
        return self

    def forward(self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None) -> list[Tensor]:
        heads = tokens.chunk(len(self), dim=-1)
        return [project(head, present) for project, head in zip(self, heads, strict=True)]


@dataclass(frozen=True)
class Linear(Projection):
    """Learned matrices E and F, as in the paper's main experiments (Linformer, equation 7).

    Args:
        start: The initial weights. ``random``: N(0, 1/n). ``mean``: means over windows that tile the token grid, which
            suit the keys of a pretrained model. ``singular``: the k leading left singular vectors, over tokens, of the
            layer's inputs. A training sets these with its first batch, by ``start_from_inputs``.
    """

    start: Start = "random"

    def __post_init__(self) -> None:
        require_choice("start", self.start, Start)

    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> ProjectionLayer:
        if self.start == "mean":
            weight = grid.window_means(k).repeat(heads or 1, 1, 1)
        else:  # fan-in preserves the keys' variance; a variance of 1/k would multiply it by n/k
            weight = torch.randn(heads or 1, k, grid.num_tokens) * grid.num_tokens**-0.5
        return _linear(weight, heads, nn.Parameter)


@dataclass(frozen=True)
class Gaussian(Projection):
    """The fixed matrices of the theorems: E = delta R and F = exp(-delta) R, R of N(0, 1/k) (Linformer, theorem 2).

    It is meant for testing the theorems, not for training. Keys and values of a layer always share R; with
    ``layerwise`` sharing all layers share it.

    Args:
        delta: In the theorems it may be as small as 2^-n; then all scores vanish and the softmax is uniform.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        require_positive("1.0 leaves R as it is", delta=self.delta)

    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> ProjectionLayer:
        return self.pair(False, grid, k, dim, heads)[0]

    def pair(
        self, tied: bool, grid: TokenGrid, k: int, dim: int, heads: int | None = None
    ) -> tuple[ProjectionLayer, ProjectionLayer]:
        R = torch.randn(heads or 1, k, grid.num_tokens) * k**-0.5
        return _linear(self.delta * R, heads, nn.Buffer), _linear(math.exp(-self.delta) * R, heads, nn.Buffer)


def carry_projections(ours: nn.Module | None, trained: nn.Module | None, old: TokenGrid, new: TokenGrid) -> list[str]:
    """Take over the weights of a trained projection, or of one per head, resampled to the new grid.

    Returns:
        The names, within ``ours``, of projections that keep their initial weights, because the trained layer has none
        of the same class and k.
    """
    theirs = {} if trained is None else dict(trained.named_modules())
    fresh = []
    for name, layer in () if ours is None else ours.named_modules():
        if isinstance(layer, ProjectionLayer):
            source = theirs.get(name)
            if type(source) is type(layer) and _shapes_but_last(source) == _shapes_but_last(layer):
                layer.carry(source, old, new)
            else:
                fresh.append(name)
    return fresh


def _shapes_but_last(layer: Any) -> list[tuple[int, ...]]:
    """The shapes of all weights, without the last dimension, which depends on the grid."""
    return [tuple(weight.shape[:-1]) for weight in layer.state_dict().values()]


def refuse_other_lengths(tokens: Tensor, n: int, present: Tensor | None) -> None:
    """Check that there are the n tokens that E was built for, or fewer if a mask says that the sequence is shorter.

    Raises:
        ValueError: Otherwise: columns of E would be multiplied with tokens of other places.
    """
    m = tokens.shape[1]
    if m > n or (m < n and present is None):
        remedy = "turn patch dropout off, or give a shorter sequence a padding mask"
        what = f"must be the {n} that E was built for, got {m}; carry the model to another size with longseq.resize"
        raise ArgumentError("tokens", f"{what}, {remedy}")


def resample_columns(weight: Float[Tensor, "*h k n"], old: TokenGrid, new: TokenGrid) -> Float[Tensor, "*h k m"]:
    """Resample E from one grid of tokens to another so that an input gives nearly the same result: E' (B X) ~ E X.

    B interpolates tokens along rows and columns by cubics (smoothed if the grid shrinks), just as position embeddings
    are interpolated. E' = E G, where G is a damped pseudo-inverse of B; FlexiViT (arXiv:2212.08013, section 3.4)
    resizes patches in this way without damping. Interpolating E itself would blur it, because learned columns are
    rough. Without damping E' would be rougher than E, and would amplify the difference between the new tokens and B X.
    Each row keeps its sum. Columns of prefix tokens are copied.
    """
    if new == old:
        return weight
    if new.num_prefix_tokens != old.num_prefix_tokens:
        raise ValueError(f"prefix tokens must stay {old.num_prefix_tokens}, got {new.num_prefix_tokens}; keep the pool")
    prefix, columns = weight.split([old.num_prefix_tokens, math.prod(old.size)], dim=-1)
    by_row, by_column = (_unsample(*lengths).to(weight) for lengths in zip(old.size, new.size, strict=True))
    resampled = torch.einsum("...yx,yY,xX->...YX", columns.unflatten(-1, old.size), by_row, by_column).flatten(-2)
    return torch.cat([prefix, resampled], dim=-1)


def _unsample(old: int, new: int) -> Float[Tensor, "old new"]:
    """G = (B^T B + s 1)^-1 B^T, where B is the cubic interpolation from old points to new ones, and s a tenth of the
    mean of the diagonal of B^T B. Then each row is divided by its sum, so that G 1 = 1."""
    points = torch.eye(old, dtype=torch.float64)
    if new == old:
        return points
    sample = F.interpolate(points[None, :, None], (1, new), mode="bicubic", antialias=True)[0, :, 0].T
    gram = sample.T @ sample
    inverse = torch.linalg.solve(gram + _DAMPING * gram.diagonal().mean() * points, sample.T)
    return inverse / inverse.sum(1, keepdim=True)


def _linear(weight: Float[Tensor, "h k n"], heads: int | None, kind: type) -> ProjectionLayer:
    return LinearProjection(kind(weight[0].clone() if heads is None else weight))


def short_product(E: Float[Tensor, "k n"], tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b k d"]:
    """E X for each sample. With several samples ``E @ tokens`` would first copy all tokens, transposed."""
    # an exported program multiplies one matrix by many, and would hold E once for each sample
    if torch.compiler.is_exporting():
        return E @ tokens
    if len(tokens) == 1:  # E @ tokens would multiply the transposes, and so do its gradients
        return torch.mm(E.to(tokens.dtype), tokens.squeeze(0))[None]
    return torch.bmm(E.to(tokens.dtype).expand(len(tokens), -1, -1), tokens)


def shorten_by_head(matrix: Float[Tensor, "*_ h k n"], tokens: Float[Tensor, "_ n d"]) -> Float[Tensor, "_ k d"]:
    """The channels of each head times the head's own matrix. If all samples have the same matrices, it is one product
    for each head: E is not copied for each sample, nor is its gradient summed over samples."""
    by_head = tokens.unflatten(-1, (matrix.shape[-3], -1)).transpose(1, 2)
    if matrix.ndim == 4:
        return (matrix @ by_head).transpose(1, 2).flatten(2)
    h, k, _ = matrix.shape
    short = matrix @ by_head.permute(1, 2, 0, 3).flatten(2)  # (h, k, b c)
    return short.view(h, k, len(tokens), -1).permute(2, 1, 0, 3).flatten(2)
