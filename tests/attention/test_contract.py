"""What every mechanism must do, tested on all that longseq.attention exports, so a new one is tested once exported."""

import copy
import dataclasses
from pathlib import Path

import forked
import pytest
import safetensors.torch
import torch
from small_vit import ATTENTION, COMPILED, MECHANISMS, gradients, images, model

import longseq.attention
from longseq.attention import Linformer, Nystromformer, Reformer, Softmax, Verma, carry, plug
from longseq.attention.examples import every_mechanism
from longseq.attention.heads import Tokens
from longseq.attention.layer import AttentionLayer

EVERY = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
EVERY_ATTENTION = pytest.mark.parametrize("mechanism", ATTENTION, ids=repr)
# a list of k fits one number of heads only
EVERY_K_A_LAYER = pytest.mark.parametrize(
    "mechanism", [each for each in MECHANISMS if not isinstance(getattr(each, "k", 0), list)], ids=repr
)


@dataclasses.dataclass(frozen=True)
class Untried(Softmax):
    @classmethod
    def examples(cls):
        return []


def test_a_mechanism_that_is_exported_without_an_example_fails(monkeypatch):
    monkeypatch.setattr(longseq.attention, "Softmax", Untried)
    with pytest.raises(TypeError, match=r"^Untried must have an example, or no test would try it"):
        every_mechanism()


@EVERY
def test_every_parameter_has_a_gradient(mechanism):
    # the outcomes for all tokens count: a layer may treat the class token unlike the others
    vit = model(mechanism, qkv_bias=True)
    tokens = vit.forward_features(images())
    (tokens.pow(3).sum() + vit.forward_head(tokens).square().sum()).backward()
    for name, parameter in vit.named_parameters():
        # if the rows of E sum to one, a bias of the keys shifts all scores of a softmax equally: its gradient is tiny
        assert parameter.grad.abs().sum() > 0, name


@EVERY
def test_dropout_falls_in_training_only_and_changes_something(mechanism):
    # the weights of attention drop, and the outcome of what has no such weights
    rate = "attn_drop_rate" if mechanism in ATTENTION else "proj_drop_rate"
    dropping, x = model(mechanism, **{rate: 0.5}).blocks[0].attn.train(), torch.randn(2, 65, 32)
    assert not torch.equal(dropping(x), dropping(x))
    dropping.eval()
    assert torch.equal(dropping(x), dropping(x))
    assert torch.equal(dropping(x), model(mechanism).blocks[0].attn.eval()(x))


@EVERY_K_A_LAYER
@pytest.mark.parametrize("heads", [1, 8])
def test_any_number_of_heads(mechanism, heads):
    layer = model(mechanism, heads=heads).double().blocks[0].attn
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    assert layer(x).isfinite().all()
    if mechanism in ATTENTION:
        torch.testing.assert_close(layer(x), AttentionLayer.attend(layer, Tokens(x, x)))


@EVERY
@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": False, "init_values": 0.1, "class_token": False, "global_pool": "avg"},
        {"qk_norm": True, "reg_tokens": 4},
        {"scale_attn_norm": True, "proj_bias": False},
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
    torch.testing.assert_close(one, logits, rtol=1e-9, atol=1e-9)  # samples of a batch do not mix


@EVERY_ATTENTION
def test_with_qk_norm_the_keys_that_meet_the_queries_are_the_normed_ones(mechanism):
    vit = model(mechanism, qk_norm=True).eval()
    seen = []
    layer = vit.blocks[0].attn
    layer.k_norm.register_forward_hook(lambda _, args, out: seen.append(out))
    formula = layer.formula
    # Python looks in vars() first, so this also replaces a formula that is a module
    vars(layer)["formula"] = lambda heads: (seen.append(heads.keys), formula(heads))[1]
    x = torch.randn(2, 65, 32)
    AttentionLayer.attend(layer, Tokens(x, x))  # uses the formula even if a mechanism has short cuts
    assert seen
    turned = layer.rotary or torch.nn.Identity()
    assert all(torch.equal(turned(normed), met) for normed, met in zip(seen[::2], seen[1::2], strict=True))


