"""How long a training step takes on 1 to 1,024 GPUs: computed from counted FLOPs and bytes and from published rates.

    python benchmarks/scale.py --out docs/results/scale

Every pixel of a 1,024 x 1,024 image is a token. `data`: each GPU has an image of its own. `sequence`: all GPUs share
the tokens of one image. `both`: the 8 GPUs of a node share an image. FLOPs are counted at two lengths. The part that
grows with the tokens is divided among the GPUs that share an image. Each GPU does the rest, and the optimizer's step,
which reads and writes memory.

Two points are then measured: two gloo processes on this machine must take as long as the same formula says. Its inputs
are measured separately: gloo's sums, and steps of one process on a small and on a large image. The steps give the time
of a FLOP, and the time that does not depend on the tokens (the optimizer's step, and the calls).
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jsonargparse.typing import PositiveInt
from torch import nn
from torch.nn.functional import cross_entropy

from longseq import ImageEncoder, Linformer, Separable
from longseq.encoders.sharding import Sharding
from longseq.reports.plots import COLOURS, Report, machine, markdown, panels, styled
from longseq.training import Classifier
from longseq.training.flops import PEAK_FLOPS, flops_per_sample
from longseq.training.throughput import timed

# NVIDIA's data sheets of the H100 SXM and of the DGX H100: NVLink 900 GB/s in both directions together, eight GPUs a
# node, one network card of 400 Gb/s for each GPU.
PEAK, NODE, NVLINK, CARD = PEAK_FLOPS["NVIDIA H100 80GB HBM3"], 8, 450e9, 50e9
MEMORY = 3.35e12  # bytes a second of its memory (HBM3), same data sheet
ADAMW = 7  # float32 numbers a weight: weight, gradient and two moments are read, all except the gradient written
# Latencies that NCCL itself assumes, in seconds (src/graph/tuning.cc, protocol Simple): of each sum, and of each hop in
# a ring or a tree, inside a node and between two nodes.
BASE, RING, TREE = 8.4e-6, (3.4e-6, 14e-6), (4.0e-6, 14e-6)
UTILISATION = 0.4  # an assumption: the share of the peak that the products of a step reach
# If other programs share the processors, only the processor time of a process says what its work costs.
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Seconds = dict[str, list[float]]  # by clock
GPUS = [2**power for power in range(11)]


class Model(NamedTuple):
    """A classifier of images, every pixel a token."""

    side: int
    dim: int
    depth: int
    heads: int
    k: int

    def build(self, side: int | None = None) -> Classifier:
        side = side or self.side
        mechanism = Linformer(self.k, projection=Separable())
        encoder = ImageEncoder(
            (1, side, side), mechanism, dim=self.dim, depth=self.depth, heads=self.heads, positions="none"
        )
        return Classifier(encoder, num_classes=10)

    @functools.cache  # noqa: B019 (there are two models)
    def flops(self) -> tuple[float, float]:
        """FLOPs of a training step of one image: those that do not grow with the tokens, and those of all tokens."""
        few, many = (float(flops_per_sample(self.build(side)).training) for side in (self.side // 2, self.side))
        of_tokens = (many - few) * 4 / 3
        return many - of_tokens, of_tokens

    @functools.cache  # noqa: B019
    def weight_bytes(self) -> int:
        """Bytes of all gradients, in float32."""
        return 4 * sum(weight.numel() for weight in self.build().parameters())

    def sums(self) -> list[int]:
        """Bytes of each sum over the tokens in a step, forward and backward: E X in every layer, with a column of ones
        for a bias, and the mean over the tokens, with their number."""
        return 2 * [*[4 * self.k * (self.dim + 1)] * self.depth, 4 * (self.dim + 1)]


LARGE = Model(side=1024, dim=768, depth=12, heads=12, k=256)
SMALL = Model(side=64, dim=64, depth=4, heads=4, k=256)  # what is measured
FEW = 16  # the side of the small image


def step_seconds(
    flops: tuple[float, float],
    rate: float,
    fixed: float,
    sharing: int,
    devices: int,
    model: Model,
    all_reduce: Callable[[int, int], float],
) -> float:
    """The seconds of a step. Communication does not overlap with computation.

    Args:
        flops: Of one image, as Model.flops gives them.
        rate: FLOP/s of a device.
        fixed: The seconds of the work that each device does once a step, for any number of tokens.
        sharing: How many devices share an image.
        devices: How many there are.
        model: What is trained.
        all_reduce: The seconds of a sum, from its bytes and the number of devices.
    """
    of_each, of_tokens = flops
    of_sums = sum(all_reduce(size, sharing) for size in model.sums())
    return fixed + (of_each + of_tokens / sharing) / rate + of_sums + all_reduce(model.weight_bytes(), devices)


def nccl(size: int, gpus: int) -> float:
    """The seconds of NCCL's sum of so many bytes, by a ring or by a tree, whichever is faster."""
    if gpus == 1:
        return 0.0
    nodes = math.ceil(gpus / NODE)
    local = gpus // nodes
    wire = 2 * (gpus - 1) / gpus * size / (NVLINK if nodes == 1 else min(NVLINK, local * CARD))
    between = 2 * nodes if nodes > 1 else 0
    ring = (2 * (gpus - 1) - between) * RING[0] + between * RING[1]
    tree = 2 * ((local - 1) * TREE[0] + math.log2(nodes) * TREE[1])
    return wire + BASE + min(ring, tree)


