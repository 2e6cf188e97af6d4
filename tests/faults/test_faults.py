"""Faults of real machines, caused in real processes: every fault ends with its own exit code and one line."""

import errno
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import pytest
import pytorch_lightning as pl
import torch
import yaml
from test_resume import DIE, FIT, ROOT, SETTINGS, run

from datamodules import Digits
from longseq import ImageEncoder, Softmax
from longseq.cli.errors.machine import fault_of_machine, replace_port_in_use
from longseq.files.checkpoint import good_checkpoints
from longseq.files.storage import CheckpointError, StorageError, read_whole, write_checkpoint
from longseq.training import Classifier
from longseq.training.divergence import DivergenceError

SHORT = [*FIT, "--trainer.max_epochs", "1"]


def processes_in(folder: Path) -> list[str]:
    """The processes that have this folder as their working folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may end before its files are read
            if (process / "cwd").readlink() == folder and "Z" not in (process / "stat").read_text().split(")")[1][:3]:
                found.append(process.name)
    return found


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stderr.strip().split("\n")[-1]


# Divergence


def test_a_loss_that_is_not_finite_ends_with_5_and_a_finite_checkpoint(tmp_path: Path) -> None:
    done = run(tmp_path, ROOT / "train.py", *FIT, "--model.learning_rate", "1e30", "--checkpoint_minutes", "1e-9")
    assert done.returncode == 5
    said = last_line(done)
    assert re.match(r"error: diverged: (the loss|a weight) is no longer finite at step \d+, learning rate ", said)
    assert "--skip_bad_steps" in said
    for path in (tmp_path / "runs/digits/0").glob("*.ckpt"):
        assert all(weight.isfinite().all() for weight in read_whole(path)["state_dict"].values())


class _Encoder(ImageEncoder):
    """Its output is not finite in the steps listed in bad."""

    bad: tuple[int, ...] = ()
    calls = -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(inputs) * (float("nan") if self.training and self.calls in self.bad else 1.0)


def _train(bad: tuple[int, ...], skip: int, batches: int = 1) -> Classifier:
    torch.manual_seed(0)
    encoder = _Encoder((1, 8, 8), Softmax(), dim=8, depth=1, heads=1)
    encoder.bad = bad
    model = Classifier(encoder, 10)
    model.bad_steps.allowed = skip
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=8, accumulate_grad_batches=batches, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=Digits())
    return model


def test_bad_steps_in_a_row_are_left_out_as_many_as_allowed() -> None:
    model = _train((2, 3, 6), skip=2)
    assert all(weight.isfinite().all() for weight in model.parameters())
    with pytest.raises(DivergenceError, match=r"the loss .* at step 4, learning rate .*, training samples \d+, \d+"):
        _train((2, 3, 4), skip=2)


def test_a_step_of_several_batches_is_left_out_whole_and_counts_once() -> None:
    first, last, both = (_train(bad, skip=1, batches=2).state_dict() for bad in ((4,), (5,), (4, 5)))
    for name, weight in first.items():
        assert torch.equal(weight, last[name]) and torch.equal(weight, both[name]), name
    for bad in ((5, 7), (4, 6)):
        with pytest.raises(DivergenceError, match="at step 3"):
            _train(bad, skip=1, batches=2)


def test_a_check_some_steps_later_names_the_first_bad_step_and_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[str]] = []
    step = Classifier.training_step

    def seen(self: Classifier, batch: Any, batch_idx: int) -> torch.Tensor:
        loader: Any = self.trainer.train_dataloader
        rows.append([str(loader.dataset.names[number]) for number in loader.sampler.batch(batch_idx)])
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", seen)
    with pytest.raises(
        DivergenceError, match=r"the loss .* at step 2, learning rate .*, training samples \d+"
    ) as error:
        _train((2, 5), skip=0)
    assert len(rows) == 8, "the host did not wait for the loss of step 2"
    assert ", ".join(rows[2]) in str(error.value)


# Storage


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.needs("mounts")
def test_a_disk_that_fills_up_ends_with_6_and_leaves_the_older_checkpoint(small_disk: Path, tmp_path: Path) -> None:
    path = small_disk / "last.ckpt"
    write_checkpoint({"global_step": 1, "weights": torch.zeros(2**18)}, path)
    with pytest.raises(StorageError, match=r"last\.ckpt: the checkpoint cannot be written \(No space left on device\)"):
        write_checkpoint({"global_step": 2, "weights": torch.zeros(2**20)}, path)
    assert read_whole(path)["global_step"] == 1
    assert [file.name for file in small_disk.iterdir() if file.suffix == ".part"] == []

    (small_disk / "filler").write_bytes(b"0" * 2_000_000)
    done = run(
        tmp_path, ROOT / "train.py", *SHORT, "--trainer.default_root_dir", small_disk, "--model.encoder.dim", "64"
    )
    assert done.returncode == 6
    assert re.search(r"error: .*MiB are free and three checkpoints take .* MiB; make room", last_line(done))


@pytest.mark.needs("mounts")
def test_a_folder_that_cannot_be_written_is_found_before_training(small_disk: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = run(tmp_path, ROOT / "train.py", *SHORT, "--trainer.default_root_dir", small_disk)
    assert done.returncode == 6
    assert re.search(r"error: .*disk/runs/digits: cannot be written \(Read-only file system\)", last_line(done))


@pytest.mark.timeout(7200)
def test_a_checkpoint_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from longseq.files.storage import write_checkpoint\n"
        "for step in range(10**6):\n"
        "    write_checkpoint({'global_step': step, 'w': torch.full((2**20,), step)}, sys.argv[1])"
    )
    path = tmp_path / "last.ckpt"
    before = -1
    for round in range(int(os.environ.get("TORTURE", "6"))):
        process = forked.start("-c", script, path, cwd=tmp_path)
        while not path.exists() or (round and path.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(0.013 * round % 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = path.stat().st_mtime_ns
        checkpoint = read_whole(path)  # raises an error if the checksum is wrong
        assert (checkpoint["w"] == checkpoint["global_step"]).all()


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "not a dictionary"])
def test_a_damaged_checkpoint_is_named_with_the_good_one_beside_it(damage: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    for path in (good, bad):
        write_checkpoint({"global_step": 1, "weights": torch.arange(1000)}, path)
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "cut":
            bad.write_bytes(content[:1000])
        case "flipped":
            bad.write_bytes(content)
        case "foreign":
            bad.write_bytes(b"GIF89a")
        case _:
            torch.save([1], bad)
    with pytest.raises(CheckpointError, match=rf"last\.ckpt: .*; use {good}, the newest good one"):
        read_whole(bad)
    assert [checkpoint.path for checkpoint in good_checkpoints(tmp_path)[0]] == [good]


# Memory, workers and ranks


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0"), 6, "memory: 3.50 GiB more"),
        (RuntimeError("DefaultCPUAllocator: you tried to allocate 4294967296 bytes."), 6, "memory: 4096 MiB more"),
        (MemoryError(), 6, "memory: not enough"),
        (OSError(errno.ENOSPC, "No space left on device"), 6, "disk: no space left"),
        (OSError(errno.EFBIG, "File too large"), 6, "disk: a file would be larger than ulimit -f lets it be; raise it"),
        (OSError(errno.EMFILE, "Too many open files"), 6, "files: more are open than the "),
        (OSError("Caught OSError in DataLoader worker process 0.\n[Errno 24] Too many open files: 'x'"), 6, "files: "),
        (RuntimeError("received 0 items of ancdata"), 6, "lower data.num_workers"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), 7, "worker 7 is killed by signal"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. "), 143, "SIGTERM: stopped;"),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), 7, "worker 7, 8 exited unexpectedly"),
    ],
)  # fmt: skip
def test_what_torch_says_of_the_machine_is_one_line(error: Exception, code: int, said: str) -> None:
    message, exit_code = fault_of_machine(error) or ("", 0)
    assert exit_code == code
    assert said in message and "\n" not in message
    assert fault_of_machine(RuntimeError("a defect of ours")) is None


LIMITED = """
import resource, sys
from longseq.cli import main
resource.setrlimit(getattr(resource, sys.argv[1]), 2 * (int(sys.argv[2]),))
main(sys.argv[3:])
"""


TOO_LARGE = r"error: (.* \(File too large\); make room|disk: a file would be larger than ulimit -f)"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("RLIMIT_NOFILE", 48, r"error: files: more are open than the 48 of ulimit -n; raise it"),
        (
            "RLIMIT_FSIZE",
            5000,
            r"error: (.* \(File too large\); make room|disk: a file would be larger than ulimit -f)",
        ),
        (
            "RLIMIT_FSIZE",
            50000,
            r"error: (.* \(File too large\); make room|disk: a file would be larger than ulimit -f)",
        ),
    ],
)
def test_a_limit_of_the_shell_is_one_line(limit: str, value: int, said: str, tmp_path: Path) -> None:
    """A file of 5,000 bytes holds no table of splits and one of 50,000 no checkpoint."""
    workers = ["--data.num_workers", "4"] if limit == "RLIMIT_NOFILE" else []
    done = run(tmp_path, "-c", LIMITED, limit, value, *SHORT, *workers)
    assert done.returncode == 6, done.stderr[-3000:]
    assert re.match(said, last_line(done))


@pytest.mark.thorough
def test_out_of_memory_says_what_fits(tmp_path: Path) -> None:
    """The flags that the error suggests do fit: the same training runs with them under the same limit. Where addresses
    are limited, the failed step may leave memory in such pieces that not even a batch of one fits any more; the error
    then says so. This depends on addresses, which are random, so it does not happen every time."""
    large = [*SHORT, "--data.batch_size", "1000", "--model.encoder.dim", "128", "--trainer.max_steps", "1"]
    large += ["--trainer.limit_val_batches", "0", "--trainer.limit_test_batches", "0"]
    for _ in range(6):
        done = run(tmp_path, DIE, "on_train_start", 1, "+700", 0, *large)
        assert done.returncode == 6, done.stderr[-2000:]
        said = last_line(done)
        if not said.endswith("what fits: none of the smaller settings that were tried"):
            break
    assert re.match(r"error: memory: \d+ MiB more could not be allocated; what fits: --data.batch_size", said)
    flags = re.search(r"(--data.batch_size \d+) (--trainer.accumulate_grad_batches \d+)", said)
    assert flags
    fitting = " ".join(flags.groups()).split()
    assert run(tmp_path, DIE, "on_train_start", 1, "+700", 0, *large, *fitting).returncode == 0


def test_a_killed_worker_ends_with_7(tmp_path: Path) -> None:
    command = [ROOT / "train.py", *FIT, "--data.num_workers", "1", "--trainer.max_epochs", "500"]
    process = forked.start(*command, cwd=tmp_path)
    children: list[str] = []
    while not list(tmp_path.glob("runs/digits/0/last.ckpt")):
        time.sleep(0.2)
        assert process.poll() is None
    while not children:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    process.wait(60)
    _, stderr = process.said()
    assert process.returncode == 7, stderr[-2000:]
    assert re.match(
        r"error: data.num_workers: worker .*; it may have run out of memory", stderr.strip().split("\n")[-1]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_for_the_workers_too_stops_a_training_in_order(number: signal.Signals, tmp_path: Path) -> None:
    """timeout, scancel and Ctrl-C send it to all processes."""
    command = [ROOT / "train.py", *FIT, "--data.num_workers", "2", "--trainer.max_epochs", "500"]
    process = forked.start(*command, cwd=tmp_path)
    while not list(tmp_path.glob("runs/digits/0/last.ckpt")):
        time.sleep(0.05)
        assert process.poll() is None, process.said()
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 4  # of training and of validation
    for worker in workers:
        os.kill(int(worker), number)
    process.send_signal(number)
    process.wait(60)
    _, stderr = process.said()
    assert process.returncode == 128 + number, stderr[-2000:]
    assert re.match(rf"{number.name}: saved .*/last.ckpt after step \d+", stderr.strip().split("\n")[-1])
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_ends_the_others_within_a_minute(rank: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run(tmp_path, DIE, "on_train_batch_end", 7, "SIGKILL", rank, *FIT, *SETTINGS["two processes"])
    assert time.monotonic() - begin < 90  # the processes take 30 of these seconds to start
    if rank == 1:
        assert done.returncode == 7
        assert re.search(r"^error: rank 1: process \d+ was ended by signal SIGKILL", done.stderr, re.MULTILINE)
    else:
        assert done.returncode == -9
    end = time.monotonic() + 10
    while processes_in(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_in(tmp_path) == []


def test_an_error_of_one_rank_alone_is_said_with_its_number(tmp_path: Path) -> None:
    large = ["--data.batch_size", "500", "--model.encoder.dim", "128"]
    done = run(tmp_path, DIE, "on_train_start", 1, "+100", 1, *SHORT, *large, *SETTINGS["two processes"])
    assert done.returncode == 7
    assert re.search(r"^error: rank 1: memory: \d+ MiB more could not be", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    done = run(tmp_path, ROOT / "train.py", *SHORT, *SETTINGS["two processes"], "--model.learning_rate", "1e30")
    assert done.returncode == 5
    assert done.stderr.count("error:") == 1 and "training samples" in done.stderr


def test_a_run_of_two_processes_that_ends_before_its_first_validation_is_whole(tmp_path: Path) -> None:
    done = run(tmp_path, ROOT / "train.py", *SHORT, "--trainer.max_steps", "2", *SETTINGS["two processes"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "runs/digits/0/metrics.json").is_file()


@pytest.mark.parametrize(("hook", "rank", "code"), [("on_train_start", 0, 143), ("on_fit_start", 1, 7)])
def test_sigterm_before_the_first_step_of_two_processes_ends_both(
    hook: str, rank: int, code: int, tmp_path: Path
) -> None:
    """If only one rank gets the signal, the error is the one for a dead rank."""
    done = run(tmp_path, DIE, hook, 1, "SIGTERM", rank, *SHORT, *SETTINGS["two processes"])
    assert done.returncode == code, done.stderr[-2000:]
    said = "SIGTERM: stopped; start it again (a training with --resume)"
    assert (said if code == 143 else f"error: rank 1: {said}") in done.stderr.split("\n")
    assert "Traceback" not in done.stderr
    assert processes_in(tmp_path) == []


def test_slurms_requeue_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {
        "JOB_ID": "17", "JOB_NAME": "train", "NTASKS": "1", "NTASKS_PER_NODE": "1", "NNODES": "1", "PROCID": "0",
        "LOCALID": "0", "NODEID": "0", "NODELIST": "localhost",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    done = run(tmp_path, DIE, "on_train_batch_end", 5, "SIGUSR1", 0, *SHORT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert read_whole(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 5


def test_a_port_in_use_is_replaced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        replace_port_in_use()
        assert "MASTER_PORT" not in os.environ
        assert f"MASTER_PORT: {port} is in use" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_PORT", port)
    replace_port_in_use()
    assert os.environ["MASTER_PORT"] == port


# Foreign code


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a module, canary, creates when it is imported."""
    song = tmp_path / "song"
    (tmp_path / "canary.py").write_text(
        f"from pathlib import Path\nPath({str(song)!r}).touch()\n"
        "class Bird:\n    def __init__(self, *args, **kwargs): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    return song


@pytest.mark.parametrize(
    "flags",
    [
        ["--data", "canary.Bird"],
        ["--model.encoder", "canary.Bird"],
        ["--model.encoder.attention", "canary.Bird"],
        ["--model.encoder.attention.class_path", "canary.Bird"],
        ["--trainer.logger", "canary.Bird"],
        ["--trainer.callbacks+=canary.Bird"],
        ["--trainer.strategy", "canary.Bird"],
        ["--config", "hostile.yaml"],
    ],
)
def test_a_class_of_a_foreign_package_is_not_imported(flags: list[str], canary: Path, tmp_path: Path, command) -> None:
    hostile = {"data": {"class_path": "canary.Bird"}, "trainer": {"callbacks": [{"class_path": "canary.Bird"}]}}
    (tmp_path / "hostile.yaml").write_text(yaml.safe_dump(hostile))
    done = command(*SHORT, *flags)
    assert (done.code, done.error[:7]) == (2, "error: ")
    assert not canary.exists()


def test_a_foreign_class_may_be_allowed(canary: Path, tmp_path: Path) -> None:
    # in its own process, because an allowed package stays allowed; the process finds canary in its working folder
    forked.run(ROOT / "train.py", *SHORT, "--allow_class", "canary", "--data", "canary.Bird", cwd=tmp_path)
    assert canary.exists()  # imported, then refused, because Bird is no data module


class _Payload:
    def __init__(self, song: Path) -> None:
        self.song = song

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.song}",)


