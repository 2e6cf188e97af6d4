"""A folder to share: the same model comes back, in Python and on the command line, and nothing in it is run."""

import json
import os
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from huggingface_hub import HfApi, ModelHubMixin
from safetensors import safe_open

import longseq
from longseq.arguments import ArgumentError
from longseq.attention import LSTM, Gaussian, Linformer, Mechanism, Performer, Reformer
from longseq.attention.examples import every_mechanism
from longseq.attention.sharing import Sharing
from longseq.deploy import predictor
from longseq.encoders import SpectrogramEncoder
from longseq.files.checkpoint import CheckpointError, read_checkpoint
from longseq.files.description import build, build_from, describe
from longseq.files.model_folder import read_model_folder, write_model_folder
from longseq.training import Classifier

SHARED = {"README.md", "card.png", "config.json", "model.safetensors"}


@pytest.fixture
def checkpoint(digits_run: Path) -> Path:
    return digits_run / "best.ckpt"


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    longseq.load(checkpoint).save_pretrained(tmp_path / "digits")
    return tmp_path / "digits"


def test_a_readme_of_somebody_else_is_not_shared_and_the_card_of_another_model_does_not_stay(
    checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    assert {path.name for path in folder.iterdir()} == SHARED
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(checkpoint, project / "digits.ckpt")
    (project / "README.md").write_text("# My project\n")
    (project / "card.png").write_bytes((folder / "card.png").read_bytes())
    for _ in range(2):
        longseq.load(project / "digits.ckpt").save_pretrained(folder)
        assert {path.name for path in folder.iterdir()} == SHARED - {"card.png"}
        assert "My project" not in (folder / "README.md").read_text()  # it is the Hub's card without content


def test_every_mechanism_comes_back_from_json() -> None:
    for mechanism in every_mechanism():
        assert build(json.loads(json.dumps(describe(mechanism))), Mechanism) == mechanism


# every sharing, fixed weights, drawn ones with their seeds, a layer of torch's: no other mechanism has other kinds
@pytest.mark.parametrize(
    "mechanism",
    [*(Linformer(7, sharing) for sharing in get_args(Sharing)), Linformer(7, projection=Gaussian()), Reformer(2, 16),
     Performer(), LSTM()],
    ids=repr,
)  # fmt: skip
def test_shared_weights_are_written_once_and_come_back_to_every_name(mechanism: Mechanism, tmp_path: Path) -> None:
    model = Classifier(SpectrogramEncoder(8000, 0.4, mechanism, num_mels=20, dim=16, depth=2, heads=4), 3)
    settings = {"hyper_parameters": dict(model.hparams), "data": None}
    write_model_folder({**settings, "state_dict": model.state_dict()}, tmp_path)
    came_back = read_model_folder(tmp_path)
    assert came_back["state_dict"].keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(came_back["state_dict"][name], weight), name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        places = {weight.data_ptr() for weight in model.state_dict().values()}
        assert len(file.keys()) == len(places)
    assert came_back["hyper_parameters"] == settings["hyper_parameters"]
    build_from(Classifier, came_back["hyper_parameters"]).load_state_dict(came_back["state_dict"])


def test_a_shared_folder_predicts_as_the_checkpoint_does(checkpoint: Path, folder: Path, command) -> None:
    images = list(torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8))
    of_checkpoint = longseq.load(checkpoint).predict(images)
    for shared in (longseq.load(folder), longseq.load(str(folder)), predictor.Predictor.from_pretrained(folder)):
        for first, second in zip(of_checkpoint, shared.predict(images), strict=True):
            assert torch.equal(first.probabilities, second.probabilities) and first.answers == second.answers
    quiet = ["--trainer.enable_progress_bar", "false"]
    assert command("test", "--ckpt_path", folder, *quiet).out == command("test", "--ckpt_path", checkpoint, *quiet).out
    assert {file.name for file in folder.iterdir()} == SHARED
    assert json.loads((folder / "config.json").read_text())["longseq"] == longseq.__version__


def test_export_writes_the_folder_and_a_training_starts_from_it(checkpoint: Path, tmp_path: Path, command) -> None:
    done = command("export", "--ckpt_path", checkpoint, "--format", "safetensors", "--out", tmp_path / "x")
    assert done.code == 0 and "longseq.load(" in done.out
    small = ["--model.encoder.dim", "16", "--model.encoder.depth", "2", "--trainer.max_epochs", "1"]
    root = ["--trainer.default_root_dir", tmp_path, "--trainer.accelerator", "cpu"]
    done = command("fit", "--config", "image/digits", *small, *root, "--model.init_from", tmp_path / "x")
    assert done.code == 0 and f"started from {tmp_path / 'x'}" in done.out, done.err


