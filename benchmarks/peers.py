"""longseq and its peers side by side: make bench, or python benchmarks/peers.py [--device cuda] [--out FILE].

Two models are compared in one process, in the order A B A B, on the same input and with the same optimizer, because a
machine's speed drifts. Memory, and anything that is not compared, is measured in a process of its own. On a GPU
everything runs in bfloat16 under torch.compile, at the width of a ViT-B. The most informative rows come first there,
and no row begins after --minutes, because a GPU may be available for a short time only. Without a GPU the CPU's table
is made.
"""

import argparse
import gc
import itertools
import math
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from in_turns import (
    Bench,
    Row,
    Step,
    as_measured,
    compare,
    layer_step,
    our_layer,
    seconds_of,
    spread,
    training_step,
    write_page,
    write_within,
)
from jsonargparse.typing import PositiveInt
from linear_attention_transformer.linear_attention_transformer import SelfAttention
from linformer import Linformer as PyPILinformer
from linformer import LinformerSelfAttention
from nystrom_attention import NystromAttention
from performer_pytorch import SelfAttention as PerformerAttention
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from vit_pytorch.efficient import ViT

from longseq import ImageEncoder, Linformer, Separable, Verma
from longseq.attention import Linear, Projection
from longseq.encoders import Conv2d
from longseq.encoders.local import LocalLayer
from longseq.reports.cell import peak_of
from longseq.reports.plots import machine, markdown
from longseq.reports.processes import print_result, result_of_python
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample, peak_flops
from longseq.training.memory import keep_freed_memory

K, DEPTH, CLASSES = 128, 4, 10
PEERS = ("linformer", "linear-attention-transformer", "nystrom-attention", "performer-pytorch", "vit-pytorch", "timm")
CHECKPOINTING, SEPARABLE, LOCAL = (f"longseq, {part}" for part in ("activation checkpointing", "Separable", "Conv2d"))
DENSE = Linear()
OURS = ("longseq", CHECKPOINTING, SEPARABLE, LOCAL)
CPU = Bench("cpu", 128, 4, ("32", "bf16"), (4096, 16384), (64, 128), (64,))
GPU = Bench("cuda", 768, 12, ("bf16",), (65536, 16384, 4096), (256, 128, 64), (256, 128, 64))


