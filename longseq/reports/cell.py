"""One cell of an efficiency table, measured in a process of its own: python -m longseq.reports.cell JSON.

Nothing else in that process adds to the peak of memory.
"""

import gc
import inspect
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from longseq.attention import Linformer, Mechanism, Softmax, Verma
from longseq.attention.examples import exported
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack
from longseq.compat.torch import is_out_of_memory
from longseq.reports.processes import print_result, result_of_python
from longseq.training.memory import give_back_freed_memory, keep_freed_memory
from longseq.training.throughput import timed

_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _WrittenSoftmax(Mechanism):
    """Exact attention with its n x n weights in memory, like the papers' baseline."""

    @classmethod
    def examples(cls) -> "list[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        return [AttentionLayer(trained, _written) for trained in stack]


@dataclass(frozen=True)
class _WrittenLinformer(Linformer):
    """Linformer with its n x k weights in memory: at k = n it keeps what _WrittenSoftmax keeps."""

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        layers = super().layers(stack, grid)
        for layer in layers:
            layer.formula = _written
        return layers


def _written(heads: Heads) -> Float[Tensor, "b h n c"]:
    scores = (heads.queries * heads.queries.shape[-1] ** -0.5) @ heads.keys.mT
    return F.softmax(scores, dim=-1) @ heads.values


# Every mechanism that longseq.attention exports, by the name of its column in a table.
_EXPORTED: dict[str, Any] = {kind.__name__.lower(): kind for kind in exported(Mechanism)}
WITH_K = {"linformer-written"} | {name for name, kind in _EXPORTED.items() if "k" in inspect.signature(kind).parameters}
# Each function takes k, which is None for a mechanism without k. The baselines come first.
MECHANISMS: dict[str, Callable[[Any], Mechanism]] = {
    "softmax-written": lambda k: _WrittenSoftmax(),
    "softmax": lambda k: Softmax(),
    "linformer-written": _WrittenLinformer,
    **{name: kind if name in WITH_K else (lambda k, kind=kind: kind()) for name, kind in _EXPORTED.items()},
    "verma-without-E": lambda k: Verma(),
}


@dataclass(frozen=True)
class Cell:
    """What is measured: a stack of transformer blocks over tokens (batch, n, dim).

    Args:
        mechanism: One of MECHANISMS.
        n: Tokens.
        k: Shortened tokens, or None.
        batch: Sequences at once.
        dim, depth, heads: Width, blocks and attention heads of the stack.
        direction: ``forward``, without gradients, or ``train``, forward and backward.
        device: ``cpu`` or ``cuda``.
        precision: ``32``, or ``bf16`` for autocast.
        repeats: Timed steps, after untimed ones.
        fills: Whether to search, on a GPU, for the largest batch that fits.
    """

    mechanism: str
    n: int
    k: int | None
    batch: int
    dim: int
    depth: int
    heads: int
    direction: str
    device: str
    precision: str
    repeats: int
    fills: bool = True

    def blocks(self) -> nn.Sequential:
        blocks: list[Any] = [Block(self.dim, self.heads, qkv_bias=True) for _ in range(self.depth)]
        layers = MECHANISMS[self.mechanism](self.k).layers([block.attn for block in blocks], TokenGrid((self.n, 1)))
        for block, layer in zip(blocks, layers, strict=True):
            block.attn = layer
        return nn.Sequential(*blocks)


@dataclass(frozen=True)
class Result:
    """Figures of a cell: seconds of each repeat, and peak bytes above those of model and inputs. On a GPU also the most
    sequences that fit at once."""

    seconds: list[float]
    peak_bytes: int
    largest_batch: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def benchmark_cell(cell: Cell) -> Result:
    """Measure a cell in this process."""
    torch.manual_seed(0)
    device = torch.device(cell.device)
    model = cell.blocks().to(device)
    tokens = torch.randn(cell.batch, cell.n, cell.dim, device=device)
    is_training = cell.direction == "train"
    low = torch.autocast(device.type, _DTYPES[cell.precision], enabled=cell.precision != "32")

    def step(tokens: Tensor = tokens, model: nn.Module = model) -> None:
        with low, torch.set_grad_enabled(is_training):
            out = model(tokens)
        if is_training:
            out.float().square().mean().backward()
            model.zero_grad()

    few = min(cell.n, 64)  # otherwise memory that libraries take at their first call would count
    step(tokens[:1, :few], replace(cell, n=few, k=cell.k and min(cell.k, few)).blocks().to(device))
    gc.collect()
    peak_since = peak_of(device)
    step()
    peak = peak_since()
    seconds: list[float] = []
    for _ in range(cell.repeats):
        with timed(seconds, device):
            step()
    if device.type == "cpu" or not cell.fills:
        return Result(seconds, peak)

    def fits(batch: int) -> bool:
        try:
            step(torch.randn(batch, cell.n, cell.dim, device=device))
        except RuntimeError as error:
            if is_out_of_memory(error):
                return False
            raise
        finally:
            model.zero_grad()
            torch.cuda.empty_cache()
        return True

    return Result(seconds, peak, largest(fits, cell.batch))


def largest(fits: Callable[[int], bool], known: int) -> int:
    """The largest number that fits, to within an eighth; ``known`` must fit, and larger numbers must cost more."""
    while fits(2 * known):
        known *= 2
    above = 2 * known
    while above - known > max(known // 8, 1):
        middle = (known + above) // 2
        known, above = (middle, above) if fits(middle) else (known, middle)
    return known


def benchmark_cell_apart(cell: Cell) -> Result | None:
    """Measure a cell in a process of its own; None if the process died, in most cases for lack of memory."""
    figures = result_of_python("-m", "longseq.reports.cell", json.dumps(asdict(cell)))
    return None if figures is None else Result(**figures)


def peak_of(device: torch.device) -> Callable[[], int]:
    """Begin to watch memory; the returned function gives the peak in bytes above the memory in use at the beginning."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - before
    give_back_freed_memory()  # otherwise freed memory would count as memory in use
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    before = _status("VmRSS")
    return lambda: max(_status("VmHWM") - before, 0)


def _status(name: str) -> int:
    """A figure of this process's memory in bytes, from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    settings = json.loads(sys.argv[1])
    keep_freed_memory()
    print_result(lambda: asdict(benchmark_cell(Cell(**settings))))


if __name__ == "__main__":
    main()
