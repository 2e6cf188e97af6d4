"""timm's vision transformers as encoders, with weights that timm wrote (random ones: none can be downloaded here)."""

import re

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

from longseq import ImageEncoder, Linear, Linformer, Softmax, TimmEncoder, Verma
from longseq.files.description import build, describe
from longseq.training import Classifier

PLAIN = [
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",  # two prefix tokens
    "deit3_small_patch16_224",  # LayerScale, no position for the class token
    "vit_small_patch14_reg4_dinov2",  # registers
    "vit_base_patch16_gap_224",  # no class token
    "eva02_tiny_patch14_224",  # rotary and learned positions
    "vit_tiny_patch16_dinov3_qkvb",  # rotary positions alone
]


def images(size=64):
    return torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224").eval()
    path = tmp_path_factory.mktemp("weights") / "vit_tiny.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    return model, str(path)


@pytest.mark.parametrize("name", PLAIN)
def test_any_plain_vit_is_plugged(name):
    size = 56 if "patch14" in name else 64
    encoder = ImageEncoder.from_timm(name, Linformer(9), shape=(3, size, size), pretrained=False)
    features = encoder(images(size))
    assert features.shape == (2, encoder.dim)
    assert features.isfinite().all()


def test_exact_attention_gives_the_very_features_of_timms_model(weights):
    model, path = weights
    encoder = TimmEncoder("vit_tiny_patch16_224", Softmax(), pretrained=path).eval()
    batch = images(224)
    config = model.pretrained_cfg
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    expected = model.forward_head(model.forward_features((batch / 255 - mean) / std), pre_logits=True)
    torch.testing.assert_close(encoder(batch), expected, rtol=1e-4, atol=1e-5)


def test_weights_of_another_size_and_in_grey_are_carried_by_timm(weights):
    model, path = weights
    encoder = TimmEncoder("vit_tiny_patch16_224", Verma(4), shape=(1, 64, 64), pretrained=path)
    assert torch.equal(encoder.trunk.blocks[3].mlp.fc1.weight, model.blocks[3].mlp.fc1.weight)
    assert encoder.trunk.patch_embed.proj.weight.shape[1] == 1
    assert encoder.trunk.pos_embed.shape == (1, 17, 192)
    assert encoder(images()[:, :1]).shape == (2, 192)


def test_the_mean_start_keeps_pretrained_features_nearer_than_a_random_one(weights):
    _, path = weights
    batch = images(224)
    exact = TimmEncoder("vit_tiny_patch16_224", Softmax(), pretrained=path).eval()(batch)

    def distance(start):
        torch.manual_seed(0)
        attention = Linformer(50, projection=Linear(start))
        return (TimmEncoder("vit_tiny_patch16_224", attention, pretrained=path).eval()(batch) - exact).norm()

    assert distance("mean") < 0.5 * distance("random")


def test_a_checkpoint_of_it_needs_no_weights_but_its_own(weights, tmp_path):
    _, path = weights
    encoder = TimmEncoder("vit_tiny_patch16_224", Linformer(4), shape=[3, 32, 32], pretrained=path)
    description = describe(Classifier(encoder, 2))
    assert description["init_args"]["encoder"]["init_args"]["pretrained"] is False
    again = build(description, Classifier)
    again.load_state_dict(Classifier(encoder, 2).state_dict())
    batch = images(32)
    assert torch.equal(again.eval().encoder(batch), encoder.eval()(batch))


def test_training_data_do_not_change_the_normalisation_that_the_weights_expect():
    encoder = TimmEncoder("vit_tiny_patch16_224", Softmax(), shape=(3, 32, 32), pretrained=False)
    before = encoder.mean.clone()
    encoder.measure([images(32)])
    assert torch.equal(encoder.mean, before)
    torch.testing.assert_close(before.flatten(), torch.full((3,), 127.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "vit_tiny_patch17_224"}, "model must be one of timm's, got 'vit_tiny_patch17_224'; vit_tiny"),
        ({"model": "resnet18"}, "model must be a plain vision transformer, got 'resnet18'"),
        ({"model": "swin_tiny_patch4_window7_224"}, "model must .*'swin_tiny_patch4_window7_224'.*SwinTransformer"),
        (
            {"model": "beit_base_patch16_224"},
            "model must .*beit_base.*Beit: it adds a number to the score of",
        ),
        ({"model": "vit_relpos_small_patch16_224"}, "model must .*vit_relpos.*it adds a number to the score of every"),
        ({"model": "vit_base_patch16_xp_224", "shape": (3, 32, 32)}, "model must .*ParallelScalingBlock"),
        ({"model": "vit_tiny_patch16_224", "pretrained": "no/such.pt"}, "pretrained must .*no/such.pt'.* no such file"),
        ({"model": "vit_tiny_patch16_224", "shape": (3, 32)}, "shape must be channels, height and width"),
    ],
)
def test_what_cannot_be_plugged_is_refused_by_name_and_reason(arguments, message):
    arguments = {"pretrained": False, "attention": Linformer(3), **arguments}
    with pytest.raises(ValueError, match=message):
        TimmEncoder(**arguments)


@pytest.mark.parametrize("name", ["broken.pt", "broken.safetensors", "broken.npz", "list.pt", "other.npz"])
def test_weights_that_cannot_be_had_are_one_line(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = tmp_path / name
    path.write_bytes(b"no weights, but enough bytes for a header")
    if name == "list.pt":
        torch.save([1, 2], path)
    if name == "other.npz":
        np.savez(path, weights=np.zeros(3))
    with pytest.raises(ValueError, match="^pretrained must have weights for vit_tiny_patch16_224 ") as error:
        TimmEncoder("vit_tiny_patch16_224", Softmax(), pretrained=str(path))
    assert "\n" not in str(error.value)


def test_weights_of_another_model_are_refused_with_a_weight_and_both_of_its_shapes(tmp_path) -> None:
    other = timm.create_model("test_vit", num_classes=0)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    own = dict(timm.create_model("vit_tiny_patch16_224", num_classes=0).named_parameters())
    with pytest.raises(ValueError, match="^pretrained must have weights for vit_tiny_patch16_224 ") as error:
        TimmEncoder("vit_tiny_patch16_224", Linformer(8), pretrained=str(tmp_path / "other.pt"))
    name, there, here = re.search(
        r"\(([\w.]+) is \((.*?)\) in the file and \((.*?)\) in the model, and \d+ more", str(error.value)
    ).groups()
    shapes = [", ".join(map(str, weights[name].shape)) for weights in (other.state_dict(), own)]
    assert [there, here] == shapes and there != here


@pytest.mark.parametrize(("size", "fitting"), [((65, 64), "64"), ((20, 40), r"\[16,32\]"), ((8, 8), "16")])
def test_a_size_that_patches_do_not_fill_is_refused(size: tuple[int, int], fitting: str) -> None:
    what = rf"^shape must be filled by patches of \(16, 16\), got \({size[0]}, {size[1]}\); give --data.size {fitting}$"
    with pytest.raises(ValueError, match=what):
        TimmEncoder("test_vit", Verma(), (3, *size), pretrained=False)
