"""Memory and time of a training step with reversible blocks, with activation checkpointing, and with neither.

    python benchmarks/reversible.py --out docs/results/reversible

Each cell has a process of its own with one thread: a forward and a backward pass on one image, with a token for each
pixel. Memory is the peak of the second step above weights, image and the first step's gradients. Each tensor of 64 KiB
or more has pages of its own, so freed memory is not counted. Time is processor time (user and system), the lower of two
steps, so that other processes have little effect.
"""

import argparse
import ctypes
import gc
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch.nn.functional import cross_entropy

from longseq import ImageEncoder, Linformer, Reformer
from longseq.attention import Mechanism
from longseq.reports.cell import peak_of
from longseq.reports.plots import Report, machine
from longseq.training import Classifier
from longseq.training.memory import keep_freed_memory
from longseq.training.throughput import timed

MECHANISMS: dict[str, Mechanism] = {"Linformer": Linformer(128), "Reformer": Reformer(rounds=1)}
KINDS = {"plain": {}, "checkpointing": {"checkpointing": True}, "reversible": {"reversible": True}}


def step(side: int, depth: int, mechanism: str, kind: str) -> dict[str, float]:
    """MiB and seconds of a training step in this process."""
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: large tensors get pages of their own
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = ImageEncoder((1, side, side), MECHANISMS[mechanism], dim=128, depth=depth, heads=4, **KINDS[kind])
    image = torch.randint(0, 256, (1, 1, side, side), dtype=torch.uint8)
    encoder.measure([image])
    model, peak = Classifier(encoder, 10), 0
    seconds: list[float] = []
    for number in range(5):
        model.zero_grad(set_to_none=False)
        gc.collect()
        peak_since = peak_of(torch.device("cpu")) if number == 1 else None
        with timed(seconds, clock=time.process_time):
            cross_entropy(model(image), torch.tensor([1])).backward()
        if peak_since is not None:
            peak = peak_since()
            keep_freed_memory()
    return {"mib": peak / 2**20, "seconds": min(seconds[3:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=PositiveInt, default=64, help="pixels of the image's side")
    parser.add_argument("--depths", type=PositiveInt, nargs="+", default=[4, 8, 16])
    parser.add_argument("--attention", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--out", type=Path, default=Path("docs/results/reversible"))
    options = parser.parse_args()
    side = options.side
    what = f"One image of {side} x {side} pixels, width 128, 4 heads, float32; k = 128, one round of hashes"
    report = Report(options.out, f"{what}; {machine()}", sys.argv)
    header = ["attention", "blocks", *(f"{kind}: MiB" for kind in KINDS), *(f"{kind}: seconds" for kind in KINDS)]
    rows: list[list[Any]] = []
    apart = multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1)
    for mechanism in options.attention:
        for depth in options.depths:
            cells = [apart.apply(step, (side, depth, mechanism, kind)) for kind in KINDS]
            figures = [f"{cell['mib']:.0f}" for cell in cells] + [f"{cell['seconds']:.2f}" for cell in cells]
            rows.append([mechanism, depth, *figures])
            print(*rows[-1], sep=", ", flush=True)
            report.write(header, rows)


if __name__ == "__main__":
    main()
