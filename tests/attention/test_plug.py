"""A plugged timm model: its weights, its logits, its sharing, its cost."""

import pytest
import timm
import torch
from small_vit import vit
from timm.models.vision_transformer import VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import Linformer, Mechanism, Softmax, Verma, plug

SHARINGS = ["none", "headwise", "key_value", "layerwise"]


def matrices(model: VisionTransformer) -> int:
    """How many k x n matrices the parameters hold; a parameter that layers share counts once."""
    return sum(p.numel() // (p.shape[-1] * p.shape[-2]) for name, p in model.named_parameters() if "project_" in name)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("pool", [{"class_token": False, "global_pool": "avg"}, {"reg_tokens": 3}])
def test_identity_projection_gives_the_logits_of_the_vit_it_came_from(sharing: str, pool: dict) -> None:
    model = vit(**pool).eval()
    images = torch.randn(3, 1, 8, 8)
    expected = model(images)
    plug(model, Linformer(k=64 + model.num_prefix_tokens, sharing=sharing))
    for name, parameter in model.named_parameters():
        if "project_" in name:
            torch.nn.init.zeros_(parameter)
            parameter.data.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)


def test_softmax_gives_the_very_logits_of_the_vit_it_came_from() -> None:
    model = vit(qk_norm=True, scale_attn_norm=True).eval()
    images = torch.randn(3, 1, 8, 8)
    expected = model(images)
    assert torch.equal(plug(model, Softmax())(images), expected)


@pytest.mark.parametrize("mechanism", [Softmax(), Linformer(8), Verma(), Verma(8)], ids=repr)
def test_a_state_dict_of_timm_loads_before_and_after(mechanism: Mechanism) -> None:
    timms = vit().state_dict()
    model = plug(vit(), mechanism)
    result = model.load_state_dict(timms, strict=False)
    assert not result.unexpected_keys
    assert all("project_" in name for name in result.missing_keys)


def test_a_named_timm_model_with_another_mechanism_after_the_first() -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=5, img_size=64)
    images = torch.randn(2, 3, 64, 64)
    expected = model.eval()(images)
    plug(model, Linformer(4))
    assert model(images).shape == (2, 5)
    assert torch.equal(plug(model, Softmax())(images), expected)


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key_value", 12), ("layerwise", 1)])
@pytest.mark.parametrize("kind", [Linformer, Verma])
def test_sharing_holds_the_papers_number_of_matrices(kind: type, sharing: str, count: int) -> None:
    model = plug(vit(depth=12, heads=12, dim=48), kind(k=4, sharing=sharing))
    assert matrices(model) == count


@pytest.mark.parametrize("mechanism", [Linformer(8), Linformer(8, "none"), Verma(), Verma(8)], ids=repr)
def test_cost_doubles_when_the_sequence_doubles(mechanism: Mechanism) -> None:
    def flops(height: int) -> int:
        with torch.device("meta"):
            model = plug(vit((height, 64), class_token=False, global_pool="avg"), mechanism)
            with FlopCounterMode(display=False) as counter:
                model(torch.empty(1, 1, height, 64))
        return counter.get_total_flops()

    ratio = flops(64) / flops(32)
    assert 1.98 < ratio <= 2.0


def test_shortening_first_makes_keys_and_values_from_k_tokens() -> None:
    """The cost of one layer: E X and E 1, then Q of n tokens, K and V of k, then both products, then the output."""
    n, k, d = 1024, 16, 32
    with torch.device("meta"):
        model = plug(vit(32, depth=1, class_token=False, global_pool="avg"), Linformer(k))
        x = torch.empty(1, n, d)
        with FlopCounterMode(display=False) as counter:
            model.blocks[0].attn(x)
    multiplications = k * n * d + k * n + n * d * d + 2 * k * d * d + 2 * n * k * d + n * d * d
    assert counter.get_total_flops() == 2 * multiplications


@pytest.mark.parametrize("k", [0, -3, 65])
@pytest.mark.parametrize("kind", [Linformer, Verma])
def test_k_out_of_range_is_refused_with_both_numbers(kind: type, k: int) -> None:
    with pytest.raises(ValueError, match=rf"k must be in 1\.\.64 .*got {k}"):
        plug(vit(class_token=False, global_pool="avg"), kind(k=k))


def test_a_model_that_is_no_plain_vit_is_refused_by_name() -> None:
    resnet = timm.create_model("resnet18", pretrained=False)
    with pytest.raises(ValueError, match="VisionTransformer or Eva, got ResNet"):
        plug(resnet, Softmax())
