"""What every mechanism must do, over all that longseq.attention exports: a new one joins by being exported."""

import copy
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_vit import vit

import longseq.attention
from longseq.attention import Linear, Mechanism, Projection, plug
from longseq.attention.layer import AttentionLayer


def exported(kind):
    found = (getattr(longseq.attention, name) for name in longseq.attention.__all__)
    return [x for x in found if inspect.isclass(x) and issubclass(x, kind) and not inspect.isabstract(x)]


def variants():
    """Each mechanism as it is, if it may be; with each projection, and with each sharing, if it has them."""
    for kind in exported(Mechanism):
        parameters = inspect.signature(kind).parameters
        if all(parameter.default is not parameter.empty for parameter in parameters.values()):
            yield kind()
        if "projection" in parameters:
            yield from (kind(k=7, projection=projection()) for projection in exported(Projection))
            yield from (kind(k=7, sharing=sharing) for sharing in ("none", "headwise", "layerwise"))
            yield kind(k=[5, 7])
            yield kind(k=[[3, 4, 5, 6], [7, 7, 7, 7]], sharing="none")


EVERY = pytest.mark.parametrize("mechanism", list(variants()), ids=repr)
# another number of heads needs another list of k
EVERY_K_A_LAYER = pytest.mark.parametrize(
    "mechanism", [m for m in variants() if not isinstance(getattr(m, "k", 0), list)], ids=repr
)


def model(mechanism, **options):
    return plug(vit(**options), mechanism)


def images(count=2):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def gradients(vit, mask=None):
    vit.zero_grad()
    vit(images(), attn_mask=mask).square().sum().backward()
    return {name: p.grad.clone() for name, p in vit.named_parameters()}


def test_all_projections_and_sharings_are_among_the_variants():
    assert len(exported(Mechanism)) >= 3
    assert {type(m.projection) for m in variants() if hasattr(m, "projection")} == set(exported(Projection))


@EVERY
def test_every_parameter_has_a_gradient(mechanism):
    for name, gradient in gradients(model(mechanism, qkv_bias=True)).items():
        # a key's bias moves all scores of a softmax alike where rows of E sum to one
        assert gradient.abs().sum() > 0, name


@EVERY
def test_dropout_falls_in_training_only_and_changes_something(mechanism):
    dropping = model(mechanism, attn_drop_rate=0.5).train()
    assert not torch.equal(dropping(images()), dropping(images()))
    dropping.eval()
    assert torch.equal(dropping(images()), dropping(images()))
    assert torch.equal(dropping(images()), model(mechanism).eval()(images()))


@EVERY_K_A_LAYER
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_any_number_of_heads(mechanism, heads):
    assert model(mechanism, heads=heads)(images()).isfinite().all()


@EVERY
@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": False},
        {"qk_norm": True},
        {"scale_attn_norm": True},
        {"class_token": False, "global_pool": "avg"},
        {"reg_tokens": 4},
        {"init_values": 0.1},
        {"proj_bias": False},
    ],
    ids=str,
)
def test_timms_options(mechanism, options):
    torch.manual_seed(0)
    vit = model(mechanism, **options).double().eval()
    logits = vit(images().double())
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    one = torch.cat([vit(image[None]) for image in images().double()])
    torch.testing.assert_close(one, logits, rtol=1e-9, atol=1e-9)  # samples of a batch do not meet


@EVERY
def test_with_qk_norm_the_keys_that_meet_the_queries_are_the_normed_ones(mechanism):
    vit = model(mechanism, qk_norm=True).eval()
    seen = []
    layer = vit.blocks[0].attn
    layer.k_norm.register_forward_hook(lambda _, args, out: seen.append(out))
    mix = layer.mix
    layer.mix = lambda Q, K, *rest: (seen.append(K), mix(Q, K, *rest))[1]
    x = torch.randn(2, 65, 32)
    AttentionLayer.attend(layer, x, x, None)  # by the formula, whatever short cuts a mechanism takes
    assert seen
    assert all(torch.equal(normed, met) for normed, met in zip(seen[::2], seen[1::2], strict=True))


