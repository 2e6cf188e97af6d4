"""Python scripts in their own processes, forked from a process that has imported everything: imports take seconds.

A forked script starts as it would from a shell: it has its own arguments, environment, working folder, signals and
``__main__``, and the processes that it starts are its children. Lightning's processes for further ranks are forked as
well: rank zero forks them before it does anything else. Only what Python decides at its own start (locale, threads of
OpenMP) comes from the first process: ``fresh=True`` starts a new Python.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
LIBRARIES = [
    "matplotlib.backends.backend_agg", "pytorch_lightning.cli", "scipy.ndimage", "sklearn.datasets",
    "soundfile", "tensorboard.backend.event_processing.event_accumulator", "timm",
    "torch.utils.tensorboard", "torchaudio.transforms", "torchmetrics.classification", "torchvision.transforms.v2",
]  # fmt: skip
IMPORTED = [
    *LIBRARIES, "datamodules", "longseq.cli.model_commands", "longseq.cli.run_command", "longseq.cli.function_commands",
    "longseq.reports.benchmark", "longseq.reports.spectrum", "longseq.reports.sweep", "longseq.reports.needle",
    "longseq.deploy.card", "longseq.deploy.export", "onnxscript", "onnxruntime", "torch.onnx._internal.exporter._core",
]  # fmt: skip
DRAWS = "TESTS_DRAW"  # a variable of the environment: the pictures of trainings are drawn
BASELINES = "TESTS_BASELINE"  # another: trainings are compared with a simple model
_SIZE = 1 << 20  # the largest message, in bytes


# In the process of the tests


class Forked:
    """A process with the part of Popen's interface that tests use."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self.returncode = pid, None
        self._output = output

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None:
            self.returncode = _server().status_of(self.pid, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def said(self) -> tuple[str, str]:
        """The text that the process has written to its output and to its errors."""
        return (self._output / "out").read_text(errors="replace"), (self._output / "err").read_text(errors="replace")


class _Server:
    def __init__(self) -> None:
        self.pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self.socket = ours
        self.outputs = tempfile.TemporaryDirectory(prefix="longseq-output-")
        self.ended: dict[int, int] = {}

    def start(self, command: list[str], cwd: str | os.PathLike[str], env: dict[str, str]) -> Forked:
        output = Path(tempfile.mkdtemp(dir=self.outputs.name))
        request = json.dumps({"command": command, "cwd": str(cwd), "env": env}, ensure_ascii=True).encode()
        with open(output / "out", "wb") as out, open(output / "err", "wb") as err:
            socket.send_fds(self.socket, [request], [out.fileno(), err.fileno()])
        started: list[int] = []
        while not started:
            self._receive(None, started)
        return Forked(started[0], output)

    def status_of(self, pid: int, timeout: float | None) -> int | None:
        end = None if timeout is None else time.monotonic() + timeout
        while pid not in self.ended:
            left = None if end is None else max(end - time.monotonic(), 0)
            if not self._receive(left, []):
                return self.ended.get(pid)
        return self.ended[pid]

    def _receive(self, timeout: float | None, started: list[int]) -> bool:
        if not select.select([self.socket], [], [], timeout)[0]:
            return False
        message = self.socket.recv(_SIZE)
        assert message, "the process that forks others has ended"
        said = json.loads(message)
        if "status" in said:
            self.ended[said["pid"]] = os.waitstatus_to_exitcode(said["status"])
        else:
            started.append(said["pid"])
        return True


_running: list[_Server] = []


def _server() -> _Server:
    if not _running or _running[0].pid != os.getpid():
        _running[:] = [_Server()]
    return _running[0]


def draw_nothing() -> None:
    """Let the pictures of a training be blank, unless DRAWS is set: drawing takes most of the time of a small one. Fit
    no baseline either, unless BASELINES is set, and count no energy: it would differ from one training to the next.

    What they would show is made all the same; preview and explain draw.
    """
    import torch.utils.tensorboard.writer

    import longseq.cli.runs.train_and_test
    import longseq.deploy.card
    from longseq.training import energy
    from longseq.training.board import by_class, tensorboard
    from longseq.training.board import samples as watching

    def blank(*_: Any, **__: Any) -> Figure:
        return Figure((0.1, 0.1))

    def point(*_: Any, **__: Any) -> Any:
        return np.full((3, 1, 1), 255, np.uint8)

    def inputs(model: Any, *others: Any) -> Figure:
        with patch.object(model.encoder, "draw", blank):  # mixing and masking the inputs may fail, too
            return draw_inputs(model, *others)

    def show_but_no_mistakes(trainer: Any, tag: str, draw: Callable[[], Figure | None]) -> None:
        show(trainer, tag, blank if tag.endswith("/mistakes") else draw)

    draw_inputs, show = tensorboard.draw_inputs, watching.show
    _replace(torch.utils.tensorboard.writer, "figure_to_image", point)
    _replace(longseq.deploy.card, "_draw", blank)
    _replace(tensorboard, "draw_inputs", inputs)
    _replace(tensorboard, "draw_confusions", blank)
    _replace(by_class, "draw_by_class", blank)
    _replace(watching, "draw_token_maps", blank)
    _replace(watching, "show", show_but_no_mistakes)
    energy.POWERCAP = Path("absent")
    _replace(longseq.cli.runs.train_and_test, "fit_baseline", lambda *_: None, BASELINES)


def sync_nothing() -> None:
    """Let no file be synced to the disk, which takes milliseconds for each: tests kill processes, but no machine."""
    os.fsync = lambda file: None


def _replace(module: Any, name: str, blank: Callable, unless: str = DRAWS) -> None:
    """Replace a function wherever the variable of the environment is not set when it is called."""
    draw = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: (draw if unless in os.environ else blank)(*args, **kwargs))


