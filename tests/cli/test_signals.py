"""SIGTERM ends every command with 143, Ctrl-C with 130 and a closed terminal with 129, whatever the command does."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from PIL import Image

import datamodules
from longseq.cli import settings
from longseq.files.storage import read_whole
from longseq.training import Classifier, classifier, signals
from longseq.training.recovery import Sentinel

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
FIT = [
    "fit", "--config", DIGITS, "--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.max_steps", "2",
    "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1", "--trainer.enable_progress_bar", "false",
]  # fmt: skip
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def handlers_of_its_own() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in CODES}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore SIGINT
    yield
    for number, handler in before.items():
        signal.signal(number, handler)  # Lightning leaves SIGINT ignored after a Ctrl-C


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures that an earlier test has kept would not be computed, and no signal sent."""
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    forked.run(ROOT / "train.py", *FIT, cwd=folder).check_returncode()
    Image.new("L", (8, 8)).save(folder / "image.png")
    return folder / "runs/digits/0/last.ckpt"


def sends(number: int, then: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), number)
        return then(*arguments, **keywords)

    return called


MOMENTS = {
    "fit, while the parts are built": (FIT, settings, "refuse_missing_devices"),
    "fit, while the data is set up": (FIT, datamodules.Digits, "load"),
    "fit, while the model starts from the data": (FIT, classifier, "start_from_data"),
    "fit, in the check of the validation, behind Lightning's handler": (FIT, Classifier, "validation_step"),
    "fit, before the first step": (FIT, Sentinel, "on_train_start"),
    "fit, in the test": (FIT, Classifier, "test_step"),
    "test": (["test", "--ckpt_path", "CHECKPOINT"], Classifier, "test_step"),
    "predict": (["predict", "--ckpt_path", "CHECKPOINT", "--input", "IMAGE"], Classifier, "predict_step"),
    "check": (["check", "--data", "Digits"], datamodules.Digits, "load"),
    "stats": (["stats", "--data", "Digits"], datamodules.Digits, "figures"),
    "a report": (["spectrum", "--ckpt_path", "CHECKPOINT"], datamodules.Digits, "load"),
}


# longseq's SIGTERM is a KeyboardInterrupt too: Ctrl-C is tried where another library could treat it in another way
INTERRUPTED = [moment for moment in MOMENTS if moment.endswith(("built", "handler", "report")) or moment == "test"]


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        *((signal.SIGTERM, moment) for moment in MOMENTS),
        *((signal.SIGINT, moment) for moment in INTERRUPTED),
        *((signal.SIGHUP, moment) for moment in ("check", "fit, in the test")),
    ],
)
def test_a_signal_ends_a_command_at_any_moment(
    number: signal.Signals, moment: str, command: Callable, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, kind, name = MOMENTS[moment]
    given = {"CHECKPOINT": checkpoint, "IMAGE": checkpoint.parents[3] / "image.png"}
    monkeypatch.setattr(kind, name, sends(number, getattr(kind, name)))
    done = command(*(given.get(argument, argument) for argument in arguments))
    assert done.code == CODES[number], done.err
    assert done.error == f"{number.name}: stopped; start it again (a training with --resume)"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "hook"),
    [
        (signal.SIGTERM, "on_train_batch_end"),
        (signal.SIGTERM, "on_train_end"),
        (signal.SIGHUP, "on_train_batch_end"),
    ],
)
def test_a_signal_in_a_training_is_answered_when_it_is_saved(
    number: signal.Signals, hook: str, command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a signal that comes after the last epoch was saved and before the training ends."""
    with monkeypatch.context() as patch:
        patch.setattr(Sentinel, hook, sends(number, getattr(Sentinel, hook)))
        done = command(*FIT)
    assert done.code == CODES[number], done.err
    assert re.match(rf"{number.name}: saved runs/digits/0/last.ckpt after step \d; continue with --resume", done.error)
    assert command("fit", "--resume", "runs/digits/0").code == 0


def test_a_signal_that_comes_where_python_goes_on_ends_the_command_too(
    command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finalizer:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)  # Python prints an exception from __del__ and goes on

    monkeypatch.setattr(datamodules.Digits, "figures", lambda *_: Finalizer() and {})
    done = command("stats", "--data", "Digits")
    assert done.code == 143
    assert done.err.strip().endswith("SIGTERM: stopped; start it again (a training with --resume)")


def test_nohup_keeps_its_promise(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup starts a command with SIGHUP ignored: the training goes on, and so does all that follows it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for kind, hook in ((Sentinel, "on_train_batch_end"), (Classifier, "test_step")):
        monkeypatch.setattr(kind, hook, sends(signal.SIGHUP, getattr(kind, hook)))
    done = command(*FIT)
    assert (done.code, "saved" in done.err) == (0, False), done.err


# In a terminal: its other side is closed at the first step, and then the kernel sends SIGHUP.
CLOSED_TERMINAL = """
import fcntl, os, sys, termios
from longseq.cli import main
from longseq.training.recovery import Sentinel

os.setsid()
ours, terminal = os.openpty()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
before = os.dup(2)
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
os.close(terminal)
sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))
plain = Sentinel.on_train_batch_end

