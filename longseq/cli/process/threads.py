"""Limit the threads of torch to the CPUs that the process may use. Nothing here imports torch."""

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def keep_to_quota() -> None:
    """Set OMP_NUM_THREADS to the CPUs of the container's quota, before torch is imported. libgomp itself respects the
    affinity, but not a quota: with 2 of 64 CPUs its 64 threads would wait for each other most of the time."""
    quota = cpu_quota()
    if "OMP_NUM_THREADS" not in os.environ and quota < len(os.sched_getaffinity(0)):
        os.environ["OMP_NUM_THREADS"] = str(math.ceil(quota))


def cpu_quota(cgroups: Path = _CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> float:
    """The number of CPUs that the quota of the process's cgroups (v2 or v1) allows; infinity without a quota."""
    quotas = [math.inf]
    try:
        groups = dict(line.split(":", 2)[1:] for line in of_process.read_text().splitlines())
    except OSError:
        return math.inf
    for name, root in (("", cgroups), ("cpu,cpuacct", cgroups / "cpu"), ("cpu", cgroups / "cpu")):
        group = Path(groups.get(name, "/"))
        for folder in (group, *group.parents):  # in a container the root is the container's own group
            quotas.append(_quota_of(root / folder.relative_to("/")))
    return min(quotas)


def _quota_of(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(allowed) / float(period) if allowed not in ("max", "-1") else math.inf
    except (OSError, ValueError):  # most groups have no such file
        return math.inf
