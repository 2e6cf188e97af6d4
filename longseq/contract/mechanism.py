"""What every mechanism promises, tested on a small vision transformer of timm: 64 pixels and a class token."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from longseq.arguments import arguments_of
from longseq.attention import Linformer, Mechanism, Reformer, Softmax, TokenMixer, Verma, carry, plug
from longseq.attention.heads import Tokens
from longseq.attention.layer import AttentionLayer
from longseq.contract.promise import promise, require, require_close
from longseq.files.description import describe

_PLAIN = (Softmax(), Linformer([5, 7]), Verma(7))


def vit(size: int = 8, depth: int = 2, heads: int = 4, dim: int = 32, **options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=size, patch_size=1, in_chans=1, num_classes=10, embed_dim=dim, depth=depth, num_heads=heads, **options
    )


def model(mechanism: Mechanism, **options: Any) -> Any:
    """A small ViT with the attention of a mechanism."""
    return plug(vit(**options), mechanism)


def layer_of(mechanism: Mechanism, **options: Any) -> Any:
    return model(mechanism, **options).blocks[0].attn


def is_attention(mechanism: Mechanism) -> bool:
    """Whether its layers have queries, keys and values."""
    return isinstance(layer_of(mechanism), AttentionLayer)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def tokens(**options: Any) -> Tensor:
    return torch.randn(2, 65, 32, **options)


def gradients(vit: Any, mask: Tensor | None = None) -> dict[str, Tensor]:
    vit.zero_grad()
    vit(images(), attn_mask=mask).square().sum().backward()
    return {name: p.grad.clone() for name, p in vit.named_parameters()}


@promise("every block gets a layer that mixes tokens", "return one TokenMixer for each layer of the stack")
def a_layer_for_each_block(mechanism: Mechanism) -> None:
    for block in model(mechanism).blocks:
        require(isinstance(block.attn, TokenMixer), f"a block holds {type(block.attn).__name__}")


@promise("tokens are mixed as mixes_tokens says", "set mixes_tokens = False where a token sees only itself")
def tokens_are_mixed_or_not(mechanism: Mechanism) -> None:
    layer, x = layer_of(mechanism).double().eval(), tokens(dtype=torch.float64)
    changed = torch.cat([x[:, :1], 1 - x[:, 1:]], dim=1)  # not -x, which leaves products of keys and values unchanged
    first, others = layer(x)[:, :1], layer(changed)[:, :1]
    is_mixed = not torch.allclose(first, others, rtol=0, atol=1e-10)
    require(is_mixed == mechanism.mixes_tokens, f"other tokens {'change' if is_mixed else 'leave'} the first one")


@promise("every weight gets a gradient", "use the weight, or keep it as a buffer")
def every_weight_gets_a_gradient(mechanism: Mechanism) -> None:
    # the outputs of all tokens count, because a layer may treat the class token differently
    trained = model(mechanism, qkv_bias=True)
    outcome = trained.forward_features(images())
    (outcome.pow(3).sum() + trained.forward_head(outcome).square().sum()).backward()
    for name, weight in trained.named_parameters():
        # any gradient is enough: if the rows of E sum to one, a bias of the keys shifts all scores of a softmax equally
        require(weight.grad is not None and bool(weight.grad.abs().sum() > 0), f"{name} gets none")


@promise("dropout falls in training only", "drop with the rate that the formula is given, which is 0 in evaluation")
def dropout_falls_in_training_only(mechanism: Mechanism) -> None:
    # attention drops its weights; a mechanism without such weights drops its output
    rate = "attn_drop_rate" if is_attention(mechanism) else "proj_drop_rate"
    dropping, x = layer_of(mechanism, **{rate: 0.5}).train(), tokens()
    require(not torch.equal(dropping(x), dropping(x)), f"with {rate} = 0.5 two passes in training are equal")
    dropping.eval()
    require(torch.equal(dropping(x), dropping(x)), "two passes in evaluation differ")
    require(torch.equal(dropping(x), layer_of(mechanism).eval()(x)), f"{rate} changes the outcome in evaluation")


@promise("it takes any number of heads", "take the number of heads from the stack or from the queries")
def it_takes_any_number_of_heads(mechanism: Mechanism) -> None:
    if isinstance(getattr(mechanism, "k", 0), list):  # a list of k fits one number of heads only
        return
    for heads in (1, 8):
        layer, x = layer_of(mechanism, heads=heads).double(), tokens(dtype=torch.float64)
        require(bool(layer(x).isfinite().all()), f"with {heads} heads the outcome is not finite")
        if is_attention(mechanism):
            expected = AttentionLayer.attend(layer, Tokens(x, x))
            require_close(layer(x), expected, f"with {heads} heads the layer's and the formula's outcome")


@promise("samples of a batch do not mix, with all options of timm", "sum over no axis of samples")
def samples_do_not_mix(mechanism: Mechanism) -> None:
    for options in (
        {"qkv_bias": False, "init_values": 0.1, "class_token": False, "global_pool": "avg"},
        {"qk_norm": True, "reg_tokens": 4},
        {"scale_attn_norm": True, "proj_bias": False},
    ):
        torch.manual_seed(0)
        plugged, batch = model(mechanism, **options).double().eval(), images().double()
        logits = plugged(batch)
        require(logits.shape == (2, 10) and bool(logits.isfinite().all()), f"with {options} logits are not finite")
        if mechanism.mixes_tokens or plugged.global_pool == "avg":  # else the class token sees no image
            require(bool((logits[0] - logits[1]).abs().max() > 1e-4), f"with {options} two images have one answer")
        alone = torch.cat([plugged(image[None]) for image in batch])
        require_close(alone, logits, f"with {options} logits of a batch and of its images alone", 1e-9)


@promise("with qk_norm the formula gets the normed keys", "leave q_norm and k_norm to AttentionLayer")
def normed_keys_meet_the_queries(mechanism: Mechanism) -> None:
    if not is_attention(mechanism):
        return
    layer = layer_of(mechanism, qk_norm=True).eval()
    seen: list[Tensor] = []
    layer.k_norm.register_forward_hook(lambda _, args, out: seen.append(out))
    formula = layer.formula
    # Python looks in vars() first, so this also replaces a formula that is a module
    vars(layer)["formula"] = lambda heads: (seen.append(heads.keys), formula(heads))[1]
    x = tokens()
    AttentionLayer.attend(layer, Tokens(x, x))  # uses the formula even if the layer has shortcuts
    turned = layer.rotary or nn.Identity()
    pairs = zip(seen[::2], seen[1::2], strict=True)
    require(bool(seen) and all(torch.equal(turned(normed), met) for normed, met in pairs), "it gets others")


@promise(
    "the first queries alone have the outcome that they have among all",
    "leave independent_queries out if a query's outcome depends on other queries",
)
def fewer_queries_have_the_same_outcome(mechanism: Mechanism) -> None:
    for options in (
        {"qkv_bias": True, "scale_attn_norm": True},
        {"qkv_bias": False, "proj_bias": False},
        {"qk_norm": True},
    ):
        layer, x = layer_of(mechanism, **options).double().eval(), tokens(dtype=torch.float64)
        if getattr(layer, "qkv", None) is not None and layer.qkv.bias is not None:
            nn.init.normal_(layer.qkv.bias)
        for length in (65, 40):
            present = torch.arange(65) < torch.tensor([[65], [length]])
            mask = None if length == 65 else present[:, None, None]
            whole, where = layer(x, mask), f"with {options}, {length} of 65 tokens present,"
            if is_attention(mechanism):
                formula = AttentionLayer.attend(layer, Tokens(x, x, None if mask is None else present[..., None]))
                require_close(whole[present], formula[present], f"{where} the layer's and the formula's outcome")
                whole = formula
            require_close(layer(x, mask, num_queries=3), whole[:, :3], f"{where} outcomes of 3 and of 65 queries")


@promise("padding changes nothing", "use the masks: absent values are zero, but absent keys and queries are not")
def padding_changes_nothing(mechanism: Mechanism) -> None:
    plugged, x = model(mechanism).double().eval(), tokens(dtype=torch.float64)
    mask = (torch.arange(65) < 40)[None, None, None].expand(2, 1, 1, 65)
    padded, alone = x, x[:, :40]
    for block in plugged.blocks:
        padded, alone = block(padded, attn_mask=mask), block(alone, attn_mask=mask[..., :40])
    require_close(padded[:, :40], alone, "tokens before padding and tokens alone", 1e-10)


@promise("large tokens before padding have finite gradients", "mask scores before the softmax, and divide by no zero")
def gradients_of_large_tokens_are_finite(mechanism: Mechanism) -> None:
    layer, x = layer_of(mechanism), 300 * tokens()
    present = torch.arange(65) < torch.tensor([[65], [33]])
    x = x.masked_fill(~present[..., None], 0).requires_grad_()
    outcome = layer(x, present[:, None, None])[present]
    require(bool(outcome.isfinite().all()), "the outcome is not finite")
    for gradient in torch.autograd.grad(outcome.square().sum(), [x, *layer.parameters()], allow_unused=True):
        require(gradient is None or bool(gradient.isfinite().all()), "a gradient is not finite")


def learned(mechanism: Mechanism) -> Any:
    """A layer with large weights, as after a training: with initial ones its output hardly depends on the queries."""
    layer, generator = layer_of(mechanism).eval(), torch.Generator().manual_seed(1)
    for weight in layer.parameters():
        if weight.ndim == 2:
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return layer


@promise("bfloat16 stays near float32", "compute what needs precision in `with without_autocast(x):`")
@torch.no_grad()
def bfloat16_stays_near_float32(mechanism: Mechanism) -> None:
    x = tokens(generator=torch.Generator().manual_seed(2))
    exact, most = learned(mechanism)(x), 0.3 if isinstance(mechanism, Reformer) else 0.02  # rounding changes buckets
    with torch.autocast("cpu", torch.bfloat16):
        mixed = learned(mechanism)(x)
    half = learned(mechanism).bfloat16()(x.bfloat16())
    require(half.dtype == torch.bfloat16, f"weights in bfloat16 give {half.dtype}")
    for name, outcome in {"autocast": mixed, "weights in bfloat16": half}.items():
        error = float((outcome.float() - exact).norm() / exact.norm())
        require(error < most, f"with {name} the outcome is off by {error:.2g} of its norm")


@promise("activation checkpointing changes no gradient", "draw random numbers by torch, which are drawn again")
def checkpointing_changes_no_gradient(mechanism: Mechanism) -> None:
    trained = model(mechanism).train()
    expected = gradients(trained)
    trained.set_grad_checkpointing(True)
    for name, gradient in gradients(trained).items():
        require_close(gradient, expected[name], f"those of {name}", 1e-5, 1e-6)


@promise("a deep copy is equal, and shares what was shared", "keep tensors and modules as attributes of the layer")
def a_deep_copy_is_equal(mechanism: Mechanism) -> None:
    plugged = model(mechanism).eval()
    twin = copy.deepcopy(plugged)
    require(torch.equal(twin(images()), plugged(images())), "its logits differ")
    require(len(list(twin.parameters())) == len(list(plugged.parameters())), "it has another number of weights")
    is_apart = not {id(p) for p in twin.parameters()} & {id(p) for p in plugged.parameters()}
    require(is_apart, "it has a weight in common with its original")


@promise("a state dict and safetensors bring back the very logits", "register each tensor as a weight or a buffer")
def saved_weights_bring_back_the_logits(mechanism: Mechanism) -> None:
    saved = model(mechanism).eval()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vit.safetensors")
        safetensors.torch.save_model(saved, str(file))
        for way in ("state_dict", "safetensors"):
            torch.manual_seed(1)
            other = model(mechanism)
            for tensor in [*other.parameters(), *other.buffers()]:
                nn.init.zeros_(tensor)
            if way == "state_dict":
                other.load_state_dict(saved.state_dict())
            else:
                safetensors.torch.load_model(other, str(file))
            require(torch.equal(other.eval()(images()), saved(images())), f"with {way} they differ")


@promise("it takes the place of another attention and leaves again", "change nothing of the layers in the stack")
def it_takes_the_place_of_another_attention(mechanism: Mechanism) -> None:
    if not is_attention(mechanism):
        return
    plugged = model(mechanism).eval()
    expected, layers = plugged(images()), [block.attn for block in plugged.blocks]
    plug(plugged, Softmax())
    require(torch.equal(plugged(images()), model(Softmax()).eval()(images())), "after it, Softmax has other logits")
    for block, layer in zip(plugged.blocks, layers, strict=True):
        block.attn = layer
    require(torch.equal(plugged(images()), expected), "put in again, it has other logits")


@promise("plain values describe it", "keep each argument of the constructor as an attribute, numbers and words alone")
def plain_values_describe_it(mechanism: Any) -> None:
    described = describe(mechanism)
    require(json.loads(json.dumps(described)) == described, "its description changes in a file")
    require(type(mechanism)(**arguments_of(mechanism)) == mechanism, "its arguments make another one")


@promise("it has shapes on the meta device", "let no shape depend on the values of a tensor")
def it_has_shapes_on_the_meta_device(mechanism: Mechanism) -> None:
    """FLOPs are counted on the meta device, which computes nothing."""
    shape = model(mechanism).to("meta")(images().to("meta")).shape
    require(shape == (2, 10), f"logits of 2 images and 10 classes have the shape {tuple(shape)}")


@promise("trained weights are carried to and from other mechanisms", "override carry for weights that depend on n")
def it_is_carried_to_and_from_others(mechanism: Mechanism) -> None:
    """``carry`` copies all weights that both have, except the projections, and names those that start anew."""
    for before, after in [*((mechanism, other) for other in _PLAIN), *((other, mechanism) for other in _PLAIN)]:
        trained, new = model(before), model(after)
        for weight in trained.parameters():
            nn.init.normal_(weight, std=0.1)
        fresh, theirs = carry(trained, new), trained.state_dict()
        which = f"from {before} to {after}"
        lost = [name for name in fresh if ".project_" not in name and name in theirs]
        require(not lost, f"{which}, these get new weights: {lost}")
        for name, weight in new.state_dict().items():
            if ".project_" not in name and name not in fresh:
                require(torch.equal(weight, theirs[name]), f"{which}, {name} changes")
        if before == after:
            require(not fresh and torch.equal(new.eval()(images()), trained.eval()(images())), f"{which}, it changes")


PROMISES = (
    a_layer_for_each_block, tokens_are_mixed_or_not, every_weight_gets_a_gradient,
    dropout_falls_in_training_only, it_takes_any_number_of_heads,
    samples_do_not_mix, normed_keys_meet_the_queries, fewer_queries_have_the_same_outcome, padding_changes_nothing,
    gradients_of_large_tokens_are_finite, bfloat16_stays_near_float32, checkpointing_changes_no_gradient,
    a_deep_copy_is_equal, saved_weights_bring_back_the_logits, it_takes_the_place_of_another_attention,
    plain_values_describe_it, it_has_shapes_on_the_meta_device, it_is_carried_to_and_from_others,
)  # fmt: skip
