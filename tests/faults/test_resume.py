"""A training that was killed and resumed equals, bit for bit, one that never stopped."""

import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.cli.runs.folders import numbered
from longseq.deploy._formats import run_onnx
from longseq.files.checkpoint import read_any
from longseq.files.storage import write_checkpoint

ROOT = Path(__file__).parents[2]
DIE = Path(__file__).with_name("fit_and_die.py")
FIT = [
    "fit", "--config", str(ROOT / "configs/image/digits.yaml"), "--model.encoder.dim", "16",
    "--model.encoder.depth", "2", "--trainer.max_epochs", "3", "--trainer.log_every_n_steps", "1",
    "--data.batch_size", "140",
]  # fmt: skip
SETTINGS = {
    "plain": [],
    # few samples, because a processor without bfloat16 takes ten times as long
    "bf16, accumulation, workers, augmentation": [
        "--data.batch_size", "20", "--trainer.limit_train_batches", "10", "--trainer.limit_val_batches", "2",
        "--trainer.limit_test_batches", "1", "--trainer.precision", "bf16-mixed",
        "--trainer.accumulate_grad_batches", "2", "--data.num_workers", "2", "--data.augment+=RandomErasing",
        "--model.mix", "MixUp",
    ],
    "an end within an epoch": [
        "--trainer.max_epochs", "-1", "--trainer.max_steps", "14", "--trainer.val_check_interval", "7",
        "--trainer.check_val_every_n_epoch", "null",
    ],
    "steps": ["--trainer.max_epochs", "-1", "--trainer.max_steps", "25"],
    "steps, every second epoch validated": [
        "--trainer.max_epochs", "-1", "--trainer.max_steps", "25", "--trainer.check_val_every_n_epoch", "2",
    ],
    "two processes": ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"],
    "parts": [
        "--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "FullySharded",
        "--trainer.strategy.save_distributed_checkpoint", "true",
    ],
}  # fmt: skip
THOROUGH = pytest.mark.thorough
# an epoch has 10 training batches and 2 validation batches; further tests stop a plain training in the middle of an
# epoch, and at its last batch before the validation
KILLS = [
    ("plain", "on_validation_batch_end", 2, "SIGINT", 0),
    pytest.param("plain", "on_validation_end", 2, "SIGKILL", 0, marks=THOROUGH),
    ("plain", "on_train_batch_start", 14, "SIGKILL", 0),  # resumes from the checkpoint of an epoch's end
    pytest.param("plain", "on_save_checkpoint", 4, "SIGKILL", 0, marks=THOROUGH),
    pytest.param("bf16, accumulation, workers, augmentation", "on_train_batch_end", 13, "SIGTERM", 0, marks=THOROUGH),
    # in the last validation
    pytest.param("an end within an epoch", "on_validation_batch_end", 3, "SIGTERM", 0, marks=THOROUGH),
    # these resume from the checkpoint of an epoch's end, after which nothing was validated in two of them
    ("an end within an epoch", "on_train_batch_start", 12, "SIGKILL", 0),
    pytest.param("steps", "on_train_batch_start", 14, "SIGKILL", 0, marks=THOROUGH),
    pytest.param("steps, every second epoch validated", "on_train_batch_start", 14, "SIGKILL", 0, marks=THOROUGH),
    ("two processes", "on_train_batch_end", 7, "SIGTERM", 0),
    pytest.param("two processes", "on_train_batch_end", 7, "SIGTERM", 1, marks=THOROUGH),
]
EXIT = {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}


def run(folder: Path, *command: Any) -> subprocess.CompletedProcess[str]:
    return forked.run(*command, cwd=folder)


