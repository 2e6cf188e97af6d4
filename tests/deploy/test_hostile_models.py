"""Models of an attacker: nothing is fetched for them, and weights, names and parts of another form are one line."""

import json
import random
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import longseq
from datamodules import DataError, Digits
from longseq import ImageEncoder, Softmax, TimmEncoder, Verma
from longseq.encoders import Encoder
from longseq.files.checkpoint import CheckpointError, read_checkpoint
from longseq.files.description import describe
from longseq.files.model_folder import write_model_folder
from longseq.reports.cell import peak_of
from longseq.training import Classifier
from longseq.training.classifier import model_and_data


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the network, of which each attempt fails."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def checkpoint_of(encoder: Encoder) -> dict[str, Any]:
    """What a checkpoint of a training on digits holds, but for what only a training needs."""
    model = Classifier(encoder, 10, [f"class {number}" for number in range(10)])
    return {"hyper_parameters": dict(model.hparams), "data": describe(Digits()), "state_dict": model.state_dict()}


@pytest.fixture
def checkpoint() -> dict[str, Any]:
    return checkpoint_of(ImageEncoder((1, 8, 8), Softmax(), dim=8, depth=1, heads=1))


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A checkpoint of a timm model whose settings ask for timm's weights."""
    content = checkpoint_of(TimmEncoder("test_vit", Verma(k=4), (1, 32, 32), pretrained=False))
    content["hyper_parameters"]["encoder"]["init_args"]["pretrained"] = True
    torch.save(content, tmp_path / "timm.ckpt")
    return tmp_path / "timm.ckpt"


def test_a_model_that_asks_for_weights_of_the_network_has_its_own(
    pretrained: Path, tmp_path: Path, no_network: list[Any]
) -> None:
    weights = torch.load(pretrained, weights_only=True)["state_dict"]
    model = longseq.load(pretrained)
    assert all(torch.equal(value, weights[name]) for name, value in model.model.state_dict().items())
    model.save_pretrained(tmp_path / "shared")
    settings = json.loads((tmp_path / "shared/config.json").read_text())
    settings["classifier"]["encoder"]["init_args"]["pretrained"] = True
    (tmp_path / "shared/config.json").write_text(json.dumps(settings))
    shared = longseq.load(tmp_path / "shared")
    assert all(torch.equal(value, weights[name]) for name, value in shared.model.state_dict().items())
    assert no_network == []


@pytest.mark.parametrize("named", [True, "weights.safetensors", 3, [True], {"a": 1}])
def test_what_stands_for_pretrained_in_a_checkpoint_is_not_looked_at(
    named: object, pretrained: Path, no_network: list[Any]
) -> None:
    checkpoint = torch.load(pretrained, weights_only=True)
    checkpoint["hyper_parameters"]["encoder"]["init_args"]["pretrained"] = named
    torch.save(checkpoint, pretrained)
    assert isinstance(model_and_data(pretrained)[0].encoder, TimmEncoder)
    assert no_network == []


WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "not numbers": lambda weight: torch.full_like(weight, float("nan")),
    "infinite": lambda weight: torch.full_like(weight, float("inf")),
    "integers": lambda weight: weight.to(torch.int32),
    "complex numbers": lambda weight: weight.to(torch.complex64),
    "truths": lambda weight: weight > 0,
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_no_finite_floats_are_named(kind: str, checkpoint: dict[str, Any], tmp_path: Path) -> None:
    checkpoint["state_dict"]["head.bias"] = WEIGHTS[kind](checkpoint["state_dict"]["head.bias"])
    torch.save(checkpoint, tmp_path / "wrong.ckpt")
    write_model_folder(checkpoint, tmp_path / "shared")
    for path in (tmp_path / "wrong.ckpt", tmp_path / "shared"):
        with pytest.raises(CheckpointError, match=rf"^{path}: (head\.bias )?holds .*; give another$"):
            longseq.load(path)


def test_a_weight_of_one_number_that_claims_a_terabyte_is_named(checkpoint: dict[str, Any], tmp_path: Path) -> None:
    checkpoint["state_dict"]["head.bias"] = torch.zeros(1).expand(2**38)
    torch.save(checkpoint, tmp_path / "wrong.ckpt")
    with pytest.raises(
        CheckpointError, match=r"wrong\.ckpt: head\.bias holds less than its shape \(\d+,\) says; give "
    ):
        read_checkpoint(tmp_path / "wrong.ckpt")


NAMES: list[Any] = [[3] * 10, ["a", None], "0123456789", {"a": 1}, [["a"]] * 10, 7]


