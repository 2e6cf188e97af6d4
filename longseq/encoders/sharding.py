"""Give each process of a group some rows of the token grid, and the columns of E for their tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from longseq.arguments import require
from longseq.attention.mixer import TokenMixer
from longseq.attention.projection import LinearProjection
from longseq.attention.shard import Shard, Split
from longseq.compat.torch import is_compiled, is_hooked
from longseq.encoders.encoder import Encoder
from longseq.encoders.gated_pooling import GatedPooling
from longseq.encoders.patches import is_product


class Sharding:
    """An encoder whose tokens are distributed over the processes of a group.

    Each process gets whole inputs, and computes the tokens of its rows. Features and gradients are those of a single
    process. Of E, (k, n), a process has the columns of its own tokens, with their gradients and optimizer moments; it
    has copies of all other weights.

    Args:
        encoder: Changed in place; its weights are complete, and the same in all processes.
        group: The processes.

    Raises:
        ValueError: If a part of the encoder combines tokens in another way than by sums.
    """

    def __init__(self, encoder: Encoder, group: Any) -> None:
        refuse_unsharded(encoder)
        trunk: Any = encoder.trunk
        self.shard = Shard(group, trunk.num_prefix_tokens)
        self._layers = [layer for layer in trunk.modules() if isinstance(layer, LinearProjection)]
        self._height, self._width = trunk.patch_embed.grid_size
        trunk.shard = self.shard
        for layer in trunk.modules():
            if isinstance(layer, Split):
                layer.shard = self.shard
        begin, end = self._columns(self.shard.rank)
        for layer in self._layers:
            own = layer.weight[..., begin:end].detach().clone()
            learns = layer.weight.requires_grad
            layer.weight = nn.Parameter(own, learns) if isinstance(layer.weight, nn.Parameter) else nn.Buffer(own)

    @property
    def weights(self) -> list[Tensor]:
        """The weights of which this process has some columns."""
        return [layer.weight for layer in self._layers]

    def names(self, module: nn.Module) -> Iterator[str]:
        """The names of these weights in a module that contains the encoder; a shared weight has several names."""
        for name, layer in module.named_modules(remove_duplicate=False):
            if any(layer is ours for ours in self._layers):
                yield f"{name}.weight"

    def whole(self, own: Tensor) -> Tensor:
        """All columns of a weight, or of a tensor of its shape, gathered from all processes."""
        spans = [self._columns(rank) for rank in range(self.shard.size)]
        widest = max(end - begin for begin, end in spans)
        padded = own.new_zeros(*own.shape[:-1], widest)
        padded[..., : own.shape[-1]] = own
        parts = [torch.empty_like(padded) for _ in spans]
        dist.all_gather(parts, padded, group=self.shard.group)
        return torch.cat([part[..., : end - begin] for part, (begin, end) in zip(parts, spans, strict=True)], dim=-1)

    def own(self, whole: Tensor) -> Tensor:
        """The columns of this process."""
        begin, end = self._columns(self.shard.rank)
        return whole[..., begin:end].clone()

    def whole_state(self, module: nn.Module) -> dict[str, Any]:
        """The state dict of a module as a single process would have it."""
        state = module.state_dict()
        return state | {name: self.whole(state[name]) for name in self.names(module)}

    def own_state(self, module: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
        """This process's part of such a state dict."""
        return {**whole, **{name: self.own(whole[name]) for name in self.names(module)}}

    def whole_moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer as a single process would have it."""
        return self._moments(optimizer, optimizer.state_dict(), self.whole)

    def own_moments(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
        """This process's part of such a state."""
        return self._moments(optimizer, whole, self.own)

    def _moments(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], change: Any) -> dict[str, Any]:
        """The state, after a change of all moments that have a dimension of tokens."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        ours = {number for number, weight in enumerate(weights) if any(weight is own for own in self.weights)}
        changed = {
            number: {name: change(value) if _is_moment(value) else value for name, value in of_weight.items()}
            if number in ours
            else of_weight
            for number, of_weight in state["state"].items()
        }
        return {**state, "state": changed}

    def _columns(self, rank: int) -> tuple[int, int]:
        """The range of columns of E that a process has, end excluded; the first process has those of prefix tokens."""
        size, prefix = self.shard.size, self.shard.num_prefix_tokens
        begin, end = (place * self._height // size * self._width + prefix for place in (rank, rank + 1))
        return (begin if rank else 0), end


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1


def refuse_unsharded(encoder: Encoder) -> None:
    """Check that every part of an encoder combines tokens by sums only, and draws no random numbers per token.

    Raises:
        ValueError: If one does not.
    """
    trunk: Any = encoder.trunk
    where = "to be shared by several processes"
    layers = [block.attn for block in trunk.blocks]
    remedy = "Linformer and Verma do (exact attention needs torch.distributed.tensor.experimental.context_parallel)"
    what = f"must meet all tokens in a sum {where}, got {encoder.attention}; {remedy}"
    require(all(isinstance(layer, TokenMixer) and layer.can_be_sharded for layer in layers), "attention", what)
    is_turned = type(trunk) is not VisionTransformer or any(getattr(layer, "rotary", None) for layer in layers)
    require(not is_turned, "encoder", f"must have no rotary positions {where}; choose another")
    is_pooled = trunk.global_pool in ("avg", "token") and isinstance(trunk.attn_pool, GatedPooling | None)
    pool = getattr(encoder, "pool", trunk.global_pool)
    require(is_pooled, "pool", f"must be avg, gated or token {where}, got {pool}; choose one")
    what = f"must have no stem, and patches that do not overlap, {where}; choose another"
    require(is_product(trunk.patch_embed), "encoder", what)
    require(not encoder.reversible, "reversible", f"must be false {where}; leave it out")
    is_plain = not (is_hooked(trunk) or is_compiled(encoder))
    require(is_plain, "encoder", f"must be neither hooked nor compiled {where}; leave that out")
    # drop_path draws the same numbers in each process, one per sample
    drops = any(part.p > 0 for part in trunk.modules() if isinstance(part, nn.Dropout))
    require(not drops, "dropout", f"must be 0 {where}, each of which would draw its own; drop_path may stay")
