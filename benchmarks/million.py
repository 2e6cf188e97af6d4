"""A training step on images of up to a million pixels, each a token; one process, or several that share the tokens.

    python benchmarks/million.py --out docs/results/million

Each row starts processes of its own, one thread each, which train a classifier of width 64 with 4 blocks and local
mixing on one image: forward pass, backward pass and AdamW. The time is that of the fastest step after the first; the
memory is the peak of the process that used the most.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse.typing import PositiveInt
from torch import nn
from torch.nn.functional import cross_entropy

from longseq import ImageEncoder, Linformer, Separable, Verma
from longseq.encoders import Conv2d
from longseq.encoders.sharding import Sharding
from longseq.reports.plots import Report, machine
from longseq.training.throughput import peak_memory_gib, timed


def mechanisms(k: int) -> dict[str, Any]:
    return {f"Linformer, separable E, k = {k}": Linformer(k, projection=Separable()), "Verma without E": Verma()}


MECHANISMS = mechanisms(256)


def step(side: int, mechanism: Any, group: Any, steps: int, device: str = "cpu") -> dict[str, float]:
    """Seconds and GiB of a training step in this process."""
    torch.manual_seed(0)
    encoder = ImageEncoder(
        (1, side, side), mechanism, dim=64, depth=4, heads=4, mlp_ratio=2.0, local=Conv2d(3), positions="none"
    )
    encoder = encoder.to(device)
    image = torch.randint(0, 256, (1, 1, side, side), dtype=torch.uint8, device=device)
    encoder.measure([image])
    if group is not None:
        Sharding(encoder, group)
    model = nn.Sequential(encoder, nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds: list[float] = []
    for _ in range(steps):
        with timed(seconds, device):
            cross_entropy(model(image), torch.tensor([1], device=device)).backward()
            if group is not None:  # all weights are summed; only a dense E has columns that must not be
                for weight in model.parameters():
                    dist.all_reduce(weight.grad, group=group)
                    weight.grad /= dist.get_world_size(group)
            optimizer.step()
            optimizer.zero_grad()
    return {"seconds": min(seconds[1:] or seconds), "gib": peak_memory_gib(torch.device(device))}


def run(rank: int, size: int, side: int, mechanism: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    group = None
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
        group = dist.group.WORLD
    figures = step(side, MECHANISMS[mechanism], group, steps)
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))


def measured(size: int, side: int, mechanism: str, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(size), str(side), mechanism, str(steps), folder]
        command = [sys.executable, __file__, "--run"]
        processes = [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(size)]
        if any([process.wait() for process in processes]):
            raise SystemExit(f"a process failed: {' '.join(arguments)}")
        of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    return {name: max(figures[name] for figures in of_ranks) for name in of_ranks[0]}


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        rank, size, side, mechanism, steps, folder = sys.argv[2:]
        return run(int(rank), int(size), int(side), mechanism, int(steps), folder)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=PositiveInt, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--processes", type=PositiveInt, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=PositiveInt, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/results/million"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    header = ["mechanism", "tokens", "processes", "seconds a step", "GiB of a process"]
    report, rows = Report(options.out, machine(), sys.argv), []
    for mechanism in MECHANISMS:
        for side in options.sides:
            for size in options.processes:
                figures = measured(size, side, mechanism, options.steps)
                rows.append([mechanism, f"{side * side:,}", size, f"{figures['seconds']:.2f}", f"{figures['gib']:.2f}"])
                print(*rows[-1], sep=", ", flush=True)
                report.write(header, rows)


if __name__ == "__main__":
    main()