def resumed(folder: Path, *arguments: str) -> Path:
    done = run(folder, ROOT / "train.py", *arguments, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    return numbered(folder / "runs/digits")[-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """Runs that were never stopped: one for every setting, trained when a test first needs it."""
    made: dict[str, Path] = {}

    def of(setting: str) -> Path:
        if setting not in made:
            folder = tmp_path_factory.mktemp("whole")
            done = run(folder, ROOT / "train.py", *FIT, *SETTINGS[setting])
            assert done.returncode == 0, done.stderr[-3000:]
            made[setting] = folder / "runs/digits/0"
        return made[setting]

    return of


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{key}/{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{key}/{number}")
    else:
        yield key, value.tolist() if isinstance(value, torch.Tensor) else value


def state(run: Path) -> dict[str, Any]:
    """The last checkpoint without paths and names: weights, optimizer, schedule, loops and generators."""
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    # the current score is of the last checkpoint that was the best, and of this process
    left_out = (".ckpt", "/current_score")
    return {
        key: value
        for key, value in leaves(checkpoint)
        if not isinstance(value, str) and not any(part in key for part in left_out)
    }


def curves(run: Path) -> dict[str, list[tuple[int, str]]]:
    """What a run has logged: values as text, so that NaN equals NaN."""
    events = EventAccumulator(*map(str, run.glob("*-seed*")), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("throughput/")]
    return {tag: [(point.step, repr(point.value)) for point in events.Scalars(tag)] for tag in tags}


def assert_equal(ours: Path, theirs: Path) -> None:
    mine, other = state(ours), state(theirs)
    assert mine.keys() == other.keys()
    assert {key: (mine[key], other[key]) for key in mine if mine[key] != other[key]} == {}
    assert any("optimizer_states" in key for key in mine) and any("generators" in key for key in mine)
    assert curves(ours) == curves(theirs)  # the same points, none of them twice


@pytest.mark.parametrize(("setting", "hook", "count", "name", "rank"), KILLS)
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(
    setting: str, hook: str, count: int, name: str, rank: int, whole, tmp_path: Path
) -> None:
    arguments = [*FIT, *SETTINGS[setting]]
    killed = run(tmp_path, DIE, hook, count, name, rank, *arguments)
    assert killed.returncode == EXIT[name], killed.stderr[-3000:]
    if name != "SIGKILL":
        last = killed.stderr.strip().split("\n")[-1]
        assert last.startswith(f"{name}: saved runs/digits/0/last.ckpt after step ")
        assert last.endswith("continue with --resume runs/digits/0")
        assert "Traceback" not in killed.stderr
    ours, theirs = resumed(tmp_path, *arguments), whole(setting)
    assert_equal(ours, theirs)
    assert (ours / "metrics.json").read_text() == (theirs / "metrics.json").read_text()


@THOROUGH
def test_a_run_that_resumed_before_a_validation_and_was_killed_after_it_draws_the_same_numbers(whole, tmp_path) -> None:
    stopped = run(tmp_path, DIE, "on_train_batch_end", 10, "SIGTERM", 0, *FIT)
    assert stopped.returncode == EXIT["SIGTERM"], stopped.stderr[-3000:]
    killed = run(tmp_path, DIE, "on_train_batch_start", 1, "SIGKILL", 0, *FIT, "--resume")
    assert killed.returncode == EXIT["SIGKILL"], killed.stderr[-3000:]
    assert_equal(resumed(tmp_path, *FIT), whole("plain"))


@THOROUGH
def test_a_run_killed_before_a_validation_in_the_middle_of_an_epoch_goes_on_with_it(tmp_path: Path) -> None:
    arguments = [*FIT, "--trainer.val_check_interval", "2", "--trainer.limit_train_batches", "4"]
    (tmp_path / "whole").mkdir()
    assert run(tmp_path / "whole", ROOT / "train.py", *arguments).returncode == 0
    expected = tmp_path / "whole/runs/digits/0"
    assert [step for step, _ in curves(expected)["val/loss"]] == [1, 3, 5, 7, 9, 11]
    killed = run(tmp_path, DIE, "on_train_batch_end", 2, "SIGTERM", 0, *arguments)
    assert killed.returncode == EXIT["SIGTERM"], killed.stderr[-3000:]
    assert_equal(resumed(tmp_path, *arguments), expected)


# parts that were killed while they were written for the first time: killed before anything names them
KILLED_IN_ITS_FIRST_CHECKPOINT = """
import os, signal, sys
from longseq.cli import main
from longseq.files import parts as sharded
sharded.write_checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


def test_a_run_killed_in_its_first_checkpoint_of_parts_starts_anew(tmp_path: Path) -> None:
    few = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
    arguments = [*FIT, *SETTINGS["parts"], *few, "--trainer.devices", "1", "--trainer.limit_test_batches", "1"]
    killed = run(tmp_path, "-c", KILLED_IN_ITS_FIRST_CHECKPOINT, *arguments)
    assert killed.returncode == EXIT["SIGKILL"], killed.stderr[-3000:]
    done = run(tmp_path, ROOT / "train.py", *arguments, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resume: no unfinished run of digits in .: starting a new one" in done.stdout
    assert (tmp_path / "runs/digits/1/metrics.json").is_file()


@THOROUGH
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("setting", "seed"), [("plain", 0), ("plain", 1), ("parts", 2)])
def test_kills_at_random_moments(setting: str, seed: int, whole, tmp_path: Path) -> None:
    """TORTURE kills (4 by default) are shared by two runs, and a third one, of parts, has a quarter as many; the result
    is the same after any number of kills."""
    generator = random.Random(seed)
    kills, longest = int(os.environ.get("TORTURE", "4")) // 2, 3.0
    if setting == "parts":
        kills, longest = kills // 2, 10.0  # two processes take longer to start and to save
    arguments = [*FIT, *SETTINGS[setting], "--checkpoint_minutes", "0.002"]  # saves every few steps
    for _ in range(kills):
        try:
            done = forked.run(
                ROOT / "train.py", *arguments, "--resume", cwd=tmp_path, timeout=generator.uniform(0.5, longest)
            )  # at the timeout, the run is killed with SIGKILL
        except subprocess.TimeoutExpired:
            continue
        assert done.returncode == 0, done.stderr[-3000:]
    last = resumed(tmp_path, *arguments)
    mine, other = (read_any(path / "last.ckpt") for path in (last, whole(setting)))
    for part in ("state_dict", "optimizer_states"):
        assert dict(leaves(mine[part])) == dict(leaves(other[part]))


@THOROUGH
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["folds", "sweep", "onnx", "safetensors"])
def test_a_command_that_was_killed_gives_a_whole_result_when_it_is_given_again(
    name: str, whole, tmp_path: Path
) -> None:
    """It is killed TORTURE / 20 times (2 by default) at random moments. A killed sweep leaves the training that it
    started, and another sweep that comes to the same run names it."""
    few = ["--trainer.max_epochs", "2", "--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "1"]
    few += ["--trainer.limit_test_batches", "1"]
    export = ["export", "--ckpt_path", whole("plain") / "best.ckpt", "--format", name, "--out", "model"]
    config = ["--config", ROOT / "configs/image/digits.yaml"]
    grid = ["--grid", "model.encoder.attention.k=4,8", "--seeds", "1", "--flags", json.dumps(few)]
    command, result = {
        "folds": ([*FIT, *few, "--folds", "2", "--resume"], "runs/digits/*/folds.csv"),
        "sweep": (["sweep", *config, *grid], "sweep/table.csv"),
        "onnx": (export, "model"),
        "safetensors": (export, "model/*"),
    }[name]
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()

    def to_its_end(folder: str) -> subprocess.CompletedProcess[str]:
        return forked.run(ROOT / "train.py", *command, cwd=tmp_path / folder, timeout=2000)

    assert to_its_end("whole").returncode == 0
    generator = random.Random(0)
    for _ in range(max(int(os.environ.get("TORTURE", "0")) // 20, 2)):
        longest = 20 if name == "sweep" else 5
        with suppress(subprocess.TimeoutExpired):
            forked.run(ROOT / "train.py", *command, cwd=tmp_path / "killed", timeout=generator.uniform(0.2, longest))
    done = to_its_end("killed")
    while "is being trained by process" in done.stderr:
        time.sleep(1)
        done = to_its_end("killed")
    assert done.returncode == 0, done.stderr[-3000:]
    found = {folder: sorted((tmp_path / folder).glob(result)) for folder in ("whole", "killed")}
    assert [path.name for path in found["killed"]] == [path.name for path in found["whole"]] != []
    if name == "onnx":
        images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
        (ours,), (theirs,) = found.values()
        assert torch.equal(run_onnx(ours)(images), run_onnx(theirs)(images))
    else:
        ours, theirs = (
            [re.sub("runs/digits/.*?,", "", path.read_text("latin-1")) for path in of] for of in found.values()
        )
        assert ours == theirs
    assert list((tmp_path / "killed").glob(".*")) == []


@pytest.mark.parametrize(("workers", "locale"), [(1, None), pytest.param(2, "de_DE.UTF-8", marks=THOROUGH)])
def test_losses_are_the_same_on_any_number_of_workers_from_another_folder_and_under_another_locale(
    workers: int, locale: str | None, whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if locale is not None:
        monkeypatch.setenv("LC_ALL", locale)
    (tmp_path / "elsewhere").mkdir()
    command = [ROOT / "train.py", *FIT, "--data.num_workers", workers]
    done = forked.run(*command, cwd=tmp_path / "elsewhere", fresh=locale is not None)
    assert done.returncode == 0, done.stderr[-3000:]
    assert curves(tmp_path / "elsewhere/runs/digits/0") == curves(whole("plain"))


def test_a_damaged_checkpoint_is_passed_over_and_named(whole, tmp_path: Path) -> None:
    run(tmp_path, DIE, "on_train_batch_end", 23, "SIGTERM", 0, *FIT)
    last = tmp_path / "runs/digits/0/last.ckpt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    done = run(tmp_path, ROOT / "train.py", *FIT, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resume: runs/digits/0/last.ckpt: damaged, because its SHA-256 differs from its .sha256 file" in done.stderr
    assert "resume: continuing from runs/digits/0/best.ckpt" in done.stdout
    assert_equal(tmp_path / "runs/digits/0", whole("plain"))


def test_a_run_folder_can_be_named_and_its_own_configuration_is_used(whole, tmp_path: Path) -> None:
    run(tmp_path, DIE, "on_train_batch_end", 13, "SIGTERM", 0, *FIT)
    done = run(tmp_path, ROOT / "train.py", "fit", "--resume", "runs/digits/0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equal(tmp_path / "runs/digits/0", whole("plain"))


def test_a_moved_run_goes_on_with_its_best_score_and_with_its_optimizer_only(whole, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere/0"
    shutil.copytree(whole("plain"), moved)
    checkpoint = torch.load(moved / "last.ckpt", weights_only=True)
    (best,) = (state for name, state in checkpoint["callbacks"].items() if name.startswith("BestCheckpoint"))
    best["best_model_score"] = best["kth_value"] = torch.tensor(0.999)  # a score that no later epoch reaches
    best["best_k_models"] = dict.fromkeys(best["best_k_models"], torch.tensor(0.999))
    write_checkpoint(checkpoint, moved / "last.ckpt")
    before = {name: (moved / name).read_bytes() for name in ("best.ckpt", "config.yaml")}

    done = run(tmp_path, ROOT / "train.py", "fit", "--resume", moved, "--model.optimizer", "sgd")
    assert done.returncode == 2
    assert "error: model.optimizer: sgd cannot use the state of the checkpoint's adamw" in done.stderr
    assert before == {name: (moved / name).read_bytes() for name in before}

    done = run(tmp_path, ROOT / "train.py", "fit", "--resume", moved, "--trainer.max_epochs", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((moved / "metrics.json").read_text())["val/accuracy"] == pytest.approx(0.999)
    assert (moved / "best.ckpt").read_bytes() == before["best.ckpt"]

    (moved / "config.yaml").unlink()
    done = run(tmp_path, ROOT / "train.py", "fit", "--resume", moved)
    assert (done.returncode, "config.yaml: cannot be read" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume", "no/such/run"], "error: resume: no/such/run is not a run folder"),
        (["--resume"], "error: resume: no run is named"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run(tmp_path, ROOT / "train.py", "fit", *arguments)
    assert done.returncode == 2
    assert done.stderr.strip().split("\n")[-1].startswith(said)
