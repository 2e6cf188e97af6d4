"""The short cuts through a block equal timm's own forward pass, and keep less for the backward pass."""

import copy
import weakref

import pytest
import torch
from torch import nn

from longseq.attention import Linformer, Softmax, Verma
from longseq.encoders import ImageEncoder
from longseq.encoders._block import run_block
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample

MECHANISMS = pytest.mark.parametrize(
    "mechanism", [Softmax(), Linformer(16), Verma(16), Verma(), Verma(normalize="columns")], ids=repr
)


class Doubled(nn.Module):
    """A wrapper like a low-rank adapter: it has the layer's weight and bias, and computes something more."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias

    def forward(self, x):
        return 2 * self.layer(x)


def encoder(mechanism, **change):
    torch.manual_seed(0)
    model = ImageEncoder((2, 8, 8), mechanism, **{"dim": 32, "depth": 2, "heads": 4} | change)
    model.set_statistics(torch.zeros(1), torch.ones(1))  # the encoder leaves the pictures unchanged
    return model


def pictures(count=3):
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(0))


def gradients(model, forward):
    model.zero_grad()
    forward().square().sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def kept_numbers(forward):
    """How many numbers autograd keeps for the backward pass, each tensor counted once."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(storages.values())


@MECHANISMS
@pytest.mark.parametrize("pool", ["avg", "token"])
@pytest.mark.parametrize("tile", [1 << 20, 100, 1000])
def test_features_and_gradients_are_those_of_timms_forward_pass(mechanism, pool, tile, monkeypatch):
    monkeypatch.setattr("longseq.encoders._block._TILE", tile)
    model = encoder(mechanism, pool=pool).double()
    x = pictures().double()
    torch.testing.assert_close(model(x), model.trunk(x))
    expected = gradients(model, lambda: model.trunk(x))
    result = gradients(model, lambda: model(x))
    for name, gradient in expected.items():
        torch.testing.assert_close(result[name], gradient, msg=name)


@pytest.mark.parametrize("tile", [1 << 20, 200])
def test_in_mixed_precision_it_is_as_near_to_float32_as_timms_forward_pass(tile, monkeypatch):
    monkeypatch.setattr("longseq.encoders._block._TILE", tile)
    model = encoder(Linformer(8), dim=64)
    exact = gradients(model, lambda: model(pictures()))

    def distance(forward):
        with torch.autocast("cpu", torch.bfloat16):
            result = gradients(model, lambda: forward(pictures()).float())
        return {name: (result[name] - exact[name]).norm() / (1e-3 + exact[name].norm()) for name in exact}

    theirs, ours = distance(model.trunk), distance(model)
    assert max(ours.values()) < 1.5 * max(theirs.values()) < 0.2


def test_dropout_other_activations_and_layer_scale_are_timms():
    for change in ({"act": nn.ReLU()}, {"act": nn.GELU(approximate="tanh")}, {"norm": nn.LayerNorm(128)}):
        model = encoder(Verma()).double()
        for block in model.trunk.blocks:
            for name, module in change.items():
                setattr(block.mlp, name, copy.deepcopy(module).double())
        x = pictures().double()
        torch.testing.assert_close(model(x), model.trunk(x), msg=str(change))
    model = encoder(Verma()).double()
    model.trunk.blocks[0].mlp.fc1 = Doubled(model.trunk.blocks[0].mlp.fc1)
    torch.testing.assert_close(model(x), model.trunk(x))
    dropping = encoder(Verma(), dropout=0.5).train()
    assert not torch.equal(dropping(pictures()), dropping(pictures()))


@pytest.mark.parametrize("hooked", ["", ".norm2", ".mlp", ".mlp.fc1", ".mlp.act"])
def test_hooks_into_a_block_are_called(hooked):
    model = encoder(Linformer(8), pool="token")
    calls = []
    module = model.trunk.get_submodule(f"blocks.1{hooked}")
    handle = module.register_forward_hook(lambda *_: calls.append(hooked))
    result = model(pictures())
    assert calls == [hooked]
    handle.remove()
    torch.testing.assert_close(result, model(pictures()))
    assert calls == [hooked]


def test_an_empty_batch_has_features_of_no_pictures():
    model = encoder(Linformer(8))
    result = model(pictures(0))
    assert result.shape == (0, 32)
    result.sum().backward()


def test_a_block_keeps_less_than_seven_tenths_of_what_autograd_would():
    block = encoder(Linformer(8)).trunk.blocks[0]
    tokens = torch.randn(32, 64, 32, requires_grad=True)
    ours = kept_numbers(lambda: run_block(block, tokens, None, None))
    theirs = kept_numbers(lambda: block(tokens))
    d = tokens.numel()
    assert theirs - ours >= 4 * d  # the hidden layer after the GELU, and also the normalised tokens
    assert ours < 0.7 * theirs


@pytest.mark.parametrize("wanted", [True, False])
def test_without_gradients_no_more_than_two_tiles_of_the_hidden_layer_are_kept(wanted, monkeypatch):
    monkeypatch.setattr("longseq.encoders._block._TILE", 1000)
    block = encoder(Linformer(8)).trunk.blocks[0]
    tokens = torch.randn(3, 64, 32)
    expected = block(tokens)
    made, alive = [], []

    def counted(*arguments, **options):
        out = addmm(*arguments, **options)
        if "out" not in options:
            made.append(weakref.ref(out))
            alive.append(sum(tile() is not None for tile in made))
        return out

    addmm = torch.addmm
    monkeypatch.setattr("torch.addmm", counted)
    with torch.set_grad_enabled(wanted):
        result = run_block(block, tokens, None, None)
    torch.testing.assert_close(result, expected)
    assert len(made) == 24
    assert max(alive) == (len(made) if wanted else 2)


def test_a_class_token_spares_the_last_block_the_other_rows():
    costs = [flops_per_sample(Classifier(encoder(Softmax(), pool=pool), 10)).forward for pool in ("avg", "token")]
    n, d = 64, 32
    perceptron, queries, output = 16 * n * d * d, 2 * n * d * d, 2 * n * d * d
    assert costs[0] - costs[1] > 0.9 * (perceptron + queries + output)


def test_the_trunk_sees_tokens_whose_channels_lie_together():
    strides = []
    model = encoder(Linformer(8))
    model.trunk.blocks[0].register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    model.trunk.blocks[0].norm1.register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    model(pictures())
    assert strides[-1] == (64 * 32, 32, 1)