# What is measured: one process on its own, gloo's sums on their own, and steps of two processes


def worker(rank: int, folder: str, repeats: int) -> None:
    """Time a process on its own and together with another, in turns; store the median of each time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    sizes = sorted({*SMALL.sums(), SMALL.weight_bytes()})
    vectors = {size: torch.zeros(size // 4) for size in sizes}
    trained = {name: step_of(group, name) for name in ("alone", "few", "data", "sequence")}
    times: dict[str, dict[str, list[float]]] = {clock: defaultdict(list) for clock in CLOCKS}
    summed: list[int] = []
    of_sums: Seconds = {clock: [] for clock in CLOCKS}
    collect = dist.all_reduce

    def timed_sum(values: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with by_all_clocks(of_sums):
            collect(values, *args, **kwargs)
        summed.append(values.nbytes)

    def measure(name: str, run: Callable[[], Any]) -> None:
        dist.barrier()
        whole: Seconds = {clock: [] for clock in CLOCKS}
        for values in (summed, *of_sums.values()):
            values.clear()
        with by_all_clocks(whole):
            run()
        for clock in CLOCKS:
            times[clock][name].append(sum(whole[clock]) - sum(of_sums[clock]))
            times[clock][f"{name}, sums"].append(sum(of_sums[clock]))

    for _ in range(repeats):
        for size, vector in vectors.items():
            measure(f"sum {size}", lambda vector=vector: dist.all_reduce(vector))
        for name, turn in (("alone", 0), ("alone", 1), ("few", 0), ("few", 1)):
            measure(name if turn == rank else "waits", trained[name] if turn == rank else lambda: None)
        dist.all_reduce = timed_sum
        measure("data", trained["data"])
        measure("sequence", trained["sequence"])
        dist.all_reduce = collect
        assert sorted(summed) == sorted([*SMALL.sums(), SMALL.weight_bytes()]), summed  # as the formula counts them
    medians = {clock: {name: median(values) for name, values in of.items()} for clock, of in times.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(medians))


@contextmanager
def by_all_clocks(seconds: Seconds) -> Iterator[None]:
    """Append the seconds of a block by each clock."""
    with ExitStack() as stack:
        for clock, read in CLOCKS.items():
            stack.enter_context(timed(seconds[clock], clock=read))
        yield


def step_of(group: Any, how: str) -> Callable[[], None]:
    """A training step on one image."""
    torch.manual_seed(0)
    side = FEW if how == "few" else SMALL.side
    model = SMALL.build(side)
    image = torch.randint(0, 256, (1, 1, side, side), dtype=torch.uint8)
    model.encoder.measure([image])
    if how == "sequence":
        Sharding(model.encoder, group)
    layers = nn.Sequential(model.encoder, model.head)
    optimizer = torch.optim.AdamW(layers.parameters())

    def step() -> None:
        cross_entropy(layers(image), torch.tensor([1])).backward()
        if how in ("data", "sequence"):
            gradients = [weight.grad for weight in layers.parameters() if weight.grad is not None]
            whole = torch.cat([gradient.view(-1) for gradient in gradients])
            dist.all_reduce(whole)
            sums = whole.split([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total.view_as(gradient) / 2)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(repeats: int) -> list[dict[str, dict[str, float]]]:
    """The times of both processes, by clock."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run"]
        processes = [subprocess.Popen([*command, str(rank), folder, str(repeats)]) for rank in (0, 1)]
        if any([process.wait() for process in processes]):
            raise SystemExit("a process failed")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]


