"""Windows by flex_attention are those by products of blocks: values, and differences, for a CPU has no gradients."""

from typing import Any

import jaxtyping
import pytest
import torch
from small_vit import vit
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from longseq.attention import Longformer, SparseTransformer, TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.others import flex, pattern
from longseq.attention.others.flex import attend_in_window
from longseq.attention.others.pattern import Blocks, PatternFormula


@pytest.fixture(autouse=True)
def unchecked_types(shapes_are_checked_where_parts_are_tested: None) -> None:
    """torch traces the function that says which keys are seen, and cannot trace the check of its types."""
    jaxtyping.config.update("jaxtyping_disable", True)


N, WINDOW, PREFIX = 300, 20, 3  # blocks of 128 tokens, some without a pair


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    lengths = (250, PREFIX + N, PREFIX + N)  # fewer queries than keys
    return [torch.randn(2, 2, length, 16, dtype=torch.float64) for length in lengths]


def present() -> Tensor:
    return (torch.arange(PREFIX + N) < torch.tensor([[PREFIX + N], [200]]))[:, None, None]


@pytest.mark.parametrize("mask", [None, present()], ids=["whole", "padded"])
def test_values_and_their_changes_are_those_of_blocks(mask: Tensor | None) -> None:
    formula = PatternFormula(PREFIX, Blocks.of_windows(1, WINDOW, WINDOW), is_banded=True)
    of_queries = 1 if mask is None else mask[:, :, 0, PREFIX : PREFIX + 250, None]  # others see no key or padding
    parts = [part.requires_grad_() for part in inputs()]
    expected = formula.by_blocks(Heads(*parts, key_mask=mask)) * of_queries

    def by_flex(*parts: Tensor) -> Tensor:
        heads = Heads(*(part.detach() for part in parts), key_mask=mask)
        return attend_in_window(heads, WINDOW, PREFIX, flex_attention) * of_queries

    torch.testing.assert_close(by_flex(*parts), expected, rtol=1e-12, atol=1e-12)
    cotangent, step = torch.randn_like(expected), 1e-6
    for place, gradient in enumerate(torch.autograd.grad(expected, parts, cotangent)):
        along = torch.randn_like(gradient)
        ends = [[*parts[:place], parts[place] + sign * step * along, *parts[place + 1 :]] for sign in (1, -1)]
        change = (by_flex(*ends[0]) - by_flex(*ends[1])) / (2 * step)
        torch.testing.assert_close((change * cotangent).sum(), (gradient * along).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mechanism", "window"),
    [(Longformer(8), 4), (SparseTransformer(stride=6, factors="interleaved"), 6), (Longformer(8, grid=True), None),
     (SparseTransformer(), None), (SparseTransformer("fixed", factors="interleaved"), None)],
    ids=repr,
)  # fmt: skip
def test_layers_of_windows_take_it_and_give_the_same(
    mechanism: Longformer | SparseTransformer, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = mechanism.layers([block.attn for block in vit(depth=1, heads=2).blocks], TokenGrid((8, 8), 1))[0]
    layer, x = layer.double().eval().requires_grad_(False), torch.randn(2, 65, 32, dtype=torch.float64)
    present = (torch.arange(65) < torch.tensor([[65], [40]]))[:, None, None]
    expected, taken = layer(x, present), []

    def watched(*arguments: Any, **options: Any) -> Tensor:
        taken.append(arguments)
        return flex_attention(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pattern, "suits_flex", lambda queries, dropout: True)
    monkeypatch.setattr(flex, "_compiled", lambda: watched)
    there = present[:, 0, 0, :, None]
    torch.testing.assert_close(layer(x, present) * there, expected * there, rtol=1e-12, atol=1e-12)
    assert layer.formula.window == window and len(taken) == (window is not None)


def test_it_is_for_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = torch.zeros(1, 1, 8192, 16)
    assert not flex.suits_flex(queries, 0.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(flex, "_is_there", lambda: True)
    assert flex.suits_flex(queries, 0.0) and not flex.suits_flex(queries, 0.1)
    for other in (queries[:, :, :8191], queries[..., :12], queries[..., :8], queries.double()):
        assert not flex.suits_flex(other, 0.0)
