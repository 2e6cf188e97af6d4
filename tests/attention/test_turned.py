"""timm's other families of vision transformers: plugged with the logits that they had, or refused for a reason."""

import pytest
import timm
import torch

from longseq import Dynamic, Linformer, Longformer, Mechanism, Reformer, Softmax, Verma, plug, resize
from longseq.attention.projection import LinearProjection
from longseq.attention.sources import inputs_of, sources
from longseq.encoders.forward_pass import encode

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
TURNED = {
    "eva02_tiny_patch14_224": {},  # one qkv without a bias of the keys
    "eva02_base_patch16_clip_224": {},  # three matrices, a norm before the output
    "eva02_enormous_patch14_clip_224": {},  # norms behind, no rotary positions
    "vit_small_patch16_dinov3": {},  # rotary positions alone, registers, pairs of halves
    "vit_base_patch16_sapiens2": {"num_kv_heads": 2},  # heads that share keys and values, normalised keys
    "vit_small_patch16_rope_mixed_ape_224": {},  # learned rates, other ones in every block and head
    "vit_pe_core_tiny_patch16_384": {},  # pooled by attention
}


def turned(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A small model in float64 and a batch of images; biases and norms differ from their start."""
    torch.manual_seed(0)
    size = 56 if "patch14" in name else 64
    model = timm.create_model(name, img_size=size, **SMALL, **TURNED[name]).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


@pytest.mark.parametrize("sharing", ["key_value", "none"])
@pytest.mark.parametrize("name", TURNED)
def test_rotary_positions_are_kept_exactly_by_an_identity_projection(name: str, sharing: str) -> None:
    model, images = turned(name)
    expected = model(images)
    n = model.patch_embed.num_patches + model.num_prefix_tokens
    plug(model, Linformer(n, sharing=sharing)).double()
    for part in model.modules():
        if isinstance(part, LinearProjection):
            part.weight.data.copy_(torch.eye(n))
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TURNED)
def test_rotary_positions_are_kept_exactly_by_windows_as_long_as_the_sequence(name: str) -> None:
    model, images = turned(name)
    expected = model(images)
    plug(model, Longformer()).double()
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)
    model.reset_classifier(0)
    torch.testing.assert_close(encode(model, images), model(images), rtol=1e-10, atol=1e-10)


def test_a_frozen_model_stays_frozen() -> None:
    model, _ = turned("eva02_tiny_patch14_224")
    plug(model.requires_grad_(False), Verma())
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == []


def test_places_are_not_turned_twice() -> None:
    model, images = turned("vit_small_patch16_dinov3")
    plug(model, Softmax(rotary=True)).double()
    with pytest.raises(ValueError, match="rotary must be false: this model turns queries and keys by their places"):
        model(images)


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize(
    "mechanism",
    [Softmax(), Verma(), Verma(3), Linformer(4, projection=Dynamic()), Reformer(1, 8)],
    ids=repr,
)
def test_the_encoders_path_is_that_of_the_model_and_every_weight_learns(name: str, mechanism: Mechanism) -> None:
    model, images = turned(name)
    expected = model(images)
    plug(model, mechanism).double()
    if isinstance(mechanism, Softmax):
        torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)
    model.reset_classifier(0)
    features = model(images)
    model.set_grad_checkpointing(True)
    torch.testing.assert_close(encode(model, images), features, rtol=1e-10, atol=1e-10)
    encode(model, images).square().sum().backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    assert still == set()


def test_the_turned_keys_know_their_distance_and_prefix_tokens_have_none() -> None:
    model, _ = turned("vit_small_patch16_dinov3")
    layer = plug(model, Softmax()).blocks[0].attn
    rope = model.rope.get_embed(shape=[4, 4]).double()
    queries = keys = torch.ones(1, 1, 16 + model.num_prefix_tokens, 12, dtype=torch.float64)
    scores = (layer.turn(queries, rope) @ layer.turn(keys, rope).mT)[0, 0]
    assert torch.equal(scores[:5, :5], torch.full((5, 5), 12.0, dtype=torch.float64))
    grid = scores[5:, 5:].view(4, 4, 4, 4)  # rows and columns of the query, then of the key
    torch.testing.assert_close(grid[0, 0, :3, :3], grid[1, 1, 1:, 1:])
    assert (grid[0, 0] - grid[0, 0, 0, 0]).abs().max() > 0.1


def test_a_trained_one_goes_on_at_another_size() -> None:
    model, images = turned("vit_small_patch16_rope_mixed_ape_224")
    plug(model, Linformer(4)).double()
    larger = resize(model, (3, 96, 96))
    assert larger(torch.randn(1, 3, 96, 96, dtype=torch.float64)).isfinite().all()
    assert larger.rope.feat_shape == (6, 6)
    assert torch.equal(resize(model, (3, 64, 64))(images), model(images))


def test_what_a_result_comes_from_is_found_with_the_rotary_positions() -> None:
    model, images = turned("vit_small_patch16_dinov3")
    layers = [block.attn for block in plug(model, Softmax()).blocks]
    with inputs_of(layers) as seen:
        model(images[:1])
    x, present, rope = seen[0]
    weights = torch.zeros(x.shape[1]).double()
    weights[7] = 1

    Q, K, _ = layers[0].qkv(x).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)
    P = (layers[0].turn(Q, rope) @ layers[0].turn(K, rope).mT * 12**-0.5).softmax(-1)
    torch.testing.assert_close(sources(layers[0], x, present, weights, rope), P[0, :, 7].mean(0))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("beit_base_patch16_224", "Beit: it adds a number to the score of every pair"),
        ("vit_relpos_small_patch16_224", "VisionTransformerRelPos: it adds a number"),
        ("samvit_base_patch16", "VisionTransformerSAM: it adds a number"),
        ("naflexvit_base_patch16_gap", "NaFlexVit: its grid of tokens has no fixed size; longseq.TimmEncoder takes it"),
        ("vit_base_patch16_xp_224", "block 0 .ParallelScalingBlock. holds NoneType"),
        ("cait_xxs24_224", "got Cait"),
    ],
)
def test_what_cannot_be_plugged_is_refused_for_a_reason(name: str, why: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=why):
        plug(model, Softmax())


@pytest.mark.parametrize("pattern", ["eva02_tiny*", "vit_small_patch16_dinov3*", "vit_tiny_*", "vitamin_small*"])
def test_every_model_of_these_names_is_plugged(pattern: str) -> None:
    assert timm.list_models(pattern)
    for name in timm.list_models(pattern):
        with torch.device("meta"):
            plug(timm.create_model(name, num_classes=0), Verma())