def stop() -> None:
    """End the process that forks others."""
    for server in _running:
        server.socket.close()
        server.process.wait()
        server.outputs.cleanup()
    _running.clear()


def start(*command: Any, cwd: str | os.PathLike[str], env: dict[str, str] | None = None) -> Forked:
    """Start a script, its path first, or ``-c`` and code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if env is None else env
    return _server().start(list(map(str, command)), cwd, environment)


def run(
    *command: Any, cwd: str | os.PathLike[str], timeout: float = 200, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; one that takes too long is killed, and raises TimeoutExpired."""
    if fresh:
        environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
        whole = [sys.executable, *map(str, command)]
        return subprocess.run(whole, cwd=cwd, capture_output=True, text=True, env=environment, timeout=timeout)
    process = start(*command, cwd=cwd)
    code = process.wait(timeout)
    if code is None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise subprocess.TimeoutExpired(command, timeout, *process.said())
    return subprocess.CompletedProcess(command, code, *process.said())


# In the process that forks


def _serve(ours: socket.socket) -> dict[str, Any]:
    """Fork for every request; the fork returns the request. The server ends when the tests end."""
    for name in IMPORTED:
        importlib.import_module(name)
    sync_nothing()
    gc.freeze()  # else the collector would make every fork copy the pages that it visits
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must not end this process before the tests end
    while True:
        ready = select.select([ours, wake], [], [])[0]
        if wake in ready:
            wake.recv(_SIZE)
            _report_ended(ours)
        if ours not in ready:
            continue
        message, files, *_ = socket.recv_fds(ours, _SIZE, 2)
        if not message:
            os._exit(0)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (ours, wake, woken):
                each.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, file in enumerate(files, start=1):
                os.dup2(file, number)
                os.close(file)
            return json.loads(message)
        for file in files:
            os.close(file)
        ours.send(json.dumps({"pid": pid}).encode())


def _report_ended(ours: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            ours.send(json.dumps({"pid": pid, "status": status}).encode())


class _Rank:
    """Stands in for Lightning's Popen of a further rank: a fork that waits until Lightning starts the rank."""

    waiting: "list[_Rank]" = []  # noqa: RUF012

    def __init__(self) -> None:
        asked, self._ask = os.pipe()
        self.pid, self.returncode = os.fork(), None
        if self.pid:
            os.close(asked)
            return
        for rank in (self, *_Rank.waiting):  # else the others would wait for this one's end
            os.close(rank._ask)
        with open(asked, "rb") as file:
            environment = file.read()
        if not environment:  # rank zero ended without starting this rank
            os._exit(0)
        os.environ.clear()
        os.environ.update(json.loads(environment))
        _take_rank()
        raise _Started

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    @classmethod
    def started(cls, command: list[str], env: dict[str, str], cwd: str | None) -> "_Rank":
        rank = cls.waiting.pop()
        os.write(rank._ask, json.dumps(env).encode())
        os.close(rank._ask)
        return rank


class _Started(BaseException):
    """Unwinds the stack, so that the fork can run its script."""


def _take_rank() -> None:
    """Set what Lightning sets only at its import, before the fork."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def _further_ranks(command: list[str]) -> int:
    """How many ranks Lightning may start besides the first."""
    script = Path(command[0]).name
    if script == "shared_training.py":
        return int(command[1]) - 1
    return int("--trainer.devices" in command or script in ("two_ranks.py", "trained_from_parts.py"))


def _run(request: dict[str, Any]) -> None:
    """Run the requested script as Python does; the caller then ends the process as the interpreter does."""
    command: list[str] = request["command"]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = "" if command[0] == "-c" else str(Path(command[0]).resolve().parent)
    sys.path[:1] = [first, *paths]
    sys.argv = command
    draw_nothing()
    _take_rank()
    further = _further_ranks(command)
    if further:
        from pytorch_lightning.strategies.launchers import subprocess_script

        try:
            for _ in range(further):
                _Rank.waiting.append(_Rank())
        except _Started:
            _Rank.waiting = []
        else:
            subprocess_script.subprocess = type("forked", (), {"Popen": staticmethod(_Rank.started)})  # type: ignore
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(command[0], run_name="__main__")


def _end(code: Any) -> NoReturn:
    """End as the interpreter does, but do not free memory, because this takes seconds in a fork."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _run(asked)
    except SystemExit as ended:
        _end(ended.code)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(None)
