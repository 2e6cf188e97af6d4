"""Time training steps in turns, A B A B, because a machine's speed drifts; peers.py and gpu.py use it."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from longseq import ImageEncoder
from longseq.attention import Mechanism
from longseq.attention.grid import TokenGrid
from longseq.reports.plots import markdown_row
from longseq.training.throughput import timed

Step = Callable[[], None]
Row = list[str]  # what is measured, against what, at what size, ours, theirs, ratio, its spread, wanted ratio


@dataclass(frozen=True)
class Bench:
    """The device, and the sizes that are measured on it."""

    device: str
    width: int
    heads: int
    precisions: tuple[str, ...]  # of classifiers; layers are measured in the first one
    lengths: tuple[int, ...]  # in tokens, for layers
    sides: tuple[int, ...]  # of images, in pixels, for classifiers
    softmax_sides: tuple[int, ...]  # sides at which exact attention is measured too

    @property
    def compiles(self) -> bool:
        return self.device == "cuda"


def autocast(bench: Bench, precision: str) -> torch.autocast:
    return torch.autocast(bench.device, torch.bfloat16, enabled=precision == "bf16")


def layer_step(bench: Bench, layer: nn.Module, n: int) -> Step:
    """Forward and backward of an attention layer, for a sequence of n tokens."""
    layer = layer.to(bench.device)
    layer.compile() if bench.compiles else None
    x = torch.randn(1, n, bench.width, device=bench.device, requires_grad=True)
    gradient = torch.randn(1, n, bench.width, device=bench.device)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        with autocast(bench, bench.precisions[0]):
            out = layer(x)
        out.float().backward(gradient)

    return step


def as_measured(encoder: ImageEncoder) -> ImageEncoder:
    """An encoder that takes images as they are: to measure the first batch would break torch.compile's graph."""
    encoder.set_statistics(encoder.mean, encoder.std)
    return encoder


def training_step(
    bench: Bench,
    model: nn.Module,
    height: int,
    width: int,
    precision: str,
    compiles: bool = False,
    batch: int = 1,
    mode: str | None = None,
) -> Step:
    """A whole step of training on a batch of images, every pixel a token: forward, backward and AdamW. ``mode`` is one
    of torch.compile's."""
    model = model.to(bench.device).train()
    model.compile(mode=mode) if bench.compiles or compiles else None
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    image = torch.randn(batch, 3, height, width, device=bench.device)
    label = torch.zeros(batch, dtype=torch.long, device=bench.device)

    def step() -> None:
        optimizer.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        with autocast(bench, precision):
            logits = model(image)
        F.cross_entropy(logits.float(), label).backward()
        optimizer.step()

    return step


def our_layer(bench: Bench, mechanism: Mechanism, n: int) -> nn.Module:
    timms: Any = Attention(bench.width, bench.heads, qkv_bias=False)
    return mechanism.layers([timms], TokenGrid((n, 1)))[0]


def seconds_of(bench: Bench, step: Step) -> float:
    seconds: list[float] = []
    with timed(seconds, bench.device):
        step()
    return seconds[0]


def compare(bench: Bench, ours: Step, theirs: Step, rounds: int) -> list[str]:
    """Milliseconds of both, theirs over ours, and the ratio's spread over the rounds."""
    for step in (ours, theirs, ours, theirs):
        step()
    pairs = [(seconds_of(bench, ours), seconds_of(bench, theirs)) for _ in range(rounds)]
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    return [f"{1e3 * mine:.3g} ms", f"{1e3 * other:.3g} ms", *spread([b / a for a, b in pairs])]


@dataclass(frozen=True)
class Rates:
    """What a step takes, in milliseconds.

    Attributes:
        queued: From step to step, if none is waited for: this is what a training takes.
        host: Until the host has started the step's last kernel.
        kernels: The sum of the GPU's kernels; None on a CPU.
        count: The number of these kernels.
    """

    queued: float
    host: float
    kernels: float | None = None
    count: int = 0

    def __str__(self) -> str:
        if self.kernels is None:
            return f"{self.queued:.3g} ms"
        return f"{self.queued:.3g} ms (host {self.host:.3g}, {self.count} kernels {self.kernels:.3g})"


def compare_queued(bench: Bench, ours: Step, theirs: Step, rounds: int) -> list[str]:
    """Both sides' rates, theirs over ours, and the ratio's spread over the rounds. Steps are queued, as in a training:
    ``compare`` waits after each one, and so measures the host where a step is short."""
    sides = ours, theirs
    for step in sides * 3:
        step()
    number = 4 if bench.device == "cpu" else max(4, round(0.15 / min(seconds_of(bench, step) for step in sides)))
    pairs = [[queued(bench, step, number) for step in sides] for _ in range(rounds)]
    figures = []
    for step, times in zip(sides, zip(*pairs, strict=True), strict=True):
        mine, host = (1e3 * statistics.median(part) for part in zip(*times, strict=True))
        figures.append(str(Rates(mine, host, *_kernels(step)) if bench.device == "cuda" else Rates(mine, host)))
    return [*figures, *spread([other[0] / own[0] for own, other in pairs])]


def queued(bench: Bench, step: Step, number: int) -> tuple[float, float]:
    """Seconds a step of this many, one after the other, and seconds of the host alone."""
    seconds: list[float] = []
    with timed(seconds, bench.device):
        begin = time.perf_counter()
        for _ in range(number):
            step()
        host = time.perf_counter() - begin
    return seconds[0] / number, host / number


def _kernels(step: Step) -> tuple[float, int]:
    """Milliseconds of a step's kernels on a GPU, and their number."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    return sum(kernel.device_time for kernel in kernels) / 1e3, len(kernels)


def spread(ratios: Sequence[float]) -> list[str]:
    return [f"**{statistics.median(ratios):.2f}**", f"{min(ratios):.2f} to {max(ratios):.2f}"]


def write_page(page: Path, title: str, measured: str) -> None:
    """Write what was measured, which begins with its command, below all that the page says before a command."""
    written = page.read_text() if page.exists() else f"# {title}\n\n"
    page.write_text(written.partition("    python ")[0] + measured)


def write_within(minutes: float, rows: Iterable[Row], write: Callable[[list[Row], str], Any]) -> None:
    """Print each row, and write all rows so far, so that an interrupted run keeps what it has measured. No row begins
    after ``minutes``; a note then says so."""
    begin, measured = time.monotonic(), []
    for row in rows:
        measured.append(row)
        print(markdown_row(row), end="", flush=True)
        is_late = time.monotonic() - begin > 60 * minutes
        write(measured, f"\nNo row was begun after {minutes:g} minutes.\n" if is_late else "")
        if is_late:
            break
