"""Names of files and classes in a command's output: one row for a name, and no characters that control the terminal."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from longseq.cli.names import escaped, shown

ROOT = Path(__file__).parents[2]
IMAGES = str(ROOT / "configs/image/folder.yaml")
SHORT = [
    "--model.encoder.dim", "8", "--model.encoder.depth", "1",
    "--trainer.max_steps", "1", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1",
    "--trainer.enable_progress_bar", "false",
]  # fmt: skip
PLAIN = ["x.png", "Été 2024.png", "画像.png", "a\u202fb.png", "👩\u200d🔬.png", 'it\'s $5 "%s" {x}.png']
HOSTILE = [
    "a\nb\t0\t1.0000.png", "\x1b[2J\x1b[31mred.png", "\r\x07.png", "a\\nb.png", "back\\slash\\.png", "\x9b31m.png",
    "\u202egnp.exe.png", "\u2028line.png", os.fsdecode(b"latin \xe9\xff.png"), "\x7f.png",
]  # fmt: skip


@pytest.mark.parametrize("name", [*PLAIN, *HOSTILE], ids=ascii)
def test_bash_has_an_escaped_name_back(name: str) -> None:
    line = escaped(name)
    assert line.encode().splitlines() == [line.encode()] and "\x1b" not in line and "\t" not in line
    back = subprocess.run(
        ["bash", "-c", 'printf %b "$1"', "-", line], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert back.stdout == os.fsencode(name)
    assert (line == name) == (name in PLAIN)
    assert shown(shown(name)) == shown(name), "a line that was made of shown names is not made longer"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of images: one class has a hostile name, and so have the images."""
    for label in ("a\t", "\x1b[31m\n\\"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number, name in enumerate(HOSTILE):
            Image.new("L", (8, 8), 2 * number + (label == "a\t")).save(tmp_path / "data" / label / name)
    return tmp_path / "data"


def test_predict_prints_a_row_for_each_file(command: Callable, images: Path) -> None:
    assert command("fit", "--config", IMAGES, "--data.root", images, *SHORT).code == 0
    folder = images / "a\t"
    done = command("predict", "--ckpt_path", "runs/data/0/last.ckpt", "--input", folder)
    assert done.code == 0, done.err
    rows = [line.split("\t") for line in done.out.split("\n")[:-1]]
    assert sorted(path for path, _, _ in rows) == sorted(escaped(str(folder / name)) for name in HOSTILE)
    assert {label for _, label, _ in rows} <= {r"\x1b[31m\n\\", r"a\t"}
    assert "\x1b" not in done.out


def test_stats_check_and_errors_keep_to_their_lines(command: Callable, images: Path) -> None:
    data = ["--data", "ImageFolder", "--data.root", images]
    done = command("stats", *data)
    assert r"train samples of each class: \x1b[31m\n\\ " in done.out, done.err
    for name in HOSTILE[:2]:
        (images / "a\t" / name).write_bytes(b"broken")
    done = command("check", *data)
    assert done.code == 3
    lines = done.out.strip().split("\n")
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(escaped(f"a\t/{name}") for name in HOSTILE[:2])
    done = command("fit", "--config", IMAGES, "--data.root", images, *SHORT)
    assert (done.code, done.err.count("\n"), "\x1b" in done.err + done.out) == (3, 1, False)
    done = command("fit", "--resume", "\x1b[31m\n")
    assert done.err == "error: resume: \\x1b[31m\\n is not a run folder; give one such as runs/digits/0\n"
