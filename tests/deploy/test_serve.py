"""The snippets of docs/serve.md run as they are."""

import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

import longseq

PAGE = "docs/serve.md"
TEXT = (Path(__file__).parents[2] / PAGE).read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model of FSDD's form, where the snippets look for it, and a clip."""
    from small_sets import SMALL

    from datamodules import FSDD
    from longseq.cli import main

    folder = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        SMALL[FSDD](folder, patch)
    small = ["--model.encoder.dim", "16", "--model.encoder.depth", "1", "--trainer.accelerator", "cpu"]
    root = ["--data.root", str(folder), "--trainer.default_root_dir", str(folder), "--trainer.max_epochs", "1"]
    main(["fit", "--config", "audio/fsdd", *small, *root])
    main(["export", "--ckpt_path", str(folder / "runs/fsdd/0/best.ckpt"), "--out", str(folder / "model.onnx")])
    soundfile.write(folder / "clip.wav", np.random.default_rng(0).normal(0, 0.1, 4000), 8000)
    return folder


def snippet(word: str) -> str:
    (found,) = (each for each in SNIPPETS if word in each)
    return found


@pytest.mark.thorough
def test_the_onnx_snippet_names_a_digit(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    exec(snippet("np.zeros((1, 4000)"), {})
    assert capsys.readouterr().out.strip() in set("0123456789")


@pytest.mark.thorough
def test_the_image_snippet_answers_as_longseq_does(
    digits_run: Path, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    checkpoint = digits_run / "best.ckpt"
    assert command("export", "--ckpt_path", checkpoint, "--out", tmp_path / "images.onnx").code == 0
    pixels = np.random.default_rng(0).integers(256, size=(30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((300, 400)).save(tmp_path / "photo.jpg")
    exec(snippet("images.onnx"), {})
    (expected,) = longseq.load(checkpoint).predict(tmp_path / "photo.jpg", top=1)
    assert capsys.readouterr().out.strip() == expected.answers[0].class_name


def test_the_notebook_snippet_prints_three_classes(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    exec(snippet("found.answers:"), {})
    assert re.fullmatch(r"(\d: 0\.\d\d\n){3}", capsys.readouterr().out)


def test_the_loop_gives_probabilities(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    scope: dict = {}
    exec(snippet("task.probabilities"), scope)
    assert scope["probabilities"].shape == (2, 10)
    assert scope["probabilities"].sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_the_service_answers_and_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import testclient

    monkeypatch.chdir(folder)
    (folder / "service.py").write_text(snippet("FastAPI"))
    monkeypatch.syspath_prepend(folder)
    import service

    client = testclient.TestClient(service.app)
    answer = client.post("/predict", content=(folder / "clip.wav").read_bytes())
    assert answer.status_code == 200 and len(answer.json()) == 3 and 0 < sum(answer.json().values()) <= 1.0001
    for query, name in (("", "sound"), ("?name=my%20clip.wav", "my clip.wav")):
        broken = client.post(f"/predict{query}", content=b"no sound")
        detail = broken.json()["detail"]
        assert broken.status_code == 400 and detail.startswith(f"{name}: ") and tempfile.gettempdir() not in detail
    refused = client.post("/predict?top=0", content=(folder / "clip.wav").read_bytes())
    assert refused.status_code == 400 and "top must be in 1..10" in refused.json()["detail"]
    sys.modules.pop("service")