def closed(*arguments):
    if ours in open_:
        os.close(open_.pop())
    print("the progress bar goes on", file=sys.stderr, flush=True)
    plain(*arguments)

open_ = [ours]
Sentinel.on_train_batch_end = closed
try:
    main(sys.argv[1:])
except SystemExit as ended:
    os.write(before, f"exit code {ended.code}".encode())
"""


def test_a_training_whose_terminal_is_closed_is_saved(tmp_path: Path) -> None:
    done = forked.run("-c", CLOSED_TERMINAL, *FIT, "--trainer.enable_progress_bar", "true", cwd=tmp_path)
    assert done.stderr == "exit code 129"
    assert read_whole(tmp_path / "runs/digits/0/last.ckpt")["global_step"] == 1


# Waiting for others

DDP = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp"]  # one word each, so that forked starts no second rank


@pytest.mark.parametrize(
    ("number", "flags", "variables", "said"),
    [
        (
            signal.SIGTERM,
            ["--trainer.devices=2"],
            {"LOCAL_RANK": "0"},
            r"LOCAL_RANK=0 is set; unset it, and longseq ",
        ),
        (
            signal.SIGINT,
            ["--trainer.num_nodes=2"],
            {},
            r"trainer.num_nodes is 2; start the same command on each, ",
        ),
    ],
)
def test_a_start_that_waits_for_another_rank_says_so_and_ends_at_once(
    number: signal.Signals, flags: list[str], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port()), **variables}
    process = forked.start(ROOT / "train.py", *FIT, *DDP, *flags, cwd=tmp_path, env=variables)
    try:
        end = time.monotonic() + 100
        while "waits for" not in process.said()[1]:
            assert process.poll() is None and time.monotonic() < end, process.said()
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(10) == CODES[number]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    *_, waited, last = process.said()[1].strip().split("\n")
    port = variables["MASTER_PORT"]
    assert re.match(rf"rank 0 of 2 waits for the other rank at 127.0.0.1:{port}: {said}", waited)
    assert last == f"{number.name}: stopped; start it again (a training with --resume)"
    assert not list(tmp_path.glob("runs/digits/*/"))  # as where a handler answers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# A process of two that waits in C++ for the other one, which never comes.
WAITS = """
import os, signal, socket, sys, threading, time, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from longseq.cli.errors.machine import signals_stop
from longseq.training import signals
from longseq.training.recovery import Sentinel

signals.PATIENCE = signals._watched.patience = 0.5
sends, is_one_of_two, has_begun = sys.argv[1].split(), sys.argv[2] == "two", sys.argv[3] == "training"
dist.get_world_size = lambda: 1 + is_one_of_two
dist.is_initialized = lambda: is_one_of_two

def send():
    for count, name in enumerate(sends, 1):
        os.kill(os.getpid(), getattr(signal, name))
        while len(signals._received(signals._watched.socket, socket.MSG_PEEK)) < count:
            time.sleep(0.01)  # two signals of one kind become one if the first still waits for its delivery

with signals_stop():
    if has_begun:
        sentinel = Sentinel(Path("last.ckpt"), 1)
        model = SimpleNamespace(bad_steps=SimpleNamespace())
        sentinel.on_train_start(SimpleNamespace(global_step=0, max_steps=9, world_size=1), model)
    threading.Timer(0.2, send).start()
    try:
        dist.TCPStore("127.0.0.1", int(sys.argv[4]), 2, True, timedelta(seconds=3))
    except dist.DistStoreError:
        os._exit(55)
"""


@pytest.mark.parametrize(
    ("sent", "how_many", "when", "code"),
    [
        ("SIGTERM", "two", "before", 143),
        ("SIGHUP", "two", "before", 129),
        ("SIGTERM", "one", "before", 55),  # C++ computes, and will return to Python
        ("SIGTERM", "two", "training", 55),  # a step may take long, and is to be saved
        ("SIGINT", "two", "training", 55),
        ("SIGINT SIGINT", "two", "training", 130),
        ("SIGTERM SIGINT", "one", "training", 143),
    ],
)
def test_what_cpp_keeps_from_pythons_handlers_ends_the_process(
    sent: str, how_many: str, when: str, code: int, tmp_path: Path
) -> None:
    done = forked.run("-c", WAITS, sent, how_many, when, free_port(), cwd=tmp_path)
    assert done.returncode == code, done.stderr


def test_slurms_tasks_are_as_many_as_the_ranks(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks with the default of one device would train the same run at the same time."""
    for name, value in {
        "JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": "0", "LOCALID": "0",
        "NODEID": "0", "NODELIST": "localhost",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    done = command(*FIT)
    assert done.code == 2
    assert done.error.startswith("error: trainer.devices: the trainer has 1, and SLURM_NTASKS is 2; give --trainer.dev")
    assert not list(Path().glob("runs/digits/*/"))


def test_the_thread_that_watches_signals_ends_with_the_command_though_one_was_not_answered() -> None:
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    before = set(threading.enumerate())
    with signals._watched.lock, signals.watched():  # with the lock the thread cannot take the number out of the socket
        (thread,) = set(threading.enumerate()) - before
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.1)
    signal.signal(signal.SIGUSR1, handler)
    thread.join(5)
    assert not thread.is_alive()
