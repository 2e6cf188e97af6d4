"""A stem of timm's has the features of timm's network, and padding changes nothing in them, in a training either."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from programs import program_of

from longseq import ImageEncoder, SpectrogramEncoder, Verma
from longseq.deploy._formats import write_onnx
from longseq.deploy.export import largest_difference
from longseq.encoders import Pretrained, Residual, resize
from longseq.files.description import build, describe
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample

SMALL: Any = {"dim": 16, "depth": 1, "heads": 2}
NETWORKS = ["test_resnet", "test_efficientnet", "test_convnext"]


def trained(model: str, path: Path) -> Any:
    """A network of timm's whose weights and statistics are not those of a start, and its file of weights."""
    torch.manual_seed(0)
    network = timm.create_model(model).train()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.3)
        network(torch.randn(4, 3, 64, 64))
    torch.save(network.state_dict(), path)
    return network.eval()


def sounds(stem: Any, **options: Any) -> SpectrogramEncoder:
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(8000, 0.5, Verma(), num_mels=16, tokens=[8, 8], stem=stem, **SMALL | options)
    encoder.set_statistics(torch.tensor(-3.0), torch.tensor(2.0))
    for part in encoder.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(part.bias)  # a layer's zeros at padding are no zeros after it
            torch.nn.init.normal_(part.weight)
    return encoder