@EVERY
@pytest.mark.parametrize(
    "options",
    [{"qkv_bias": True}, {"qkv_bias": False}, {"qk_norm": True}, {"scale_attn_norm": True}, {"proj_bias": False}],
    ids=str,
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_short_cuts_and_fewer_queries_give_what_the_formula_gives(mechanism, options, is_padded):
    layer = model(mechanism, **options).double().eval().blocks[0].attn
    torch.nn.init.normal_(layer.qkv.bias) if layer.qkv.bias is not None else None
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    present = torch.arange(65) < torch.tensor([[65], [40]]) if is_padded else torch.ones(2, 65, dtype=torch.bool)
    mask = present[:, None, None] if is_padded else None
    formula = AttentionLayer.attend(layer, x, x, present[..., None] if is_padded else None)
    torch.testing.assert_close(layer(x, mask)[present], formula[present])
    torch.testing.assert_close(layer(x, mask, num_queries=3), formula[:, :3])


@EVERY
def test_a_key_padding_mask_hides_what_is_behind_it(mechanism):
    vit = model(mechanism).double().eval()
    mask = (torch.arange(65) < 40)[None, None, None].expand(2, 1, 1, 65)
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    padded, alone = x, x[:, :40]
    for block in vit.blocks:
        padded, alone = block(padded, attn_mask=mask), block(alone, attn_mask=mask[..., :40])
    torch.testing.assert_close(padded[:, :40], alone, rtol=1e-10, atol=1e-10)


@EVERY
def test_bfloat16_and_autocast_stay_near_float32(mechanism):
    vit = model(mechanism).eval()
    expected = vit(images())
    with torch.autocast("cpu", torch.bfloat16):
        mixed = vit(images())
    torch.testing.assert_close(mixed.float(), expected, rtol=0.05, atol=0.05)
    half = vit.to(torch.bfloat16)(images().bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("script", ["compile_every.py", "ddp_every.py"])
def test_every_one_compiles_in_one_graph_and_trains_on_two_processes(script, tmp_path):
    """In processes of their own: no compiler can follow the tests' checks of shapes."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(mechanism) for mechanism in variants()]


@EVERY
def test_activation_checkpointing_changes_no_gradient(mechanism):
    vit = model(mechanism).train()
    expected = gradients(vit)
    vit.set_grad_checkpointing(True)
    for name, gradient in gradients(vit).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@EVERY
def test_a_deep_copy_is_equal_and_its_own_and_shares_what_was_shared(mechanism):
    vit = model(mechanism).eval()
    twin = copy.deepcopy(vit)
    assert torch.equal(twin(images()), vit(images()))
    assert len(list(twin.parameters())) == len(list(vit.parameters()))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in vit.parameters()}


@EVERY
def test_a_state_dict_and_safetensors_bring_back_the_very_logits(mechanism, tmp_path):
    vit = model(mechanism).eval()
    for way in ("state_dict", "safetensors"):
        torch.manual_seed(1)
        other = model(mechanism)
        for tensor in [*other.parameters(), *other.buffers()]:
            torch.nn.init.zeros_(tensor)
        if way == "state_dict":
            other.load_state_dict(vit.state_dict())
        else:
            safetensors.torch.save_model(vit, tmp_path / "vit.safetensors")
            safetensors.torch.load_model(other, tmp_path / "vit.safetensors")
        assert torch.equal(other.eval()(images()), vit(images()))


@EVERY
def test_it_takes_the_place_of_another_mechanism_and_leaves_again(mechanism):
    vit = model(mechanism).eval()
    expected = vit(images())
    layers = [block.attn for block in vit.blocks]
    plug(vit, longseq.attention.Softmax())
    assert all(isinstance(block.attn, AttentionLayer) for block in vit.blocks)
    assert torch.equal(vit(images()), model(longseq.attention.Softmax()).eval()(images()))
    for block, layer in zip(vit.blocks, layers, strict=True):
        block.attn = layer
    assert torch.equal(vit(images()), expected)


@EVERY
def test_its_description_is_plain_and_equal_to_itself(mechanism):
    assert mechanism == copy.deepcopy(mechanism)
    assert eval(repr(mechanism), vars(longseq.attention)) == mechanism
    if hasattr(mechanism, "projection") and mechanism.projection == Linear():
        assert mechanism != type(mechanism)(k=3)
