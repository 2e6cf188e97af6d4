"""A trained model continues with another image size, clip length, or hop."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from longseq import (
    LRU,
    LSTM,
    S4D,
    Conv,
    ImageEncoder,
    Linformer,
    LongConv,
    Mamba2,
    Mean,
    Separable,
    Softmax,
    SpectrogramEncoder,
    Verma,
    plug,
    resize,
)
from longseq.attention.examples import every_mechanism
from longseq.training import Classifier

SMALL = {"dim": 16, "depth": 2, "heads": 2}
MECHANISMS = [Softmax(), Linformer(5), Linformer(5, "layerwise"), Linformer(5, "none"), Verma(5, projection=Conv())]
MECHANISMS += [Linformer([6, 4], sharing, Separable()) for sharing in ("none", "headwise", "key_value")]
MECHANISMS += [Linformer(6, "layerwise", Separable())]
MECHANISMS += [
    candidate for candidate in every_mechanism() if type(candidate) not in {type(mechanism) for mechanism in MECHANISMS}
]


def image_encoder(attention, **options):
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), attention, **SMALL, **options)
    encoder.mean.fill_(3.0)
    encoder.std.fill_(2.0)
    return encoder.eval()


def sound_encoder(attention):
    torch.manual_seed(0)
    return SpectrogramEncoder(8000, 1.0, attention, num_mels=16, **SMALL).eval()


CASES = [(candidate, "avg") for candidate in MECHANISMS]
# of these, the weights of attention have a place for the class token
CASES += [(candidate, "token") for candidate in (Linformer(5), Verma(6, projection=Separable()), LongConv())]


@pytest.mark.parametrize(("mechanism", "pool"), CASES, ids=repr)
def test_an_encoder_of_the_same_shape_gives_the_very_features(mechanism, pool):
    encoder, images = image_encoder(mechanism, pool=pool), torch.randn(2, 1, 8, 8)
    assert torch.equal(resize(encoder, (1, 8, 8))(images), encoder(images))


@pytest.mark.parametrize("mechanism", [*MECHANISMS, Verma(), Linformer(16, projection=Mean())], ids=repr)
def test_an_enlarged_image_gives_features_near_those_of_the_small_one(mechanism):
    """The images are smooth, so that enlarging them hardly changes the neighbours of a token."""
    encoder = image_encoder(mechanism)
    small = torch.nn.functional.interpolate(torch.randn(4, 1, 3, 3) * 4 + 3, (8, 8), mode="bicubic")
    large = torch.nn.functional.interpolate(small, (16, 16), mode="bilinear")
    grown = resize(encoder, (1, 16, 16))
    assert grown.num_tokens == 256
    assert torch.equal(grown.mean, encoder.mean)
    expected = encoder(small)
    carried = (grown(large) - expected).norm() / expected.norm()
    torch.manual_seed(1)
    anew = ImageEncoder((1, 16, 16), mechanism, **SMALL).eval()
    assert carried < 0.25
    assert (anew(large) - expected).norm() / expected.norm() > 2 * carried


def test_a_classifier_keeps_the_precision_of_its_weights():
    model = Classifier(image_encoder(Linformer(5)), 3).double().eval()
    carried = resize(model, (1, 16, 16))
    assert {weight.dtype for weight in carried.parameters()} == {torch.float64}
    assert carried(torch.randn(2, 1, 16, 16)).dtype == torch.float64


@pytest.mark.parametrize("change", [{"hop_ms": 5.0}, {"hop_ms": 20.0}, {"seconds": 2.0}, {"seconds": 0.5}])
def test_a_sound_encoder_is_carried_to_another_hop_and_length(change):
    encoder = sound_encoder(Linformer(5))
    carried = resize(encoder, **change)
    ((name, value),) = change.items()
    assert getattr(carried, name) == value
    rows = carried.trunk.blocks[0].attn.project_keys.weight
    assert rows.shape == (5, carried.num_tokens)
    torch.testing.assert_close(rows.sum(1), encoder.trunk.blocks[0].attn.project_keys.weight.sum(1))
    assert carried(torch.randn(2, carried.num_samples)).shape == (2, 16)


def test_of_sound_in_patches_a_separable_projection_keeps_its_mels_and_is_carried_along_time():
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(8000, 1.0, Linformer(8, projection=Separable()), num_mels=16, tokens=[8, 4], **SMALL)
    carried = resize(encoder.eval(), seconds=2.0)
    before, after = (model.trunk.blocks[0].attn.project_keys for model in (encoder, carried))
    assert [before.along_rows.shape, before.along_columns.shape] == [(4, 26), (2, 2)]
    assert [after.along_rows.shape, after.along_columns.shape] == [(4, 51), (2, 2)]
    assert torch.equal(after.along_columns, before.along_columns)
    assert carried(torch.randn(2, 16000)).shape == (2, 16)


def test_a_classifier_keeps_its_head_and_its_description_follows():
    model = Classifier(image_encoder(Linformer(5)), 3, ["a", "b", "c"], learning_rate=0.5)
    torch.nn.init.normal_(model.head.weight)
    grown = resize(model, (1, 16, 16))
    assert torch.equal(grown.head.weight, model.head.weight)
    assert (grown.learning_rate, grown.class_names) == (0.5, ["a", "b", "c"])
    assert grown.hparams["encoder"]["init_args"]["shape"] == [1, 16, 16]
    assert model.encoder.num_tokens == 64


@pytest.mark.parametrize("mechanism", [S4D(state=8), LSTM(), LRU(state=8), LongConv(), Mamba2(state=8)], ids=repr)
def test_a_plugged_vit_whose_layers_have_no_queries_is_carried_too(mechanism):
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 1, "in_chans": 1, "num_classes": 0, "embed_dim": 16, "depth": 2}
    model = plug(VisionTransformer(**sizes, num_heads=4, attn_drop_rate=0.1, proj_drop_rate=0.2), mechanism).eval()
    images = torch.randn(2, 1, 8, 8)
    carried = resize(model, (1, 8, 8))
    assert torch.equal(carried(images), model(images))
    drops = [part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)]
    assert [part.p for part in carried.modules() if isinstance(part, torch.nn.Dropout)] == drops
    assert resize(model, (1, 16, 12))(torch.randn(2, 1, 16, 12)).shape == (2, 16)


def test_no_trained_weight_is_replaced_by_a_random_one():
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 4), Linformer(32, projection=Separable()), **SMALL)  # 8 x 4 slots
    with pytest.raises(ValueError, match=r"model must have weights for blocks\.0\.attn\.project_keys at the new size"):
        resize(encoder, (1, 4, 8))
    wide = resize(encoder, (1, 16, 8), attention=Linformer(32, projection=Separable(rows=8)))
    sums = (candidate.trunk.blocks[0].attn.project_keys.along_rows.sum(-1) for candidate in (encoder, wide))
    torch.testing.assert_close(*sums)  # row sums
    encoder = image_encoder(Verma())
    for block in encoder.trunk.blocks:
        torch.nn.utils.parametrizations.weight_norm(block.attn.qkv)
    with pytest.raises(
        ValueError, match=r"weights for blocks\.0\.attn\.qkv.* got none like them; merge wrapped layers"
    ):
        resize(encoder, (1, 8, 8))


def test_an_encoder_that_leaves_inputs_as_they_are_goes_on_so():
    encoder = ImageEncoder((1, 8, 8), Verma(), **SMALL)
    encoder.set_statistics(torch.tensor(0.0), torch.tensor(1.0))
    carried = resize(encoder, (1, 16, 16)).train()
    carried(torch.full((2, 1, 16, 16), 100.0))
    assert float(carried.mean) == 0


def test_what_cannot_be_is_refused():
    encoder = image_encoder(Linformer(5))
    with pytest.raises(ValueError, match="depth must be 2, as in the trained model, got 1"):
        resize(encoder, depth=1)
    patches = SpectrogramEncoder(8000, 0.4, Verma(), num_mels=16, tokens=[8, 4], **SMALL)
    with pytest.raises(ValueError, match=r"num_mels must keep mean and deviation of \(1, 1, 16\), got \(1, 1, 32\)"):
        resize(patches, num_mels=32)
    with pytest.raises(ValueError, match="seconds must be an argument of ImageEncoder"):
        resize(encoder, seconds=2.0)
    with pytest.raises(ValueError, match="pos_embed must have one shape"):
        resize(encoder, dim=32)
    with pytest.raises(ValueError, match="pool must be that of the trained model, with 0 class tokens, got 1"):
        resize(encoder, pool="token")
    with pytest.raises(ValueError, match="pool must be that of the trained model, with 1 class tokens, got 0"):
        resize(image_encoder(Linformer(5), pool="token"), pool="avg")
    with pytest.raises(ValueError, match="model must be an encoder or have one, got Linear"):
        resize(torch.nn.Linear(2, 2), (1, 8, 8))
