"""Counted FLOPs match sums worked out on paper."""

import copy
from typing import Any

import pytest
import torch

from longseq.attention import Conv, Linformer, Mechanism, Softmax, Verma
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample, peak_flops


def classifier(mechanism: Mechanism, width: int = 8, **change: float) -> Classifier:
    torch.manual_seed(0)
    return Classifier(ImageEncoder((1, 8, width), mechanism, dim=32, depth=2, heads=4, **change), 10)


def on_paper(n: int, mixing: int, channels: int = 1, d: int = 32, depth: int = 2, num_classes: int = 10) -> int:
    """Embedding, blocks, head. A block: queries, the products of the mechanism, output, an MLP of width 4 d."""
    block = 2 * n * d * d + mixing + 2 * n * d * d + 2 * (2 * n * d * 4 * d)
    return 2 * n * channels * d + depth * block + 2 * d * num_classes


def softmax_mixing(n: int, d: int = 32) -> int:
    return 2 * n * d * 2 * d + 2 * n * n * d + 2 * n * n * d  # keys and values; Q K'; the product of Q K' with V


def linformer_mixing(n: int, k: int, d: int = 32) -> int:
    return (
        2 * k * n * d + 2 * k * d * 2 * d + 2 * n * k * d + 2 * n * k * d + 2 * k * n
    )  # E X; then as in softmax_mixing, with k keys; E 1


def test_softmax_costs_what_one_counts_on_paper() -> None:
    assert flops_per_sample(classifier(Softmax())).forward == on_paper(64, softmax_mixing(64))


@pytest.mark.parametrize("sharing", ["key_value", "layerwise"])
def test_linformer_costs_what_one_counts_on_paper(sharing: str) -> None:
    assert flops_per_sample(classifier(Linformer(16, sharing))).forward == on_paper(64, linformer_mixing(64, 16))


def test_verma_without_projections_costs_what_one_counts_on_paper() -> None:
    # keys; L X; for 4 heads of 8 channels: (L X) W_v, and its product with W_o.
    # H times the last product is the output, which on_paper counts.
    mixing = 2 * 64 * 32 * 32 + 2 * 64 * 32 * 32 + 2 * 32 * 32 * 8 + 2 * 32 * 8 * 32
    assert flops_per_sample(classifier(Verma())).forward == on_paper(64, mixing)


@pytest.mark.parametrize("mechanism", [Softmax(), Linformer(16), Verma(16)])
def test_training_costs_three_forwards_but_for_gradients_that_nobody_needs(mechanism: Mechanism) -> None:
    forward, training = flops_per_sample(classifier(mechanism))
    spared = 2 * 64 * 32  # the gradient of the picture
    if not isinstance(mechanism, Softmax):
        spared += 2 * (2 * 16 * 64)  # the gradient of the ones in E 1, in both layers
    assert training == 3 * forward - spared


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value", "layerwise"])
@pytest.mark.parametrize("full", [False, True])
def test_convolutions_cost_what_one_counts_on_paper_in_training_too(sharing: Any, full: bool) -> None:
    """Keys and values are computed first and then shortened, with two kernels or with one that both share."""
    n, k, d, h = 64, 16, 32, 4
    channels_in = (d // h if sharing == "none" else d) if full else 1  # input channels of one output channel
    shortening = 2 * k * (n // k) * d * channels_in  # counted once for keys, once for values
    mixing = 2 * n * d * 2 * d + 2 * shortening + 2 * n * k * d + 2 * n * k * d
    forward, training = flops_per_sample(classifier(Linformer(k, sharing, projection=Conv(full))))
    assert forward == on_paper(n, mixing)
    assert training == 3 * forward - 2 * n * d  # the gradient of the picture is not computed


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_patches_cost_what_one_counts_on_paper(pool: str) -> None:
    patches, prefix, d = 16, int(pool == "token"), 32
    model = Classifier(ImageEncoder((3, 8, 8), Softmax(), patch_size=2, dim=d, depth=1, heads=4, pool=pool), 10)
    embedding, n = 2 * patches * 3 * 2 * 2 * d, patches + prefix
    counted = flops_per_sample(model)
    if pool == "avg":
        assert counted.forward == on_paper(n, softmax_mixing(n), depth=1) - 2 * n * d + embedding
    assert counted.training == 3 * counted.forward - embedding


@pytest.mark.parametrize(("mechanism", "linear"), [(Linformer(16), True), (Verma(16), True), (Softmax(), False)])
def test_linear_attention_adds_the_same_cost_for_every_further_token(mechanism: Mechanism, linear: bool) -> None:
    costs = [flops_per_sample(classifier(mechanism, width)).forward for width in (8, 16, 24)]
    assert (costs[2] - costs[1] == costs[1] - costs[0]) is linear


def test_the_count_is_the_same_under_checkpointing_in_eval_mode_and_without_gradients() -> None:
    model = classifier(Linformer(16), dropout=0.1, drop_path=0.1)
    expected = flops_per_sample(model)
    model.encoder.trunk.set_grad_checkpointing(True)
    assert flops_per_sample(model) == expected
    assert flops_per_sample(model.eval()) == expected
    with torch.no_grad():
        assert flops_per_sample(model) == expected
    with torch.inference_mode():
        assert flops_per_sample(model) == expected
    assert flops_per_sample(model.bfloat16()) == expected


def test_counting_leaves_the_model_as_it_was() -> None:
    model = classifier(Softmax())
    model.encoder.trunk.set_grad_checkpointing(True)
    before = copy.deepcopy(model.state_dict())
    flops_per_sample(model)
    assert model.encoder.trunk.grad_checkpointing
    assert model.training and all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_spectrogram_is_left_out() -> None:
    encoder = SpectrogramEncoder(8000, 0.5, Softmax(), num_mels=20, dim=32, depth=2, heads=4)
    n = encoder.num_tokens
    assert flops_per_sample(Classifier(encoder, 10)).forward == on_paper(n, softmax_mixing(n), channels=20)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16-mixed", 989e12),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-true", 312e12),
        ("NVIDIA H200", "32-true", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16-mixed", None),  # a seventh of the device
        ("NVIDIA H20", "bf16-mixed", None),
        ("cpu", "bf16-mixed", None),
    ],
)
def test_a_peak_is_claimed_only_where_it_is_known(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision) == expected