def peer_layers(bench: Bench, n: int) -> dict[str, nn.Module]:
    d, heads = bench.width, bench.heads
    return {
        "linformer": LinformerSelfAttention(d, n, k=K, heads=heads, share_kv=True),
        "nystrom-attention": NystromAttention(d, dim_head=d // heads, heads=heads, num_landmarks=K),
        "performer-pytorch": PerformerAttention(d, heads=heads, dim_head=d // heads),
        "linear-attention-transformer": SelfAttention(d, heads),
    }


def classifiers(bench: Bench, height: int, width: int) -> dict[str, Callable[[], nn.Module]]:
    """Classifiers with a token for each pixel and a class token, which is the default of timm and vit-pytorch."""
    d, heads = bench.width, bench.heads
    n = height * width

    def ours(projection: Projection = DENSE, **options: Any) -> nn.Module:
        size = {"dim": d, "depth": DEPTH, "heads": heads}
        mechanism = Linformer(K, projection=projection)
        encoder = as_measured(ImageEncoder((3, height, width), mechanism, **size, pool="token", **options))
        return nn.Sequential(encoder, nn.Linear(d, CLASSES))

    return {
        "longseq": ours,
        CHECKPOINTING: lambda: ours(checkpointing=True),
        SEPARABLE: lambda: ours(Separable()),
        LOCAL: lambda: ours(local=Conv2d()),
        "timm": lambda: VisionTransformer(
            (height, width), 1, num_classes=CLASSES, embed_dim=d, depth=DEPTH, num_heads=heads  # type: ignore[arg-type]
        ),
        "vit-pytorch with linformer": lambda: ViT(
            image_size=(height, width), patch_size=1, num_classes=CLASSES, dim=d,
            transformer=PyPILinformer(d, n + 1, DEPTH, k=K, heads=heads, share_kv=True),
        ),
    }  # fmt: skip


def apart(bench: Bench, name: str, height: int, width: int) -> dict[str, Any] | None:
    """Seconds and peak bytes of a classifier's training step, in a process of its own; None if it did not fit."""
    arguments = [bench.device, name, str(height), str(width), str(torch.get_num_threads())]
    gc.collect()
    torch.cuda.empty_cache()  # both processes share the GPU's memory
    return result_of_python(__file__, "--apart", *arguments)


def benchmark_cell(device: str, name: str, height: str, width: str, threads: str) -> dict[str, Any]:
    """Seconds of a training step, its peak of memory above weights, gradients and AdamW's moments, and the bytes that
    these three take."""
    torch.set_num_threads(int(threads))
    if name in OURS:
        keep_freed_memory()  # as every training of a Classifier on a CPU does
    bench = GPU if device == "cuda" else CPU
    sides = int(height), int(width)
    model = classifiers(bench, *sides)[name]()
    held = 4 * sum(weight.nbytes for weight in model.parameters())
    step = training_step(bench, model, *sides, bench.precisions[0])
    step()
    gc.collect()
    peak_since = peak_of(torch.device(device))
    step()
    peak = peak_since()
    seconds = statistics.median(seconds_of(bench, step) for _ in range(5))
    return {"seconds": seconds, "peak": peak, "held": held}


def layers(bench: Bench, rounds: int) -> Iterator[Row]:
    wanted = {"linformer": "2.5", "nystrom-attention": "6", "linear-attention-transformer": "1.3"}
    for n in bench.lengths:
        torch.compiler.reset()  # otherwise torch would compile the second length for any length
        for peer, layer in peer_layers(bench, n).items():
            mechanism = Verma() if peer == "linear-attention-transformer" else Linformer(K)
            ours, theirs = (layer_step(bench, side, n) for side in (our_layer(bench, mechanism, n), layer))
            what = f"{type(mechanism).__name__} layer, forward and backward"
            yield [what, peer, f"n = {n}", *compare(bench, ours, theirs, rounds), wanted.get(peer, "")]


def trainings(bench: Bench, rounds: int) -> Iterator[Row]:
    for precision in bench.precisions:
        for side in bench.sides:
            torch.compiler.reset()
            models = classifiers(bench, side, side)
            for peer in ("timm", "vit-pytorch with linformer"):
                if peer == "timm" and (side not in bench.softmax_sides or precision != bench.precisions[0]):
                    continue
                ours, theirs = (
                    training_step(bench, models[name](), side, side, precision) for name in ("longseq", peer)
                )
                figures = compare(bench, ours, theirs, max(rounds // 2, 3))
                wanted = "5" if peer == "timm" else "2" if precision == "32" else "1.3"
                yield [f"classifier, training step, {precision}", peer, f"{side}x{side}", *figures, wanted]


def parts(bench: Bench, rounds: int) -> Iterator[Row]:
    """What a separable E saves, and whether local mixing costs more than its convolutions alone."""
    for side in bench.sides:
        models = classifiers(bench, side, side)
        plain, separable, local = (
            training_step(bench, models[name](), side, side, bench.precisions[0])
            for name in ("longseq", SEPARABLE, LOCAL)
        )
        convolutions = [layer for layer in models[LOCAL]().modules() if isinstance(layer, LocalLayer)]
        alone = layer_step(bench, nn.Sequential(*convolutions), side * side + 1)

        def plain_and_alone(steps: tuple[Step, ...] = (plain, alone)) -> None:
            for step in steps:
                step()

        pairs = [(SEPARABLE, separable, "longseq", plain), (LOCAL, local, "longseq", plain)]
        pairs.append((LOCAL, local, "longseq, and its convolutions by themselves", plain_and_alone))
        for name, ours, other, theirs in pairs:
            figures = compare(bench, ours, theirs, max(rounds // 2, 3))
            what = f"classifier, training step, {name.removeprefix('longseq, ')}"
            yield [what, other, f"{side}x{side}", *figures, ""]


def compiled(bench: Bench, rounds: int) -> Iterator[Row]:
    """The gain from torch.compile, on a device where the other rows run without it."""
    for precision in bench.precisions:
        for side in bench.sides:
            torch.compiler.reset()
            models = classifiers(bench, side, side)
            ours = training_step(bench, models["longseq"](), side, side, precision, compiles=True)
            for other, name, compiles in (
                ("longseq, not compiled", "longseq", False),
                ("vit-pytorch with linformer, compiled", "vit-pytorch with linformer", True),
            ):
                theirs = training_step(bench, models[name](), side, side, precision, compiles)
                figures = compare(bench, ours, theirs, max(rounds // 2, 3))
                yield [f"classifier, training step, {precision}, compiled", other, f"{side}x{side}", *figures, ""]


def memory(bench: Bench, rounds: int) -> Iterator[Row]:
    """Memory of a step without and with weights, gradients and AdamW's moments: a dense E is k x n weights."""
    peers = (CHECKPOINTING, "timm", "vit-pytorch with linformer")
    for side in (side for side in bench.sides if side > 64):
        cells = {name: apart(bench, name, side, side) for name in ("longseq", SEPARABLE, *peers)}
        for ours, theirs in [*(("longseq", peer) for peer in peers), (SEPARABLE, "timm")]:
            ours_of, theirs_of = cells[ours], cells[theirs]
            if not (ours_of and theirs_of):
                continue
            for what, added in (("above weights, gradients, moments", 0), ("with them", 1)):
                mine, other = (of["peak"] + added * of["held"] for of in (ours_of, theirs_of))
                share = f"**{mine / other:.2f}**"
                if theirs == CHECKPOINTING:
                    share += f"; checkpointing takes {theirs_of['seconds'] / ours_of['seconds']:.2f} times as long"
                wanted = "" if theirs == CHECKPOINTING else "0.55" if ours == SEPARABLE else "0.6"
                mib = [f"{of / 2**20:.0f} MiB" for of in (mine, other)]
                measured = f"memory of a training step, {what}{ours.removeprefix('longseq')}"
                yield [measured, theirs, f"{side}x{side}", *mib, share, "", wanted]


def doubling(bench: Bench, rounds: int) -> Iterator[Row]:
    """A training step while n doubles from 4096: up to 65536 on a CPU, and as far as it fits on a GPU."""
    before: dict[str, Any] = {}
    for doublings in range(5 if bench.device == "cpu" else 13):
        height, width = 64 << doublings // 2, 64 << (doublings + 1) // 2
        n = height * width
        figures = apart(bench, "longseq", height, width)
        if figures is None:
            break
        if before:
            times, peaks = (figures[of] / before[of] for of in ("seconds", "peak"))
            ms = [f"{1e3 * of['seconds']:.0f} ms" for of in (figures, before)]
            growth = f"time {times:.2f}, memory {peaks:.2f}"
            yield ["training step, n doubled", "itself", f"{n // 2} to {n}", *ms, growth, "", "2.1"]
        before = {**figures, "n": n}
    if bench.device == "cuda":
        yield ["longest sequence trained at batch 1", "", f"n = {before.get('n')}", "", "", "", "", ""]


def against_the_machine(bench: Bench, rounds: int) -> Iterator[Row]:
    """Counted FLOPs per second of a training step, and the gain from bfloat16. On a CPU the model is wider than in the
    other rows."""
    width, side = (256, 64) if bench.device == "cpu" else (bench.width, 128)
    encoder = as_measured(ImageEncoder((3, side, side), Linformer(K), dim=width, depth=DEPTH, heads=bench.heads))
    flops = flops_per_sample(Classifier(encoder, CLASSES)).training
    model = nn.Sequential(encoder, nn.Linear(width, CLASSES))
    precision = bench.precisions[0]
    step = training_step(bench, model, side, side, precision)
    size, times = (2048, 1) if bench.device == "cpu" else (8192, 10)  # a GPU is too fast to time a small one
    dtype = torch.float32 if precision == "32" else torch.bfloat16
    a, b = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))

    def product() -> None:
        for _ in range(times):
            a @ b

    for run in (step, product, step, product):
        run()
    of_products = 2 * times * size**3
    pairs = [(flops / seconds_of(bench, step), of_products / seconds_of(bench, product)) for _ in range(rounds)]
    at = f"width {width}, n = {side * side}"
    rates = [f"{statistics.median(side) / 1e9:.0f} GFLOP/s" for side in zip(*pairs, strict=True)]
    shares = spread([ours / best for ours, best in pairs])
    yield ["rate of the training step", f"a product of {size}x{size} matrices", at, *rates, *shares, "0.65"]
    if bench.device == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(), "bf16-mixed")
        if peak:
            mfu = f"**{statistics.median(ours for ours, _ in pairs) / peak:.2f}**"
            best = f"{peak / 1e9:.0f} GFLOP/s"
            yield ["MFU of the training step", "dense bf16 peak", at, rates[0], best, mfu, "", "0.40"]
    else:
        low = training_step(bench, model, side, side, "bf16")
        yield ["training step, bf16-mixed", "float32", at, *compare(bench, low, step, rounds), "1.6"]


# The most informative parts come first, because time may be short.
PARTS = {part.__name__: part for part in (against_the_machine, trainings, memory, layers, parts, doubling, compiled)}


def rows(bench: Bench, names: Sequence[str], rounds: int) -> Iterator[Row]:
    names = [name for name in names if not (bench.compiles and name == "compiled")]  # all parts are compiled there
    return itertools.chain.from_iterable(PARTS[name](bench, rounds) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=PositiveInt, default=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of the table; default: all")
    parser.add_argument("--minutes", type=float, help="begin no row after this time; default on a GPU: 6.5")
    parser.add_argument("--out", type=Path, help="default: docs/results/peers.md, or peers-gpu.md on a GPU")
    parser.add_argument("--apart", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts != list(PARTS) and options.out is None and options.apart is None:
        parser.error("argument --parts: give --out too, or the whole table is replaced by these parts")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if options.apart:
        print_result(lambda: benchmark_cell(*options.apart))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: the CPU's table follows")
        options.device = "cpu"
    bench = GPU if options.device == "cuda" else CPU
    what = f"width {bench.width}, {bench.heads} heads, k = {K}, depth {DEPTH}; layers in {bench.precisions[0]}"
    versions = ", ".join(f"{peer} {version(peer)}" for peer in PEERS)
    about = f"    python {shlex.join(sys.argv)}\n\n{date.today()}; {machine(bench.device)}; {versions}. {what}."
    header = ["measured", "against", "at", "longseq", "the other", "ratio", "its spread", "wanted"]
    print(markdown(header, []), end="", flush=True)
    out = options.out or Path("docs/results", "peers-gpu.md" if bench.compiles else "peers.md")
    out.parent.mkdir(parents=True, exist_ok=True)
    minutes = (6.5 if bench.compiles else math.inf) if options.minutes is None else options.minutes
    measured = rows(bench, options.parts, options.rounds)

    def write(done: list[Row], late: str) -> None:
        write_page(out, "longseq and its peers", f"{about}\n\n{markdown(header, done)}{late}")

    write_within(minutes, measured, write)


if __name__ == "__main__":
    main()
