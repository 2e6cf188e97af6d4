"""k as one number, one number per layer, or one number per head."""

import pytest
import torch
from small_vit import vit
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import Linear, Linformer, Max, Verma, plug

KINDS = [Linformer, Verma]


def plugged(mechanism, **options):
    return plug(vit(depth=2, heads=4, class_token=False, global_pool="avg", **options), mechanism)


def flops(mechanism):
    with torch.device("meta"):
        model = plugged(mechanism)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 1, 8, 8))
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_a_k_of_each_layer_sizes_the_layers_projection(kind):
    model = plugged(kind(k=[5, 9]))
    assert [block.attn.project_keys.weight.shape for block in model.blocks] == [(5, 64), (9, 64)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_k_of_each_head_sizes_the_heads_projections(kind):
    model = plugged(kind(k=[[3, 4, 5, 6], [7, 7, 7, 7]], sharing="none"))
    assert [p.weight.shape[0] for p in model.blocks[0].attn.project_values] == [3, 4, 5, 6]
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("projection", [Linear(), Max()])
def test_the_count_of_flops_falls_with_each_k(kind, projection):
    full = flops(kind(32, "none", projection))
    by_layer = flops(kind([32, 8], "none", projection))
    by_head = flops(kind([[32, 32, 8, 8], [8, 8, 8, 8]], "none", projection))
    assert by_head < by_layer < full


@pytest.mark.parametrize("kind", KINDS)
def test_equal_ks_of_the_heads_cost_what_one_k_costs(kind):
    assert flops(kind(k=[[8] * 4] * 2, sharing="none")) == flops(kind(k=8, sharing="none"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("k", "sharing", "message"),
    [
        ([[3] * 4] * 2, "headwise", "sharing must be none for a k of each head, got 'headwise'"),
        ([[3] * 4] * 2, "layerwise", "sharing must be none for a k of each head"),
        ([5, 9], "layerwise", r"sharing must not be layerwise for a k of each layer, got k = \[5, 9\]"),
        ([5, 9, 9], "none", "one for each of the 2 layers, got 3"),
        ([[3, 4]] * 2, "none", r"one number for each of the 4 heads, got \[3, 4\]"),
        ([5, 65], "none", r"k must be in 1\.\.64 .*got 65"),
        ([[3, 3, 3, 0]] * 2, "none", r"k must be in 1\.\.64 .*got 0"),
    ],
)
def test_what_cannot_be_is_refused_naming_sharing_and_k(kind, k, sharing, message):
    with pytest.raises(ValueError, match=message):
        plugged(kind(k=k, sharing=sharing))


def test_one_k_a_layer_may_be_layerwise_if_all_are_the_same():
    model = plugged(Linformer([6, 6], "layerwise"))
    assert model.blocks[0].attn.project_keys is model.blocks[1].attn.project_values


def test_verma_multiplies_so_that_k_leaves_the_product_with_the_queries():
    """One more summary token costs E and L X, 2 (2 n d + ...) for E, but never the n c per head of H L."""
    n, d, heads = 64, 32, 4
    c = d // heads
    a_summary = (flops(Verma(33)) - flops(Verma(32))) / 2  # per layer
    expected = 2 * (n * d + n + 2 * d * d + heads * c * c)  # E X, E 1, keys and values, L X
    assert a_summary == expected
    assert (flops(Linformer(33)) - flops(Linformer(32))) / 2 == 2 * (n * d + n + 2 * d * d + 2 * n * d)