@pytest.mark.parametrize("names", NAMES)
def test_class_names_that_are_no_texts_are_named(names: Any, checkpoint: dict[str, Any], tmp_path: Path) -> None:
    checkpoint["hyper_parameters"]["class_names"] = names
    torch.save(checkpoint, tmp_path / "wrong.ckpt")
    write_model_folder(checkpoint, tmp_path / "shared")
    for path in (tmp_path / "wrong.ckpt", tmp_path / "shared"):
        with pytest.raises(
            CheckpointError, match=rf"^{path}: class_names holds something other than texts; give another$"
        ):
            longseq.load(path)


@pytest.mark.parametrize("name", ["predict", "test", "validate"])
def test_a_command_fetches_no_data_because_a_checkpoint_says_so(
    name: str, checkpoint: dict[str, Any], tmp_path: Path, no_network: list[Any], command
) -> None:
    given = {"root": str(tmp_path / "data"), "download": True, "size": 8}
    checkpoint["data"] = {"class_path": "datamodules.TinyImageNet", "init_args": given}
    torch.save(checkpoint, tmp_path / "fetching.ckpt")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    of_predict = ["--input", tmp_path / "a.png"] if name == "predict" else []
    done = command(name, "--ckpt_path", tmp_path / "fetching.ckpt", "--trainer.accelerator", "cpu", *of_predict)
    assert done.code == 3 and "set data.download to true" in done.error
    assert no_network == [] and not (tmp_path / "data").exists()


def test_a_model_names_no_data_to_fetch(checkpoint: dict[str, Any], tmp_path: Path, no_network: list[Any]) -> None:
    given = {"root": str(tmp_path / "data"), "download": True, "size": None}
    checkpoint["data"] = {"class_path": "datamodules.TinyImageNet", "init_args": given}
    torch.save(checkpoint, tmp_path / "fetching.ckpt")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    model = longseq.load(tmp_path / "fetching.ckpt")
    with pytest.raises(DataError, match="no tiny-imagenet-200 with train and "):
        model.predict(str(tmp_path / "a.png"))
    assert no_network == [] and not (tmp_path / "data").exists()


def zipped_again(content: dict[str, Any], folder: Path, compression: int, times: int = 1) -> Path:
    """A checkpoint whose zip is written by another program, which names the bytes of each large entry several times."""
    torch.save(content, folder / "plain.ckpt")
    with zipfile.ZipFile(folder / "plain.ckpt") as plain, zipfile.ZipFile(folder / "b.ckpt", "w", compression) as other:
        for part in plain.infolist():
            other.writestr(part.filename, plain.read(part))
        large = [part for part in other.infolist() if part.file_size > 2**20]
        other.filelist += large * (times - 1)
    return folder / "b.ckpt"


@pytest.mark.parametrize(("compression", "times"), [(zipfile.ZIP_DEFLATED, 1), (zipfile.ZIP_STORED, 3)])
def test_a_checkpoint_that_becomes_larger_than_its_file_is_named_before_it_is_read(
    compression: int, times: int, checkpoint: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint["state_dict"]["more"] = torch.zeros(2**26)
    path = zipped_again(checkpoint, tmp_path, compression, times)
    peak = peak_of(torch.device("cpu"))
    with pytest.raises(CheckpointError, match=rf"^{path}: would become larger than its file, .*; give another$"):
        read_checkpoint(path)
    assert peak() < 2**27


def test_settings_of_lists_that_hold_a_list_twice_are_named(checkpoint: dict[str, Any], tmp_path: Path) -> None:
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    checkpoint["hyper_parameters"]["class_names"] = laughs
    torch.save(checkpoint, tmp_path / "wrong.ckpt")
    with pytest.raises(CheckpointError, match=r"wrong\.ckpt: not a checkpoint of longseq; give one that fit "):
        read_checkpoint(tmp_path / "wrong.ckpt")


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("trials", [60, pytest.param(2000, marks=pytest.mark.thorough)])
def test_a_model_with_any_byte_changed_is_read_or_one_line(
    trials: int, form: str, checkpoint: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(checkpoint, tmp_path / "model.ckpt")
    write_model_folder(checkpoint, tmp_path / "shared")
    path = tmp_path / ("model.ckpt" if form == "file" else "shared")
    file = path if form == "file" else path / "model.safetensors"
    whole, chance = file.read_bytes(), random.Random(1)
    ends = [*range(min(len(whole), 4096)), *range(max(len(whole) - 4096, 0), len(whole))]  # where descriptions are
    told = []
    for _ in range(trials):
        changed = bytearray(whole)
        for place in chance.sample(ends, 3):
            changed[place] = chance.randrange(256)
        file.write_bytes(changed[: chance.choice([len(whole), len(whole), chance.randrange(len(whole))])])
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            told.append(str(error))
    assert told
    assert all(line.startswith(f"{path}: ") and ";" in line and "\n" not in line for line in told)