@EVERY_ATTENTION
@pytest.mark.parametrize(
    "options",
    [{"qkv_bias": True, "scale_attn_norm": True}, {"qkv_bias": False, "proj_bias": False}, {"qk_norm": True}],
    ids=str,
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_short_cuts_and_fewer_queries_give_what_the_formula_gives(mechanism, options, is_padded):
    layer = model(mechanism, **options).double().eval().blocks[0].attn
    torch.nn.init.normal_(layer.qkv.bias) if layer.qkv.bias is not None else None
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    present = torch.arange(65) < torch.tensor([[65], [40]]) if is_padded else torch.ones(2, 65, dtype=torch.bool)
    mask = present[:, None, None] if is_padded else None
    formula = AttentionLayer.attend(layer, Tokens(x, x, present[..., None] if is_padded else None))
    torch.testing.assert_close(layer(x, mask)[present], formula[present])
    torch.testing.assert_close(layer(x, mask, num_queries=3), formula[:, :3])


def test_only_mechanisms_whose_queries_meet_each_other_get_all_of_them():
    """The test above shows that each other claim is true; without the claim, the class token's block would be slow."""
    needing_all = [each for each in ATTENTION if not model(each).blocks[0].attn.independent_queries]
    by_columns = [Verma(7, normalize="columns")]
    assert needing_all == [each for each in ATTENTION if isinstance(each, Nystromformer) or each in by_columns]


# of attention, both are compared with the formula above
@pytest.mark.parametrize("mechanism", [each for each in MECHANISMS if each not in ATTENTION], ids=repr)
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_outcome_for_the_first_tokens_is_the_first_part_of_the_outcome_for_all(mechanism, is_padded):
    layer = model(mechanism).double().eval().blocks[0].attn
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    mask = (torch.arange(65) < torch.tensor([[65], [40]]))[:, None, None] if is_padded else None
    torch.testing.assert_close(layer(x, mask, num_queries=3), layer(x, mask)[:, :3])


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
def test_gradients_of_large_tokens_before_zeros_of_padding_are_finite(mechanism):
    layer, x = model(mechanism).blocks[0].attn, 300 * torch.randn(2, 65, 32)
    present = torch.arange(65) < torch.tensor([[65], [33]])
    x = x.masked_fill(~present[..., None], 0).requires_grad_()
    outcome = layer(x, present[:, None, None])[present]
    assert outcome.isfinite().all()
    for gradient in torch.autograd.grad(outcome.square().sum(), [x, *layer.parameters()], allow_unused=True):
        assert gradient is None or gradient.isfinite().all()


def learned(mechanism):
    """A layer as after a training: at the start weights are so small that an outcome hardly depends on the queries."""
    layer, generator = model(mechanism).blocks[0].attn.eval(), torch.Generator().manual_seed(1)
    for weight in layer.parameters():
        if weight.ndim == 2:
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return layer


@EVERY
@torch.no_grad()
def test_bfloat16_and_autocast_stay_near_float32(mechanism):
    x = torch.randn(2, 65, 32, generator=torch.Generator().manual_seed(2))
    exact, most = learned(mechanism)(x), 0.3 if isinstance(mechanism, Reformer) else 0.02  # its buckets change
    with torch.autocast("cpu", torch.bfloat16):
        mixed = learned(mechanism)(x)
    half = learned(mechanism).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    for found in (mixed, half):
        assert (found.float() - exact).norm() < most * exact.norm()


@pytest.mark.parametrize(
    ("script", "mechanisms"),
    [pytest.param("compile_every.py", COMPILED, marks=pytest.mark.thorough), ("ddp_every.py", MECHANISMS)],
)
def test_every_one_compiles_in_one_graph_and_trains_on_two_processes(script, mechanisms, tmp_path):
    """The scripts run in separate processes: a compiler cannot follow the shape checks of `make thorough`."""
    done = forked.run(Path(__file__).with_name(script), tmp_path, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(map(repr, mechanisms))


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


@EVERY_ATTENTION
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
def test_its_description_rebuilds_it(mechanism):
    assert eval(repr(mechanism), vars(longseq.attention)) == mechanism


@EVERY
def test_on_the_meta_device_it_has_the_shapes_of_its_outcome(mechanism):
    """FLOPs are counted on the meta device, which computes nothing."""
    vit = model(mechanism).to("meta")
    assert vit(images().to("meta")).shape == (2, 10)


PLAIN = [Softmax(), Linformer([5, 7]), Verma(7)]


@EVERY
@pytest.mark.parametrize("other", PLAIN, ids=repr)
def test_it_is_carried_to_and_from_every_other(mechanism, other):
    """All weights that both have are carried, except the projections, and carry names the weights that start anew."""
    for before, after in ((mechanism, other), (other, mechanism)):
        trained, new = model(before), model(after)
        for weight in trained.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        fresh = carry(trained, new)
        theirs = trained.state_dict()
        assert all(".project_" in name or name not in theirs for name in fresh)
        for name, weight in new.state_dict().items():
            if ".project_" not in name and name not in fresh:
                assert torch.equal(weight, theirs[name]), name
        if before == after:
            assert not fresh
            assert torch.equal(new.eval()(images()), trained.eval()(images()))


class Scaled(torch.nn.Module):
    """A formula with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, heads):
        queries, keys, values, _, key_mask, _ = heads
        return self.scale * torch.nn.functional.scaled_dot_product_attention(queries, keys, values, key_mask)


@dataclasses.dataclass(frozen=True)
class WithScale(Softmax):
    def layers(self, stack, grid):
        return [AttentionLayer(trained, Scaled()) for trained in stack]


def test_a_formula_may_be_a_module():
    """Its weights are trained, saved and carried with the layer's."""
    vit = model(WithScale())
    assert torch.equal(vit.eval()(images()), model(Softmax()).eval()(images()))
    assert gradients(vit)["blocks.1.attn.formula.scale"] != 0
    vit.blocks[0].attn.formula.scale.data.fill_(2.0)
    twin = model(WithScale())
    assert carry(vit, twin) == []
    assert twin.blocks[0].attn.formula.scale == 2
    assert carry(model(Softmax()), model(WithScale())) == [f"blocks.{n}.attn.formula.scale" for n in (0, 1)]
