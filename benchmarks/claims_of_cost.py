"""Count and time what Linformer's papers say of costs: python benchmarks/claims_of_cost.py [--parts steps ...].

steps: how many of a layer's operations must follow each other, counted at several lengths.
time: the time of blocks against k up to n, by the processor's clock.
blockwise: a training step with blockwise attention beside softmax, by the processor's clock.
products: the share of matrix products in the FLOPs and in the time of a training step and of attention alone.

A part takes up to half a minute of a core, blockwise five minutes. It writes table.md, table.csv and a picture to a
folder of its own in --out.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from claims import Table, curves, main, spread
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import (
    LSTM,
    Blockwise,
    Linformer,
    Mechanism,
    Reformer,
    Softmax,
    SparseTransformer,
    TokenGrid,
    Verma,
)
from longseq.reports.cell import Cell


class Chain(TorchDispatchMode):
    """Find the longest chain of operations of which each needs the result of the one before. An operation of torch
    counts as one, views as none, and sorting or searching in n numbers as log2(n)."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: dict[int, float] = defaultdict(float)
        self.alive: list[Any] = []  # a storage that is freed would give its address to another one
        self.longest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(part) if isinstance(t, Tensor)] for part in ((args, kwargs), out))
        name = func.overloadpacket.__name__
        cost = math.log2(max(given[0].shape[-1], 2)) if "sort" in name or "search" in name else float(not func.is_view)
        depth = max((self.depths[t.untyped_storage()._cdata] for t in given), default=0.0) + cost
        for tensor in made:
            self.depths[tensor.untyped_storage()._cdata] = depth
            self.alive.append(tensor.untyped_storage())
        self.longest = max(self.longest, depth)
        return out


def chain(mechanism: Mechanism, n: int, dim: int = 16) -> float:
    """The longest chain of a layer's forward pass over n tokens."""
    torch.manual_seed(0)
    (layer,) = mechanism.layers([Attention(dim, num_heads=2)], TokenGrid((n, 1)))
    layer: Any = layer.double().eval()  # in float64 each step of an LSTM is an operation
    with torch.no_grad(), Chain() as counted:
        layer(torch.randn(1, n, dim, dtype=torch.float64))
    return counted.longest


def steps(lengths: list[int]) -> Table:
    """Sequential operations, by the papers' table 1."""
    claimed: dict[str, tuple[str, Mechanism]] = {
        "LSTM, both directions at once": ("O(n)", LSTM()),
        "Transformer": ("O(1)", Softmax()),
        "Sparse Transformer": ("O(1)", SparseTransformer()),
        "Reformer, 1 round": ("O(log n)", Reformer(rounds=1, chunk=16)),
        "Reformer, 4 rounds": ("more", Reformer(rounds=4, chunk=16)),
        "Linformer": ("O(1)", Linformer(16)),
        "Verma": ("O(1)", Verma(16)),
    }
    table = [
        [name, claim, *(f"{chain(mechanism, n):g}" for n in lengths)] for name, (claim, mechanism) in claimed.items()
    ]
    lines = {row[0]: [float(cell) for cell in row[2:]] for row in table}
    labels = {"xlabel": "tokens n", "ylabel": "operations in a row", "yscale": "log", "title": "Sequential operations"}
    return ["layer", "claimed", *(f"n = {n}" for n in lengths)], table, curves(lengths, lines, **labels)


def time_by_k(sizes: list[int], n: int = 512, dim: int = 256, rounds: int = 25) -> Table:
    """The forward pass of two blocks in turns with one that has softmax written out, in seconds of the processor, which
    other programs change little."""
    plain = Cell("softmax-written", n, None, 1, dim, 2, 4, "forward", "cpu", "32", 1)
    cells = {f"Linformer, k = {k}": replace(plain, mechanism="linformer-written", k=k) for k in sizes}
    blocks = {name: cell.blocks().eval() for name, cell in {"softmax": plain, **cells}.items()}
    tokens = torch.randn(1, n, dim, generator=torch.manual_seed(0))
    with torch.no_grad():
        seconds = in_turns({name: partial(block, tokens) for name, block in blocks.items()}, rounds)
    table, lines = [], defaultdict(list)
    for name, times in seconds.items():
        middle, shown = ratio(times, seconds["softmax"])
        table.append([name, f"{1e3 * median(times):.1f}", shown])
        lines["of softmax's time"] += [middle] if name in cells else []
    labels = {"xlabel": f"k, of {n} tokens", "ylabel": "time, softmax = 1", "title": "Two blocks, forward"}
    return (
        ["", "ms of the processor, median", "of softmax's, median (quartiles)"],
        table,
        curves(sizes, lines, **labels),
    )


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor that each call takes, by rounds in which each is called once."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            begin = process_time()
            run()
            if number > 1:  # the first ones warm up
                seconds[name].append(process_time() - begin)
    return seconds


def ratio(times: list[float], others: list[float]) -> tuple[float, str]:
    """The median of the ratios of each round, and the text of it with its quartiles."""
    ratios = sorted(own / other for own, other in zip(times, others, strict=True))
    quarter = len(ratios) // 4
    return median(ratios), f"{median(ratios):.2f} ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"