def test_a_model_goes_to_the_hub_and_comes_back(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a folder here: what would be sent is copied, and what would be fetched is read."""
    hub = tmp_path / "hub"
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: type("Url", (), {"repo_id": repo_id}))
    monkeypatch.setattr(
        HfApi, "upload_folder", lambda self, repo_id, folder_path, **_: str(shutil.copytree(folder_path, hub / repo_id))
    )
    model = longseq.load(folder)
    assert isinstance(model, ModelHubMixin)
    model.push_to_hub("someone/digits")
    assert {path.name for path in (hub / "someone/digits").iterdir()} == SHARED

    def fetched(repo_id: str, **_) -> str:
        return str(hub / repo_id)

    monkeypatch.setattr(predictor, "snapshot_download", fetched)
    monkeypatch.setattr(
        "huggingface_hub.hub_mixin.hf_hub_download", lambda repo_id, filename, **_: hub / repo_id / filename
    )
    images = list(torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8))
    again = longseq.load("someone/digits")
    assert [each.answers for each in again.predict(images)] == [each.answers for each in model.predict(images)]


@pytest.mark.parametrize(
    ("pixels", "what"),
    [
        (torch.full((1, 8, 8), 0.5), "pixels in 0..255, got floats up to 0.5; times 255"),
        (torch.full((1, 8, 8), float("nan")), "finite pixels in 0..255, got values from nan to nan"),
        (torch.full((1, 8, 8), -1, dtype=torch.int64), "finite pixels in 0..255, got values from -1 to -1"),
        (torch.full((1, 8, 8), 256.0), "finite pixels in 0..255, got values from 256 to 256"),
    ],
)
def test_arrays_that_are_no_pixels_are_refused(folder: Path, pixels: torch.Tensor, what: str) -> None:
    with pytest.raises(ArgumentError, match=f"^inputs must be {what}"):
        longseq.load(folder).predict(pixels)


def test_no_processes_are_started_for_a_file(folder: Path, tmp_path: Path) -> None:
    model = longseq.load(folder)
    assert model.data.num_workers == 0
    model.data.num_workers = 4  # as in a checkpoint of a training with workers
    model.save_pretrained(tmp_path / "again")
    assert longseq.load(tmp_path / "again").data.num_workers == 0


@pytest.mark.parametrize("name", sorted(SHARED))
def test_a_file_of_somebody_else_is_not_overwritten(name: str, checkpoint: Path, tmp_path: Path, command) -> None:
    (tmp_path / name).write_text("my own\n")
    done = command("export", "--ckpt_path", checkpoint, "--format", "safetensors", "--out", ".")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    said = f"out: must be a new file, or one that longseq has written, got {name}, which it has not; give another, or "
    assert done.error == f"error: {said}move that file away"
    with pytest.raises(ArgumentError, match="^save_directory must be a new file, "):
        longseq.load(checkpoint).save_pretrained(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "my own\n"}


def test_a_model_may_be_shared_again_into_its_folder_also_after_a_kill(
    folder: Path, checkpoint: Path, digits_run: Path
) -> None:
    model = longseq.load(checkpoint)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    for missing in ([], ["config.json"], ["config.json", "model.safetensors"], ["card.png"], ["README.md"]):
        for name in missing:
            (folder / name).unlink()
        model.save_pretrained(folder)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    model.save_pretrained(digits_run / "shared")
    longseq.load(digits_run / "shared").save_pretrained(folder)  # from a folder, and over that of another source
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    (folder / "card.png").write_bytes(b"of longseq 0.1, without a mark")
    model.save_pretrained(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole


def test_a_name_below_a_folder_that_is_there_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(predictor.Predictor, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match="runs/nothere: no such file"):
        longseq.load("runs/nothere")


def test_what_is_no_model_is_said_in_one_line(folder: Path, tmp_path: Path, command, monkeypatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = command("predict", "--ckpt_path", empty, "--input", tmp_path)
    assert done.code == 4 and "holds no model.safetensors and config.json" in done.err and done.err.count("\n") == 1
    for run, seconds in ((9, 5), (10, 6)):
        (empty / f"{run}").mkdir()
        (empty / f"{run}/best.ckpt").touch()
        os.utime(empty / f"{run}/best.ckpt", (seconds, seconds))
    with pytest.raises(CheckpointError, match=r"give a checkpoint such as .*empty/10/best\.ckpt$"):
        longseq.load(empty)
    (folder / "model.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(CheckpointError, match="is damaged .*; export the model again"):
        longseq.load(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"nobody/nothing: no such folder, and the Hugging Face Hub does not"):
        longseq.load("nobody/nothing")


def test_a_shared_folder_fits_its_weights_and_names_only_classes_that_are_expected(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    attention = settings["classifier"]["encoder"]["init_args"]["attention"]["init_args"]
    attention["k"] = 8
    (folder / "config.json").write_text(json.dumps(settings))
    said = r"project_keys.weight is \(16, 64\), and \(8, 64\) by its own settings; another version of longseq "
    with pytest.raises(CheckpointError, match=said):
        longseq.load(folder)
    settings["classifier"]["encoder"]["class_path"] = "subprocess.Popen"
    settings["classifier"]["encoder"]["init_args"] = {"args": ["touch", str(folder / "ran")]}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"subprocess\.Popen may not be named"):
        longseq.load(folder)
    assert not (folder / "ran").exists()
    settings["classifier"] = ["no", "settings"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="config.json is not longseq's"):
        read_checkpoint(folder)
