"""No pass copies all tokens: at great length a copy costs as much time and memory as the product that it is for."""

from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longseq import Conv, Dynamic, Linformer, Mean, Separable, Softmax, Verma
from longseq.attention import Mechanism, plug

BATCH, SIDE, DIM = 3, 8, 32


class Copies(TorchDispatchMode):
    """Notes each operation that makes a copy of as many numbers as a batch of tokens has, or of ``numbers``."""

    def __init__(self, numbers: int = BATCH * SIDE**2 * DIM) -> None:
        super().__init__()
        self.numbers = numbers
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        is_copy = any(word in operation.name() for word in ("clone", "copy", "masked_fill"))
        if is_copy and isinstance(result, Tensor) and result.numel() >= self.numbers:
            self.names.append(operation.name())
        return result


@pytest.mark.parametrize(
    "mechanism",
    [
        Linformer(k=8),
        Linformer(k=8, sharing="layerwise"),
        Linformer(k=8, projection=Separable()),
        Linformer(k=8, projection=Dynamic()),
        Linformer(k=8, projection=Conv()),
        Linformer(k=16, projection=Conv(full=True)),
        Verma(k=8),
        Verma(k=None),
        Softmax(),
    ],
    ids=repr,
)
def test_forward_and_backward_pass_copy_no_batch_of_tokens(mechanism: Mechanism) -> None:
    assert copies_of(mechanism) == []


def test_a_mean_without_padding_copies_tokens_in_neither_direction() -> None:
    """The one copy is the gradient of the means itself, spread over their windows."""
    assert copies_of(Linformer(k=8, projection=Mean())) == ["aten::clone"]


def test_matrices_of_heads_are_not_copied_for_each_sample() -> None:
    k = 2 * DIM  # so E of all heads is larger than the tokens of all samples, which are copied
    assert copies_of(Linformer(k=k, sharing="none"), BATCH * 4 * k * SIDE**2) == []


def copies_of(mechanism: Mechanism, *numbers: int) -> list[str]:
    """The copies in a forward and a backward pass of a layer with four heads."""
    vit = VisionTransformer(SIDE, 1, 1, 0, "avg", embed_dim=DIM, depth=1, num_heads=4, class_token=False)
    plug(vit, mechanism)
    layer: Any = vit.blocks[0].attn  # type: ignore[union-attr]
    tokens = torch.randn(BATCH, SIDE**2, DIM, requires_grad=True)
    with Copies(*numbers) as copies:
        outputs = layer(tokens)
        outputs.backward(torch.ones_like(outputs))
    return copies.names