def blockwise(lengths: list[int], dim: int = 768, heads: int = 12, rounds: int = 15) -> Table:
    """A training step of two blocks as wide as BERT-base: blockwise attention with two and three blocks of tokens in
    turns with softmax, fused and written out."""
    table, lines = [], defaultdict(list)
    for n in lengths:
        cell = Cell("softmax", n, None, 1, dim, 2, heads, "train", "cpu", "32", 1)
        written = replace(cell, mechanism="softmax-written")
        models: dict[str, nn.Module] = {"softmax": cell.blocks(), "softmax, written out": written.blocks()}
        for num_blocks in (2, 3):
            models[f"blockwise, {num_blocks} blocks"] = plugged(cell, Blockwise(num_blocks))
        tokens = torch.randn(1, n, dim, generator=torch.manual_seed(0))
        steps = {name: partial(train_step, model, tokens) for name, model in models.items()}
        seconds = in_turns(steps, rounds)
        for name, times in seconds.items():
            middle, of_fused = ratio(times, seconds["softmax"])
            of_written = ratio(times, seconds["softmax, written out"])[1]
            table.append([f"{n:,}", name, f"{1e3 * median(times):.0f}", of_fused, of_written])
            lines[name].append(middle)
    titles = ["tokens", "", "ms of the processor, median", "of fused softmax (quartiles)", "of softmax written out"]
    labels = {"xlabel": "tokens", "ylabel": "time, fused softmax = 1", "title": "Two blocks, forward and backward"}
    return titles, table, curves(lengths, lines, **labels)


def plugged(cell: Cell, mechanism: Mechanism) -> nn.Module:
    """The blocks of a cell with another attention."""
    blocks: Any = cell.blocks()
    layers = mechanism.layers([block.attn for block in blocks], TokenGrid((cell.n, 1)))
    for block, layer in zip(blocks, layers, strict=True):
        block.attn = layer
    return blocks


def train_step(model: nn.Module, tokens: Tensor) -> None:
    model(tokens).square().mean().backward()


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_COSTS = {"softmax": 5, "layer_norm": 5, "gelu": 8}  # FLOPs of a number, about; other operations have one


class Elementwise(TorchDispatchMode):
    """Count the FLOPs of all operations that are no matrix products and no views."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _PRODUCTS and not func.is_view and not name.startswith(("empty", "zeros", "ones")):
            most = max((t.numel() for t in tree_leaves((args, out)) if isinstance(t, Tensor)), default=0)
            self.flops += most * next((cost for key, cost in _COSTS.items() if key in name), 1)
        return out


@contextmanager
def profiled() -> Iterator[list[float]]:
    """The share of matrix products in the time of what runs inside."""
    share: list[float] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield share
    times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    share.append(
        sum(time for key, time in times.items() if key.removeprefix("aten::") in _PRODUCTS) / sum(times.values())
    )


def products(n: int = 512, dim: int = 768, heads: int = 12, repeats: int = 5) -> Table:
    """Blocks of a Transformer as wide as BERT-base and GPT-2 small, and attention alone, with dropout, written out."""
    cell = Cell("softmax-written", n, None, 1, dim, 1, heads, "train", "cpu", "32", 1)
    torch.manual_seed(0)
    block, tokens = cell.blocks(), torch.randn(1, n, dim)
    parts = torch.randn(3, 1, heads, n, dim // heads).requires_grad_()

    def step() -> None:
        block(tokens).square().mean().backward()

    def attention() -> None:
        queries, keys, values = parts
        weights = F.dropout((queries * queries.shape[-1] ** -0.5 @ keys.mT).softmax(-1), 0.1)
        (weights @ values).square().mean().backward()

    table, lines = [], {"of FLOPs": [], "of time": []}
    for name, run in (("a block, forward and backward", step), ("attention alone, with dropout", attention)):
        run()
        with FlopCounterMode(display=False) as counter:
            run()
        with Elementwise() as others:
            run()
        of_flops = counter.get_total_flops() / (counter.get_total_flops() + others.flops)
        times = []
        for _ in range(repeats):
            with profiled() as share:
                run()
            times += share
        table.append([name, f"{of_flops:.1%}", spread([100 * time for time in times], ".0f") + " %"])
        lines["of FLOPs"].append(of_flops)
        lines["of time"].append(median(times))
    figure = curves([1, 2], lines, xlabel="1: a block, 2: attention", ylabel="share of matrix products", ylim=(0, 1))
    return ["", "of the FLOPs", "of the time"], table, figure


PARTS: dict[str, tuple[str, Callable[[], Table]]] = {
    "steps": ("operations that must follow each other, forward", lambda: steps([128, 256, 512, 1024])),
    "time": (
        "512 tokens, width 256, 4 heads, written out, float32, 25 rounds",
        lambda: time_by_k([1, 80, 128, 256, 384, 512]),
    ),
    "blockwise": (
        "width 768, 12 heads, two blocks, forward and backward, float32, 15 rounds",
        lambda: blockwise([512, 1024]),
    ),
    "products": ("512 tokens, width 768, 12 heads, float32, 5 repeats", products),
}


if __name__ == "__main__":
    main("claims_of_cost", __doc__, PARTS)