def check(repeats: int) -> list[list[Any]]:
    """Two processes on this machine: computed and measured times."""
    of_ranks, flops = measured(repeats), SMALL.flops()
    rows = []
    for clock in CLOCKS:
        times = {name: mean(of_rank[clock][name] for of_rank in of_ranks) for name in of_ranks[0][clock]}
        of_few = float(flops_per_sample(SMALL.build(FEW)).training)
        rate = (sum(flops) - of_few) / (times["alone"] - times["few"])
        fixed = times["few"] - of_few / rate

        def gloo(size: int, processes: int, times: dict[str, float] = times) -> float:
            return times[f"sum {size}"] if processes > 1 else 0.0

        for name, sharing in (("data", 1), ("sequence", 2)):
            whole = step_seconds(flops, rate, fixed, sharing, 2, SMALL, gloo)
            own = step_seconds(flops, rate, fixed, sharing, 1, SMALL, lambda *_: 0.0)
            pairs = ((own, times[name]), (whole - own, times[f"{name}, sums"]))
            figures = (f"{1000 * seconds:.1f}" for pair in pairs for seconds in pair)
            ratio = (times[name] + times[f"{name}, sums"]) / whole
            rows.append([name, clock, f"{1000 * times['alone']:.0f}", f"{1000 * fixed:.0f}", *figures, f"{ratio:.2f}"])
    return rows


def simulated() -> list[dict[str, Any]]:
    """A row for each number of GPUs and each way to use them."""
    flops, rate = LARGE.flops(), UTILISATION * PEAK
    fixed = ADAMW * LARGE.weight_bytes() / MEMORY
    rows = []
    for how in ("data", "sequence", "both"):
        for gpus in GPUS:
            sharing = {"data": 1, "sequence": gpus, "both": min(gpus, NODE)}[how]
            seconds = step_seconds(flops, rate, fixed, sharing, gpus, LARGE, nccl)
            images = gpus // sharing
            own = fixed + (flops[0] + flops[1] / sharing) / rate
            of_one = fixed + sum(flops) / rate
            rows.append(
                {
                    "how": how, "GPUs": gpus, "images a step": images, "seconds a step": seconds,
                    "of them sums": seconds - own, "efficiency": images * of_one / (gpus * seconds),
                }
            )  # fmt: skip
    return rows


@styled
def draw(rows: list[dict[str, Any]]) -> Any:
    figure, (left, right) = panels(2)
    for how, colour in zip(("data", "sequence", "both"), COLOURS[2:], strict=False):
        own = [row for row in rows if row["how"] == how]
        gpus = [row["GPUs"] for row in own]
        left.loglog(gpus, [row["seconds a step"] for row in own], "o-", color=colour, label=how)
        right.semilogx(gpus, [row["efficiency"] for row in own], "o-", color=colour, label=how)
    left.set(title="Time of a step", xlabel="GPUs", ylabel="seconds")
    right.set(title="Images a second, of GPUs x those of one", xlabel="GPUs", ylabel="share", ylim=(0, 1.05))
    left.legend()
    return figure


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        rank, folder, repeats = sys.argv[2:]
        return worker(int(rank), folder, int(repeats))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats",
        type=PositiveInt,
        default=20,
        help="steps of each kind that are measured in turns; the median counts",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report, rows = Report(options.out, "", sys.argv), simulated()
    header = list(rows[0])
    exact = [[f"{value:.4g}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    table = [
        [
            row["how"], f"{row['GPUs']:,}", f"{row['images a step']:,}", f"{row['seconds a step']:.4f}",
            f"{row['of them sums']:.4f}", f"{row['efficiency']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = [
        "two processes", "clock", "one process, ms", "fixed, ms", "own work computed, ms", "measured",
        "sums computed, ms", "measured", "both, measured / computed",
    ]  # fmt: skip
    points = markdown(columns, check(options.repeats))
    text = f"{markdown(header, table)}\nMeasured on {machine()}:\n\n{points}"
    report.end(report.write(header, exact, text), draw(rows), "scale.png")


if __name__ == "__main__":
    main()
