"""torchrun on two hosts, which are network namespaces of this machine, joined by a cable that can be cut."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import pytest
from test_other_devices import FIT, TRAIN, curves

FOLDER = Path(__file__).parent
ADDRESSES = ["10.213.87.1", "10.213.87.2"]


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The namespaces of two hosts. Each has a network device `lan`, and both are joined by a cable."""
    names = [f"longseq-{os.getpid()}-{number}" for number in (1, 2)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("-n", names[0], "link", "add", "lan", "type", "veth", "peer", "name", "lan", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "lan")
            for device in ("lo", "lan"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def wait_until(is_so: Callable[[], bool], agents: list[forked.Forked]) -> None:
    end = time.monotonic() + 150
    while not is_so():
        is_over = time.monotonic() > end or any(agent.poll() is not None for agent in agents)
        assert not is_over, "\n".join(text for agent in agents for text in agent.said())
        time.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.needs("namespaces")
def test_a_job_on_two_hosts_outlives_a_cut_cable_a_dead_rank_a_replaced_host_and_a_lost_one(
    hosts: list[str], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert forked.run(TRAIN, *FIT, cwd=whole).returncode == 0

    def agent(host: int) -> forked.Forked:
        """What the same command starts on each host."""
        launched = [
            "--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3", "--rdzv_backend", "c10d",
            "--rdzv_id", "x", "--rdzv_endpoint", f"{ADDRESSES[0]}:29400", "--local_addr", ADDRESSES[host],
            "--rdzv_conf",
            f"is_host={int(host == 0)},keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=10",
            "--run_path", "--start_method", "fork", FOLDER / "fit_and_wait.py", tmp_path, "2,5,8,10",
        ]  # fmt: skip
        fit = [*FIT, "--data.batch_size", "76", "--checkpoint_minutes", "0.0001", "--resume"]
        environment = {**os.environ, "PYTHONPATH": str(forked.ROOT), "GLOO_SOCKET_IFNAME": "lan"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a host that comes later never learns an address
        return forked.start(FOLDER / "host.py", hosts[host], *launched, *fit, cwd=tmp_path, env=environment)

    def arrived(step: int) -> None:
        wait_until((tmp_path / f"at-{step}").exists, agents)

    def go(step: int) -> None:
        (tmp_path / f"go-{step}").touch()

    def ranks() -> list[int]:
        return [int((tmp_path / f"rank-{rank}").read_text()) for rank in (0, 1)]

    agents = [agent(0), agent(1)]
    try:
        arrived(2)
        first = ranks()
        ip("-n", hosts[1], "link", "set", "lan", "down")
        go(2)
        time.sleep(2)
        assert not (tmp_path / "at-5").exists()
        ip("-n", hosts[1], "link", "set", "lan", "up")
        arrived(5)
        assert ranks() == first  # which nothing has started again

        os.kill(first[1], signal.SIGKILL)
        go(5)
        arrived(8)
        second = ranks()
        assert not set(second) & set(first)

        for process in (agents[1].pid, second[1]):
            os.kill(process, signal.SIGKILL)
        go(8)
        agents[1] = agent(1)
        arrived(10)
        third = ranks()
        assert not set(third) & set(second)

        for process in (agents[1].pid, third[1]):
            os.kill(process, signal.SIGKILL)
        go(10)
        assert agents[0].wait(150) == 0, [each.said() for each in agents]
    finally:
        for process in agents:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    assert agents[0].said()[0].count("resume: continuing from runs/digits/0/last.ckpt") == 3
    assert agents[0].said()[0].count("data.batch_size: 152 on 1 processes, it was 76 on 2") == 1
    tags = ["train/loss", "val/loss"]
    ours, theirs = (curves(folder / "runs/digits/0", tags) for folder in (tmp_path, whole))
    for tag in tags:
        assert [step for step, _ in ours[tag]] == [step for step, _ in theirs[tag]]
        assert [value for _, value in ours[tag]] == pytest.approx([value for _, value in theirs[tag]], abs=1e-5), tag
