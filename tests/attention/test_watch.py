"""Where the values of a result come from: against the products written out."""

import pytest
import torch
from small_vit import ATTENTION
from timm.layers.attention import Attention

from longseq.attention import Conv, Linear, Linformer, Max, Mean, Mechanism, Projection, Softmax, Verma
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer
from longseq.attention.sources import sources, summary_rows
from longseq.attention.verma import VermaLayer

HEADS, CHANNELS, GRID = 4, 4, TokenGrid((8, 3))


def layers_of(mechanism: Mechanism) -> list[AttentionLayer]:
    torch.manual_seed(0)
    stack = [Attention(HEADS * CHANNELS, HEADS, qkv_bias=True).double() for _ in range(2)]
    return [layer.double().eval() for layer in mechanism.layers(stack, GRID)]


def heads_of(layer: AttentionLayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys, _ = layer.qkv(x)[0].unflatten(-1, (3, HEADS, CHANNELS)).permute(1, 2, 0, 3)
    return queries, keys


@pytest.mark.parametrize(
    "mechanism", [Softmax(), Linformer(7), Linformer(7, sharing="none"), Verma(), Verma(7)], ids=repr
)
def test_the_sources_are_those_of_the_products_written_out(mechanism: Mechanism) -> None:
    layer = layers_of(mechanism)[0]
    x, weights = torch.randn(1, 24, HEADS * CHANNELS).double(), torch.rand(24).double()
    queries, keys = heads_of(layer, x)
    scale = CHANNELS**-0.5
    E = F = torch.eye(24).double().expand(HEADS, -1, -1)
    if layer.project_keys is not None:
        E, F = (project.weight.expand(HEADS, -1, -1) for project in (layer.project_keys, layer.project_values))
    if isinstance(mechanism, Verma):
        P = (queries * scale).softmax(-1) @ ((E @ keys).mT * scale).softmax(-1)
    else:
        P = (queries @ (E @ keys).mT * scale).softmax(-1)
    torch.testing.assert_close(sources(layer, x, None, weights), (weights @ (P @ F)).mean(0), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("projection", [Linear(), Mean(), Max(), Conv(), Conv(full=True)], ids=repr)
def test_the_sources_and_rows_are_the_mean_over_the_channels_of_any_projection(projection: Projection) -> None:
    layer = layers_of(Linformer(7, projection=projection))[0]
    x, weights = torch.randn(1, 24, HEADS * CHANNELS).double(), torch.rand(24).double()
    queries, keys, values = layer.qkv(x).detach().split(HEADS * CHANNELS, -1)
    values.requires_grad_()
    keys.requires_grad_()
    short_keys, short_values = layer.project_keys(keys), layer.project_values(values)
    by_head = (part[0].unflatten(-1, (HEADS, CHANNELS)).transpose(0, 1) for part in (queries, short_keys, short_values))
    Q, K, V = by_head
    result = ((Q @ K.mT.detach() * CHANNELS**-0.5).softmax(-1) @ V).mean((0, 2))
    expected = torch.autograd.grad((result * weights).sum(), values, retain_graph=True)[0][0].sum(-1)
    torch.testing.assert_close(sources(layer, x, None, weights), expected, atol=1e-10, rtol=1e-10)
    row = torch.autograd.grad(K[0, 3].mean(), keys)[0][0].sum(-1)
    torch.testing.assert_close(summary_rows(layer, x, None, most=7)[3], row, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mechanism", ATTENTION, ids=repr)
def test_padding_is_no_source_and_gets_no_row(mechanism: Mechanism) -> None:
    layer = layers_of(mechanism)[0]
    x = torch.randn(1, 24, HEADS * CHANNELS).double()
    present = (torch.arange(24) < 17)[None, :, None]
    weights = present[0, :, 0].double() / 17
    contributions, rows = sources(layer, x, present, weights), summary_rows(layer, x, present)
    assert contributions.shape == (24,) and contributions[17:].abs().max() == 0 and contributions[:17].abs().max() > 0
    has_summaries = layer.project_keys is not None or isinstance(layer, VermaLayer)
    assert rows.shape[1] == 24 and (len(rows) > 0) == has_summaries
    assert not len(rows) or rows[:, 17:].abs().max() == 0


def test_the_rows_are_those_of_both_matrices() -> None:
    layer = layers_of(Linformer(7))[0]
    x = torch.randn(1, 24, HEADS * CHANNELS).double()
    assert torch.equal(summary_rows(layer, x, None), layer.project_keys.weight)
    torch.testing.assert_close(summary_rows(layer, x, None, most=3), layer.project_keys.weight[[0, 2, 4]])
    layer = layers_of(Verma())[0]
    _, keys = heads_of(layer, x)
    L = (keys.mT * CHANNELS**-0.5).softmax(-1).flatten(0, 1)
    torch.testing.assert_close(summary_rows(layer, x, None, most=16), L)
