"""No pass copies all tokens: at great length a copy costs as much time and memory as the product that it is for."""

from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longseq import Dynamic, Linformer, Separable, Softmax, Verma
from longseq.attention import Mechanism, plug

BATCH, SIDE, DIM = 3, 8, 32


class Copies(TorchDispatchMode):
    """Notes each operation that makes a copy of as many numbers as a batch of tokens has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        is_copy = any(word in operation.name() for word in ("clone", "copy"))
        if is_copy and isinstance(result, Tensor) and result.numel() >= BATCH * SIDE**2 * DIM:
            self.names.append(operation.name())
        return result


@pytest.mark.parametrize(
    "mechanism",
    [
        Linformer(k=8),
        Linformer(k=8, sharing="layerwise"),
        Linformer(k=8, projection=Separable()),
        Linformer(k=8, projection=Dynamic()),
        Verma(k=8),
        Verma(k=None),
        Softmax(),
    ],
    ids=repr,
)
def test_forward_and_backward_pass_copy_no_batch_of_tokens(mechanism: Mechanism) -> None:
    vit = VisionTransformer(SIDE, 1, 1, 0, "avg", embed_dim=DIM, depth=1, num_heads=4, class_token=False)
    plug(vit, mechanism)
    layer: Any = vit.blocks[0].attn  # type: ignore[union-attr]
    tokens = torch.randn(BATCH, SIDE**2, DIM, requires_grad=True)
    with Copies() as copies:
        outputs = layer(tokens)
        outputs.backward(torch.ones_like(outputs))
    assert copies.names == []