DOORS = ["pickle", "class path of the encoder", "class path of the data", "function for the encoder", "URL"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["test", "fit", "predict", "fit from it"])
def test_a_hostile_checkpoint_runs_nothing(
    door: str, name: str, canary: Path, tmp_path: Path, monkeypatch, command
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    bird = {"class_path": "canary.Bird", "init_args": {}}
    encoder = {"class_path": "longseq.ImageEncoder", "init_args": {"attention": {"class_path": "longseq.Softmax"}}}
    (tmp_path / "hubconf.py").write_text("from canary import Bird\n")
    hub = {"repo_or_dir": str(tmp_path), "source": "local", "model": "Bird", "trust_repo": True}
    encoders = {"class path of the encoder": bird, DOORS[3]: {"class_path": "torch.hub.load", "init_args": hub}}
    checkpoint = {
        "hyper_parameters": {"encoder": encoders.get(door, encoder), "num_classes": 2},
        "data": bird if "data" in door else {"class_path": "datamodules.Digits", "init_args": {}},
        "state_dict": {},
    }
    if door == "pickle":
        checkpoint["song"] = _Payload(canary)
    torch.save(checkpoint, tmp_path / "hostile.ckpt")
    path = f"file://{tmp_path}/hostile.ckpt" if door == "URL" else tmp_path / "hostile.ckpt"
    if name == "fit from it":
        done = command(*SHORT, "--model.init_from", path)
    else:
        done = command(name, "--ckpt_path", path, *(["--input", tmp_path] if name == "predict" else []))
    assert done.code in (2, 4)
    assert done.error.startswith("error: ")
    assert not canary.exists()
