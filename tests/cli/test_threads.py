"""Threads of OpenMP: as many as there are CPUs for this process, and they spin only while nobody else needs these."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest
import torch

from datamodules import Digits
from longseq.cli import run_command
from longseq.cli.process import spinning, threads
from longseq.cli.process.spinning import give_way
from longseq.cli.process.threads import cpu_quota, keep_to_quota

V2 = {"cpu.max": "{} 100000\n"}
V1 = {"cpu/cpu.cfs_quota_us": "{}\n", "cpu/cpu.cfs_period_us": "100000\n"}


def cgroups(folder: Path, files: dict[str, str], quota: str, group: str = "") -> Path:
    for name, content in files.items():
        path = folder / name
        path = path.parent / group / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.format(quota))
    return folder


@pytest.mark.parametrize("files", [V2, V1])
@pytest.mark.parametrize(("quota", "cpus"), [("250000", 2.5), ("50000", 0.5), ("-1", math.inf), ("max", math.inf)])
def test_the_quota_of_a_container_is_read_in_both_versions_of_cgroups(
    files: dict[str, str], quota: str, cpus: float, tmp_path: Path
) -> None:
    assert cpu_quota(cgroups(tmp_path, files, quota), Path("/dev/null")) == cpus


@pytest.mark.parametrize(("files", "line"), [(V2, "0::/a/b"), (V1, "5:cpu,cpuacct:/a/b"), (V1, "5:cpu:/a/b")])
def test_the_smallest_quota_of_a_group_and_of_those_around_it_holds(
    files: dict[str, str], line: str, tmp_path: Path
) -> None:
    (tmp_path / "of_process").write_text(f"7:memory:/elsewhere\n{line}\n")
    cgroups(tmp_path, files, "300000", "a")
    cgroups(tmp_path, files, "400000", "a/b")
    cgroups(tmp_path, files, "100000", "elsewhere")
    assert cpu_quota(tmp_path, tmp_path / "of_process") == 3


@pytest.mark.parametrize(
    ("quota", "before", "after"), [(1.5, None, "2"), (0.2, None, "1"), (8, None, None), (1.5, "3", "3")]
)
def test_a_quota_sets_the_number_of_threads_unless_the_user_has(
    quota: float, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    keep_to_quota()
    assert os.environ.get("OMP_NUM_THREADS") == after


def test_the_number_of_threads_is_set_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import os; from longseq.cli import before_torch\n"
        "from longseq.cli.process import threads\n"
        "os.environ.pop('OMP_NUM_THREADS', None); os.sched_getaffinity = lambda _: range(64)\n"
        "threads.cpu_quota = lambda: 0.5; before_torch._import_run = lambda: print\n"
        "before_torch.main(['fit'])\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "import torch; print(torch.get_num_threads())"
    )
    assert forked.run("-c", code, cwd=tmp_path, fresh=True).stdout.split("\n")[1] == "1"


def test_torch_has_as_many_threads_as_its_process_may_use_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp follows the affinity by itself, so longseq sets nothing."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pinned = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    code = f"{pinned}; import torch; print(torch.get_num_threads())"
    assert forked.run("-c", code, cwd=tmp_path, fresh=True).stdout == "1\n"


def test_time_without_a_cpu_is_what_another_process_takes(tmp_path: Path) -> None:
    """Two processes that compute on one CPU have half of it each, or less where others compute there too."""
    code = """
import os, subprocess, sys, time
from longseq.cli.process.spinning import seconds_without_cpu
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
    time.sleep(0.2)
    before, had, begin = seconds_without_cpu(), time.process_time(), time.monotonic()
    while time.monotonic() < begin + 0.5:
        pass
    waited, had, took = seconds_without_cpu() - before, time.process_time() - had, time.monotonic() - begin
    other.kill()
print(waited, had, took)
"""
    waited, had, took = map(float, forked.run("-c", code, cwd=tmp_path).stdout.split())
    assert waited > 0.1
    assert waited + had == pytest.approx(took, rel=0.1)


@pytest.fixture
def spins(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether threads spin briefly, now (the last one) and before."""
    said = [False]

    def spin_briefly(until: threading.Event) -> None:
        said.append(True)
        until.wait()
        said.append(False)

    for name in spinning.OF_WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(spinning, "spin_briefly", spin_briefly)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return said


def becomes(said: list[bool], wanted: list[bool]) -> bool:
    end = time.monotonic() + 20
    while said != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return said == wanted


def test_threads_spin_briefly_while_they_wait_for_a_cpu(spins: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    share = 0.0
    waited = at = time.monotonic()

    def without_cpu() -> float:
        nonlocal waited, at
        waited, at = waited + share * (time.monotonic() - at), time.monotonic()
        return waited

    monkeypatch.setattr(spinning, "seconds_without_cpu", without_cpu)
    with give_way(every=0.02):
        time.sleep(0.2)
        assert spins == [False]
        share = 0.5
        assert becomes(spins, [False, True])
        time.sleep(0.2)
        assert spins == [False, True]
        share = 0.01
        assert becomes(spins, [False, True, False])
        share = 0.5
        assert becomes(spins, [False, True, False, True])
    assert becomes(spins, [False, True, False, True, False])


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_threads_wait_as_the_user_has_chosen(name: str, spins: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(spinning, "seconds_without_cpu", time.monotonic)
    with give_way(every=0.02):
        time.sleep(0.2)
    assert spins == [False]


def test_every_command_gives_way(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []

    @contextmanager
    def noted() -> Iterator[None]:
        inside.append("begin")
        yield
        inside.append("end")

    plain = Digits.load
    monkeypatch.setattr(run_command, "give_way", noted)
    monkeypatch.setattr(Digits, "load", lambda self: inside.append("load") or plain(self))
    assert command("stats", "--data", "Digits").code == 0
    assert inside == ["begin", "load", "end"]
