"""How many threads torch has: not more than the CPUs that the process may use. Nothing here imports torch."""

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def keep_to_quota() -> None:
    """Set OMP_NUM_THREADS, before torch is imported, to the CPUs of the container's quota. libgomp follows the affinity
    by itself, but no quota: with 2 of 64 CPUs its 64 threads would wait for each other most of the time."""
    quota = cpu_quota()
    if "OMP_NUM_THREADS" not in os.environ and quota < len(os.sched_getaffinity(0)):
        os.environ["OMP_NUM_THREADS"] = str(math.ceil(quota))


def cpu_quota(cgroups: Path = _CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> float:
    """How many CPUs the process may use at a time by the quota of its cgroups (v2 or v1); infinity without a quota."""
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
    except (OSError, ValueError):  # no such file, as in most groups
        return math.inf