@pytest.mark.parametrize("model", NETWORKS)
def test_a_file_of_weights_gives_the_features_of_timms_network_of_pixels_normalised_as_it_expects(
    model: str, tmp_path: Path
) -> None:
    network = trained(model, tmp_path / "weights.pt")
    stem = Pretrained(model, 1, pretrained=str(tmp_path / "weights.pt"))
    encoder = ImageEncoder((3, 32, 48), Verma(), patch_size=8, stem=stem, **SMALL).eval()
    pixels = torch.randint(256, (2, 3, 32, 48), dtype=torch.uint8)
    encoder.measure([pixels])
    mean, std = (torch.tensor(network.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    expected = network.forward_intermediates((pixels / 255 - mean) / std, indices=[1], intermediates_only=True)[0]
    picture, _ = encoder.prepared(pixels)
    torch.testing.assert_close(encoder.trunk.patch_embed.stem(picture), expected, rtol=1e-4, atol=1e-4)
    assert encoder.trunk.patch_embed.stem.stride == stem.stride == (pixels.shape[2] // expected.shape[2],) * 2


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("model", NETWORKS)
def test_a_clip_in_a_batch_has_the_features_and_gradients_that_it_has_alone(model: str, is_training: bool) -> None:
    encoder = sounds(Pretrained(model, 1, pretrained=False), any_length=True, positions="none").double()
    encoder.train(is_training)
    lengths = torch.tensor([1000, 4000, 79, 3990])
    waveforms = torch.randn(4, 4000, dtype=torch.float64) * (torch.arange(4000) < lengths[:, None])
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]

    def run(inputs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        features = encoder(inputs)
        return features, list(torch.autograd.grad(features.pow(3).sum(), weights, materialize_grads=True))

    features, gradients = run({"waveforms": F.pad(waveforms, (0, 3000)), "lengths": lengths})
    alone = [
        run({"waveforms": clip[None, :length], "lengths": length[None]})
        for clip, length in zip(waveforms, lengths, strict=True)
    ]
    torch.testing.assert_close(features, torch.cat([one for one, _ in alone]), rtol=1e-9, atol=1e-9)
    for number, gradient in enumerate(gradients):
        torch.testing.assert_close(gradient, sum(of_one[number] for _, of_one in alone), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("frames", [1, 7, 50, 51])
def test_lengths_that_the_network_cannot_halve_fill_its_grid_up(frames: int) -> None:
    stage = Pretrained("test_resnet", 2, pretrained=False).build(1).eval()
    picture, rows = torch.randn(1, 1, frames, 16), torch.tensor([frames])
    assert stage(picture, rows).shape == (1, stage.width, stage.rows_after(frames), 2)


def test_one_channel_gets_the_sum_of_the_weights_of_three(tmp_path: Path) -> None:
    network = trained("test_resnet", tmp_path / "weights.pt")
    stage = Pretrained("test_resnet", 0, str(tmp_path / "weights.pt")).build(1)
    first = next(iter(stage.network.parameters()))
    torch.testing.assert_close(first, network.conv1[0].weight.sum(1, keepdim=True))


def test_a_training_moves_its_weights_and_keeps_the_statistics_of_its_batch_norm() -> None:
    encoder = ImageEncoder((3, 16, 16), Verma(), patch_size=4, stem=Pretrained("test_efficientnet", 1, False), **SMALL)
    model = Classifier(encoder, 3).train()
    before = {name: value.clone() for name, value in encoder.trunk.patch_embed.stem.named_buffers()}
    encoder(torch.rand(2, 3, 16, 16)).square().sum().backward()
    assert all(weight.grad is not None for weight in encoder.parameters())
    assert all(torch.equal(value, before[name]) for name, value in encoder.trunk.patch_embed.stem.named_buffers())
    assert model.training and encoder.trunk.patch_embed.stem.training


@pytest.mark.parametrize("stem", [Residual([4, 6], [1, 2]), Pretrained("test_resnet", 1, False)], ids=repr)
@pytest.mark.parametrize("freeze", ["stem", 0, None])
def test_a_frozen_stem_keeps_its_weights_and_statistics_and_the_rest_learns(stem: Any, freeze: Any) -> None:
    model = Classifier(ImageEncoder((3, 16, 16), Verma(), patch_size=4, stem=stem, **SMALL), 3, freeze=freeze)
    for _ in range(2):
        trunk = model.encoder.trunk
        before = {name: value.clone() for name, value in trunk.patch_embed.stem.named_buffers()}
        model.encoder(torch.rand(4, 3, 16, 16))
        is_unchanged = all(torch.equal(value, before[name]) for name, value in trunk.patch_embed.stem.named_buffers())
        assert is_unchanged == (freeze is not None or isinstance(stem, Pretrained))
        assert all(weight.requires_grad == (freeze is None) for weight in trunk.patch_embed.stem.parameters())
        assert trunk.patch_embed.proj.weight.requires_grad == (freeze != 0)
        assert all(weight.requires_grad for weight in trunk.blocks.parameters())
        model.eval().train()


def test_a_checkpoint_of_it_needs_no_weights_but_its_own(tmp_path: Path) -> None:
    trained("test_resnet", tmp_path / "weights.pt")
    stem = Pretrained("test_resnet", 1, str(tmp_path / "weights.pt"))
    encoder = ImageEncoder((3, 16, 16), Verma(), patch_size=4, stem=stem, **SMALL)
    model = Classifier(encoder, 2).eval()
    (tmp_path / "weights.pt").unlink()
    again = build(describe(model), Classifier).eval()
    again.load_state_dict(model.state_dict())
    pixels = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(again(pixels), model(pixels))
    larger = resize(model, (3, 32, 16)).encoder
    assert torch.equal(larger.mean, encoder.mean) and larger.num_tokens == 2 * encoder.num_tokens


def test_its_flops_are_those_of_its_convolutions() -> None:
    def cost(stem: Pretrained) -> int:
        encoder = ImageEncoder((3, 16, 16), Verma(), patch_size=4, stem=stem, **SMALL)
        return flops_per_sample(Classifier(encoder, 2)).forward

    # behind level 0: 3 convolutions of 3 x 3 in front, then max pooling and a stage of one block at 4 x 4
    network: Any = timm.create_model("test_resnet", features_only=True, out_indices=(0, 1))
    sizes: list[int] = []

    def count(part: Any, _: Any, result: torch.Tensor) -> None:
        sizes.append(2 * part.weight.numel() * result.shape[2] * result.shape[3])

    for part in network.modules():
        if isinstance(part, torch.nn.Conv2d):
            part.register_forward_hook(count)
    network(torch.zeros(1, 3, 16, 16))
    encoder = ImageEncoder((3, 16, 16), Verma(), patch_size=4, **SMALL)
    rest = flops_per_sample(Classifier(encoder, 2)).forward - 2 * 16 * encoder.trunk.patch_embed.proj.weight.numel()
    width = network.feature_info.channels()[1]
    assert cost(Pretrained("test_resnet", 1, False)) == sum(sizes) + rest + 2 * 16 * width * 16


def test_images_are_exported_and_of_clips_of_unlike_lengths_the_remedy_is_named(tmp_path: Path, exports: None) -> None:
    stem = Pretrained("test_resnet", 1, False)
    model = Classifier(ImageEncoder((3, 16, 16), Verma(), patch_size=4, stem=stem, **SMALL | {"depth": 0}), 2).eval()
    torch.nn.init.normal_(model.head.weight)  # type: ignore[arg-type]
    program = program_of(model)
    run = write_onnx(program, tmp_path / "model", {})
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    assert largest_difference(model, program, run, pixels) < 1e-5
    with pytest.raises(
        ValueError, match="ckpt_path must have no pretrained stem where clips have lengths of their own"
    ):
        write_onnx(program_of(Classifier(sounds(stem), 2).eval()), tmp_path / "sound", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "resnet81"}, "model must be one of timm's, got 'resnet81'; resnet18 is one"),
        ({"model": "vit_tiny_patch16_224"}, "model must be a convolutional network .* got 'vit_tiny_patch16_224'"),
        (
            {"model": "test_resnet", "level": 5},
            "level must be in 0..4 for test_resnet, got 5; these have 1 / 2, 1 / 4,",
        ),
        ({"model": "test_resnet", "level": -1}, "level must be in 0..4"),
        ({"model": "test_resnet", "pretrained": "no/such.pt"}, "pretrained must .*no/such.pt'.* no such file"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pretrained(**{"pretrained": False} | arguments).build(3)


def test_a_network_that_is_coarser_than_a_patch_is_refused() -> None:
    stem = Pretrained("test_resnet", 3, pretrained=False)
    with pytest.raises(ValueError, match="patch_size must be a multiple of the stem's strides, 16 x 16, got"):
        ImageEncoder((3, 32, 32), Verma(), patch_size=8, stem=stem, **SMALL)


def test_weights_that_cannot_be_had_without_a_network_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="^pretrained must have weights for test_resnet ") as error:
        Pretrained("test_resnet", 0).build(3)
    assert "\n" not in str(error.value) and "give the path of a file" in str(error.value)


def test_freezing_a_stem_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="freeze must not be stem where ImageEncoder has none"):
        Classifier(ImageEncoder((3, 16, 16), Verma(), patch_size=4, **SMALL), 2, freeze="stem")
