"""A checkpoint may have gigabytes: each command reads it once, and computes its SHA-256 once."""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import soundfile
import torch
from tones import tone

import longseq

ROOT = Path(__file__).parents[2]
ONCE = {"best.ckpt": 1}


class Counts:
    """How often the files of checkpoints were read as a whole, and hashed, since the last call of taken."""

    def __init__(self) -> None:
        self.reads, self.sums = Counter[str](), Counter[str]()

    def taken(self) -> tuple[dict[str, int], dict[str, int]]:
        counts = dict(self.reads), dict(self.sums)
        self.reads.clear()
        self.sums.clear()
        return counts


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts, plain_load, plain_digest = Counts(), torch.load, hashlib.file_digest

    def load(path, map_location=None, **options):
        if str(path).endswith(".ckpt") and map_location != "meta":  # on the meta device no tensor is read
            counts.reads[Path(path).name] += 1
        return plain_load(path, map_location=map_location, **options)

    def file_digest(file, name):
        if str(file.name).endswith(".ckpt"):  # not a file that was written and is read back
            counts.sums[Path(file.name).name] += 1
        return plain_digest(file, name)

    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    return counts


def test_load_test_and_predict_read_a_checkpoint_once_and_hash_it_once(
    command: Callable, checkpoint: Path, counts: Counts, tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "clip.wav", tone(300, 0.2, 8000), 8000)
    longseq.load(checkpoint)
    assert counts.taken() == (ONCE, ONCE)
    root = checkpoint.parents[3] / "data"
    for arguments in (["test", "--data.root", root], ["predict", "--input", "clip.wav", "--out", "found.csv"]):
        done = command(arguments[0], "--ckpt_path", checkpoint, *arguments[1:])
        assert done.code == 0, done.err
        assert counts.taken() == (ONCE, ONCE)


def test_predict_reads_once_what_has_no_sum_beside_it(
    command: Callable, checkpoint: Path, counts: Counts, tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "clip.wav", tone(300, 0.2, 8000), 8000)
    (tmp_path / "best.ckpt").write_bytes(checkpoint.read_bytes())
    assert command("predict", "--ckpt_path", "best.ckpt", "--input", "clip.wav").code == 0
    assert counts.taken() == (ONCE, ONCE)  # a stopped prediction must know its model again


def test_a_resumed_run_reads_no_tensor_to_choose_its_checkpoint(
    command: Callable, checkpoint: Path, counts: Counts
) -> None:
    small = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.accelerator", "cpu"]
    plain = ["--trainer.enable_progress_bar", "false", "--trainer.callbacks", "[]"]
    begin = [
        "fit",
        "--config",
        "image/digits",
        *small,
        *plain,
        "--trainer.max_steps",
        "2",
        "--trainer.val_check_interval",
        "1",
    ]
    assert command(*begin, "--trainer.limit_val_batches", 1).code == 0
    counts.taken()
    done = command("fit", "--resume", "runs/digits/0", "--trainer.max_steps", "3")
    assert done.code == 0, done.err
    # best.ckpt is hashed to be chosen from, and read and hashed to be tested: training may have written it anew
    assert counts.taken() == ({"last.ckpt": 1, "best.ckpt": 1}, {"last.ckpt": 1, "best.ckpt": 2})


def test_a_load_passes_through_few_folders_besides_what_it_builds(checkpoint: Path) -> None:
    """Counted are longseq's own functions, except those that the model and its data module call while they are built,
    filled with weights and moved to their device."""
    longseq.load(checkpoint)  # imports
    passed: list[tuple[str, str]] = []
    built = 0

    def note(frame: FrameType, event: str, value: object) -> None:
        nonlocal built
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        built += (name in ("_construct", "load_state_dict", "to")) * {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and not built and path.is_relative_to(ROOT / "longseq") and not name.startswith("<"):
            passed.append((str(path.parent.relative_to(ROOT)), name))

    sys.setprofile(note)
    try:
        longseq.load(checkpoint)
    finally:
        sys.setprofile(None)
    assert len({folder for folder, _ in passed}) <= 5
