"""Print the table of counted costs in docs/attention.md, over the examples of every mechanism: python docs/costs.py."""

import dataclasses
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import Mechanism, plug
from longseq.attention.examples import every_mechanism
from longseq.attention.others.fourier import FFT_FLOPS

SIDE, K, DIM, HEADS = 32, 64, 128, 4


def layer_of(mechanism: Mechanism) -> nn.Module:
    """The layer that a mechanism puts into a vision transformer with a token for each of 32 x 32 pixels."""
    vit = VisionTransformer(
        img_size=SIDE, patch_size=1, in_chans=1, num_classes=0, class_token=False, global_pool="avg", depth=1,
        embed_dim=DIM, num_heads=HEADS,
    )  # fmt: skip
    return plug(vit, mechanism).blocks[0].attn


def table() -> str:
    lines = ["| mechanism | million FLOPs of a layer | learned weights beside qkv and proj |", "|---|--:|--:|"]
    for mechanism in every_mechanism():
        described: Any = mechanism
        k = getattr(mechanism, "k", None)
        if isinstance(k, list):  # one k for each layer: a layer costs what it costs with that k alone
            continue
        if k is not None:
            described = dataclasses.replace(described, k=K)
        torch.manual_seed(0)
        layer = layer_of(described)
        plain = sum(weight.numel() for name, weight in layer.named_parameters() if name.startswith(("qkv.", "proj.")))
        weights = sum(weight.numel() for weight in layer.parameters()) - plain
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=FFT_FLOPS) as counter:
            layer.to("meta")(torch.empty(1, SIDE * SIDE, DIM, device="meta"))
        lines.append(f"| `{shown(described)}` | {counter.get_total_flops() / 1e6:.1f} | {weights:,} |")
    return "\n".join(lines)


def shown(mechanism: Any) -> str:
    """A mechanism with only the arguments that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(mechanism, field.name)!r}"
        for field in dataclasses.fields(mechanism)
        if getattr(mechanism, field.name) != field.default and getattr(mechanism, field.name) is not None
    ]
    return f"{type(mechanism).__name__}({', '.join(changed)})"


if __name__ == "__main__":
    print(table())
