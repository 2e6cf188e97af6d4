"""Wrapped linear layers are called: adapters, hooks, pruning, norms of weights, quantisation, sharding."""

import copy
import warnings

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from pytorch_lightning.callbacks import ModelPruning
from small_vit import vit
from torch import nn
from torch.nn.utils import parametrizations, prune

from datamodules import Digits
from longseq.attention import Linformer, Softmax, Verma, plug
from longseq.encoders import ImageEncoder
from longseq.training import Classifier

MECHANISMS = [
    Softmax(),
    Linformer(7),
    Linformer(7, sharing="headwise"),
    Linformer([[3, 4, 5, 6], [7, 7, 7, 7]], sharing="none"),
    Verma(),
    Verma(7),
    Verma(7, normalize="columns"),
]
EVERY = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
LINEAR = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def encoder(mechanism, pool="token"):
    """An encoder whose last block computes the class token only, which is one more short cut."""
    torch.manual_seed(0)
    return ImageEncoder((1, 8, 8), mechanism, dim=32, depth=2, heads=4, pool=pool).eval()


def pictures():
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def linears(model):
    return [block.get_submodule(name) for block in model.trunk.blocks for name in LINEAR]


def replace(model, change):
    for block in model.trunk.blocks:
        for name in LINEAR:
            parent, _, last = name.rpartition(".")
            setattr(block.get_submodule(parent), last, change(block.get_submodule(name)))


class Doubled(nn.Linear):
    """A linear layer with twice the outputs that its weight and bias give."""

    @classmethod
    def of(cls, linear):
        double = cls(linear.in_features, linear.out_features)
        double.load_state_dict(linear.state_dict())
        return double

    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
def doubled(linear):
    linear.weight.mul_(2)
    linear.bias.mul_(2)
    return linear


@torch.no_grad()
def disturb(model):
    """Change the weights as a training would: none stays zero, one, or at its start."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


@EVERY
def test_lora_counts_as_its_merged_weights_do_and_every_adapter_learns(mechanism):
    model = encoder(mechanism)
    config = LoraConfig(target_modules=["qkv", "proj", "fc1", "fc2"], r=4, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = get_peft_model(model, config).eval()
    logits = tuned(pictures())
    logits.square().sum().backward()
    adapters = {name: weight.grad for name, weight in tuned.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * 2 * 4 + 2  # two blocks of four layers, and the patch embedding's proj
    assert all(gradient is not None and gradient.any() for gradient in adapters.values())
    merged = tuned.merge_and_unload().eval()
    torch.testing.assert_close(logits, merged(pictures()), rtol=1e-4, atol=1e-5)


@EVERY
def test_a_subclass_of_linear_does_what_its_forward_says(mechanism):
    model, expected = encoder(mechanism), encoder(mechanism)
    for network in (model, expected):
        disturb(network)
    replace(model, Doubled.of)
    replace(expected, doubled)
    torch.testing.assert_close(model(pictures()), expected(pictures()), rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_on_any_linear_layer_is_called(mechanism, kind):
    model = encoder(mechanism)
    called = []
    for number, linear in enumerate(linears(model)):
        register = getattr(linear, f"register_{kind}_hook")
        register(lambda *_, number=number: called.append(number))
    logits = model(pictures())
    logits.sum().backward()
    assert sorted(called) == list(range(8))
    torch.testing.assert_close(logits, encoder(mechanism)(pictures()), rtol=1e-4, atol=1e-5)


def masked(linear):
    return prune.l1_unstructured(linear, "weight", amount=0.5)


WEIGHTS = {
    "prune": (masked, lambda linear: prune.remove(masked(linear), "weight")),
    "weight_norm": (parametrizations.weight_norm, None),
    "old weight_norm": (nn.utils.weight_norm, None),
    "spectral_norm": (parametrizations.spectral_norm, None),
    "old spectral_norm": (nn.utils.spectral_norm, None),
}


@EVERY
@pytest.mark.parametrize("way", WEIGHTS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_those_of_this_step_and_learn(mechanism, way):
    wrap = WEIGHTS[way][0]
    model = encoder(mechanism).train()
    disturb(model)
    for linear in linears(model):
        wrap(linear)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):  # the second step fails if a weight still belongs to the graph of the first step
        optimizer.zero_grad()
        model(pictures()).square().sum().backward()
        optimizer.step()
    model.eval()
    plain = encoder(mechanism)
    own = plain.state_dict()
    logits = model(pictures())  # calls every layer, which updates its computed weight
    for name in own:
        own[name] = rgetattr(model, name).detach().clone()
    plain.load_state_dict(own)
    torch.testing.assert_close(logits, plain(pictures()), rtol=1e-4, atol=1e-5)


def rgetattr(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


@EVERY
def test_int8_weights_of_torchao_and_of_torch_stay_near_the_plain_model(mechanism):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    expected = encoder(mechanism)(pictures())
    model = encoder(mechanism)
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith(LINEAR))
    assert all(type(linear.weight) is not nn.Parameter for linear in linears(model))
    logits = model(pictures())
    assert 0 < (logits - expected).abs().max() < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this function has a successor
        dynamic = torch.ao.quantization.quantize_dynamic(encoder(mechanism), {nn.Linear}, torch.qint8)
    logits = dynamic(pictures())
    assert 0 < (logits - expected).abs().max() < 0.2


@EVERY
def test_fsdp_of_each_linear_layer_gives_the_plain_gradients(mechanism):
    from torch.distributed.fsdp import fully_shard

    plain, model = encoder(mechanism), encoder(mechanism)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for linear in linears(model):
            fully_shard(linear, mesh=mesh)
        logits = model(pictures())
        logits.square().sum().backward()
        plain(pictures()).square().sum().backward()
        torch.testing.assert_close(logits, plain(pictures()), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(linears(model), linears(plain), strict=True):
            torch.testing.assert_close(ours.weight.grad.full_tensor(), theirs.weight.grad, rtol=1e-4, atol=1e-5)
    finally:
        dist.destroy_process_group()


@EVERY
def test_a_bare_plugged_vit_counts_adapters_too(mechanism):
    model = plug(vit(), mechanism).eval()
    wrapped = copy.deepcopy(model)
    for block in wrapped.blocks:
        block.attn.qkv = Doubled.of(block.attn.qkv)
        block.attn.proj = Doubled.of(block.attn.proj)
    for block in model.blocks:
        doubled(block.attn.qkv)
        doubled(block.attn.proj)
    torch.testing.assert_close(wrapped(pictures()), model(pictures()), rtol=1e-4, atol=1e-5)


@EVERY
def test_lightnings_pruning_callback_prunes_and_the_training_goes_on(mechanism, tmp_path):
    data = Digits()
    model = Classifier(encoder(mechanism), 10)
    trainer = pl.Trainer(
        default_root_dir=tmp_path, max_epochs=2, limit_train_batches=2, limit_val_batches=0, accelerator="cpu",
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=ModelPruning(
            "l1_unstructured", [(linear, "weight") for linear in linears(model.encoder)], amount=0.5,
            use_global_unstructured=False, use_lottery_ticket_hypothesis=False,
        ),
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    for linear in linears(model.encoder):
        assert (linear.weight == 0).float().mean() > 0.45
