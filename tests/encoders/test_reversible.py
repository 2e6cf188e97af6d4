"""Reversible blocks have the gradients of the same blocks with kept activations, and keep none of them."""

from typing import Any

import pytest
import torch
from performer_pytorch.reversible import ReversibleSequence
from torch import Tensor, nn

from longseq import ImageEncoder, Linformer, SpectrogramEncoder, Verma, WaveformEncoder
from longseq.arguments import ArgumentError
from longseq.attention.examples import every_mechanism
from longseq.encoders import Conv2d, Encoder
from longseq.encoders import _reversible as reversible
from longseq.encoders.sharding import refuse_unsharded
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample

SMALL = {"dim": 16, "depth": 3, "heads": 2, "mlp_ratio": 2.0, "reversible": True}


def features_and_gradients(encoder: Encoder, inputs: Any) -> list[Tensor]:
    torch.manual_seed(1)  # of dropout
    features = encoder(inputs)
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    cotangent = torch.linspace(-1, 1, features.numel(), dtype=torch.float64).view_as(features).to(features.dtype)
    return [features, *torch.autograd.grad(features, weights, cotangent)]


def with_kept_activations(encoder: Encoder, inputs: Any) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reversible, "is_transformed", lambda: True)
        return features_and_gradients(encoder, inputs)


def assert_exact(encoder: Encoder, inputs: Any) -> None:
    encoder.measure([inputs])
    ours, expected = features_and_gradients(encoder, inputs), with_kept_activations(encoder, inputs)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mechanism", [each for each in every_mechanism() if each.mixes_tokens], ids=repr)
def test_gradients_of_every_mechanism_are_those_with_kept_activations(mechanism):
    torch.manual_seed(0)
    encoder, inputs = WaveformEncoder.examples(mechanism, reversible=True)[0]  # clips of unlike lengths
    assert_exact(encoder.double(), inputs)


@pytest.mark.parametrize("kind", [ImageEncoder, SpectrogramEncoder, WaveformEncoder])
@pytest.mark.parametrize("options", [{}, {"local": Conv2d(3)}, {"dropout": 0.2, "drop_path": 0.3}], ids=str)
def test_gradients_are_those_with_kept_activations_with_local_mixing_and_with_dropout(kind, options):
    torch.manual_seed(0)
    for encoder, inputs in kind.examples(Linformer(7, sharing="layerwise"), reversible=True, **options):
        encoder.augment = lambda picture: picture
        for name, weight in encoder.named_parameters():
            if "local" in name:
                nn.init.normal_(weight, std=0.3)  # it starts at zero
        assert_exact(encoder.double(), inputs)


def test_values_and_gradients_are_those_of_performer_pytorch():
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 4, 6), Verma(5), **SMALL).double()
    blocks, x = list(encoder.trunk.blocks), torch.randn(2, 24, 16, dtype=torch.float64)
    halves = [(nn.Sequential(b.norm1, b.attn), nn.Sequential(b.norm2, b.mlp)) for b in blocks]
    results = []
    for run in (lambda x: 2 * reversible.run_reversible(blocks, x, None, None), ReversibleSequence(halves).double()):
        tokens = x.clone().requires_grad_()
        outcome = run(tokens)
        outcome.square().sum().backward()
        results.append([outcome, tokens.grad, *(weight.grad for block in blocks for weight in block.parameters())])
        encoder.zero_grad()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def kept(depth: int, **options: Any) -> int:
    """Bytes that the blocks keep for the backward pass, without weights."""
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), Verma(), **{**SMALL, "depth": depth, **options})
    images = torch.rand(2, 1, 8, 8)
    encoder.measure([images])
    weights, storages = {weight.data_ptr() for weight in encoder.parameters()}, {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        features = encoder(images)
    assert features.requires_grad
    return sum(storages.values())


def test_what_is_kept_does_not_grow_with_the_depth():
    assert kept(2) == kept(8) < kept(2, reversible=False) < kept(8, reversible=False) / 3


def test_the_class_token_is_the_same_whether_all_tokens_are_wanted_or_not():
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 4, 4), Verma(), pool="token", **SMALL).double().eval()
    images, seen = torch.rand(2, 1, 4, 4), []
    encoder.trunk.norm.register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    encoder(images)
    encoder.token_features(images)
    torch.testing.assert_close(seen[0], seen[1][:, :1], rtol=1e-12, atol=1e-12)


def test_in_mixed_precision_gradients_come_near_those_in_float32():
    torch.manual_seed(0)
    encoder, images = ImageEncoder((1, 4, 6), Linformer(5), **SMALL), 255 * torch.rand(4, 1, 4, 6)
    encoder.measure([images])
    exact = features_and_gradients(encoder, images)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(images)
        loss = (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum()
    results = torch.autograd.grad(loss, [weight for weight in encoder.parameters() if weight.requires_grad])
    for low, high in zip(results, exact[1:], strict=True):
        assert low.dtype == torch.float32
        assert (low - high).norm() < 0.1 * high.norm() + 1e-3


def test_frozen_blocks_get_no_gradient_and_the_others_the_same():
    torch.manual_seed(0)
    encoder, images = ImageEncoder((1, 4, 6), Verma(), **SMALL).double(), torch.rand(2, 1, 4, 6)
    encoder.trunk.patch_embed.requires_grad_(False)
    encoder.trunk.blocks[0].requires_grad_(False)
    assert_exact(encoder, images)


def test_weights_of_any_block_that_were_changed_before_the_backward_pass_are_refused():
    encoder, images = ImageEncoder((1, 4, 6), Verma(), **SMALL), torch.rand(2, 1, 4, 6)
    for block in encoder.trunk.blocks:
        loss = encoder(images).sum()
        with torch.no_grad():
            block.mlp.fc1.weight += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_flops_are_those_of_plain_blocks():
    plain, other = (
        Classifier(ImageEncoder((1, 4, 6), Verma(), **{**SMALL, "reversible": r}), 3) for r in (False, True)
    )
    assert flops_per_sample(plain) == flops_per_sample(other)


def test_what_cannot_go_with_them_is_named():
    def encoder(**options: Any) -> ImageEncoder:
        return ImageEncoder((1, 4, 6), Verma(), **SMALL, **options)

    images = torch.rand(2, 1, 4, 6)
    with pytest.raises(ArgumentError, match="^checkpointing must be false with reversible blocks, which .*; leave out"):
        encoder(checkpointing=True)
    with pytest.raises(ArgumentError, match="^compile must be false with reversible blocks, .*; leave out one of the"):
        Classifier(encoder(), 3, compile=True)
    with pytest.raises(ArgumentError, match="^reversible must be false to be shared by several processes; "):
        refuse_unsharded(encoder())
    for part in ("", "blocks", "blocks.1"):
        hooked = encoder()
        hooked.trunk.get_submodule(part).register_forward_hook(lambda *_: None)
        with pytest.raises(ArgumentError, match="^trunk must have .* hooks .*; hook into "):
            hooked(images)
    model = encoder().double()
    with pytest.raises(ArgumentError, match="^reversible must be false for second derivatives; leave it out"):
        torch.autograd.grad(model(images).sum(), list(model.parameters()), create_graph=True, allow_unused=True)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    features = torch.func.functional_call(model, weights, (images,))
    with pytest.raises(RuntimeError, match="weights of reversible blocks must stay until the backward pass"):
        features.sum().backward()
