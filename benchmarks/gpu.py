"""Measure a GPU on long sequences, in eight minutes: python benchmarks/gpu.py [--minutes 8] [--out FOLDER].

The most informative rows come first. table.md and table.csv are written after every row, and no row begins after
--minutes, because a GPU may be available for a short time only. Two things that are compared run in one process, in the
order A B A B. On a GPU everything runs in bfloat16 and under torch.compile, except that the groups of queries, the step
on a million tokens and the longest sequence are not compiled. Rows of trainings have the time from step to step, if
none is waited for, and beside it the host's time and that of the kernels. --lra DIR trains on Long Range Arena's Image
instead, for the 12 epochs of configs/image/cifar10.yaml and half an hour at most; DIR holds CIFAR-10.
"""

import argparse
import gc
import itertools
import math
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import million
import torch
import torch.nn.functional as F
from in_turns import (
    Bench,
    Row,
    Step,
    as_measured,
    autocast,
    compare,
    compare_queued,
    layer_step,
    our_layer,
    queued,
    training_step,
    write_within,
)
from jsonargparse.typing import PositiveInt
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from longseq import ImageEncoder, Linformer, Separable, Verma
from longseq.attention import Mechanism
from longseq.attention.column_softmax import ColumnSoftmax
from longseq.attention.heads import Heads
from longseq.attention.others.flex import attend_in_window
from longseq.attention.others.pattern import Blocks, PatternFormula
from longseq.attention.query_groups import attend_in_groups, num_groups
from longseq.compat.torch import is_out_of_memory
from longseq.reports.cell import largest, peak_of
from longseq.reports.plots import Report, machine, markdown
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample, peak_flops

HEADER = ["measured", "against", "at", "longseq", "the other", "ratio", "its spread", "wanted, or computed best"]
BEST = {(4096, 768): "3.0", (16384, 768): "8.5", (65536, 768): "31"}  # ratio for k = 128, computed from FLOPs and bytes
ROUNDS = 5


def k_of(n: int) -> int:
    return min(128, n // 4)


def blocks(bench: Bench) -> Iterator[Row]:
    """A transformer block with Linformer against the same one with FlashAttention (torch's fused exact attention)."""
    for n in bench.lengths:
        torch.compiler.reset()
        ours, theirs = (Block(bench.width, bench.heads, qkv_bias=False) for _ in range(2))
        ours.attn = our_layer(bench, Linformer(k_of(n)), n)  # type: ignore[assignment]
        figures = compare(bench, layer_step(bench, ours, n), layer_step(bench, theirs, n), ROUNDS)
        at = f"n = {n}, width {bench.width}"
        yield [
            f"block, k = {k_of(n)}, forward and backward",
            "FlashAttention",
            at,
            *figures,
            BEST.get((n, bench.width), ""),
        ]


def kernel_step(bench: Bench, attend: Callable[..., Tensor], parts: list[Tensor]) -> Step:
    """Forward and backward of attention alone."""
    gradient = torch.randn_like(parts[0])

    def step() -> None:
        for part in parts:
            part.grad = None
        attend(*parts).backward(gradient)

    return step


def heads_of(bench: Bench, *lengths: int) -> list[Tensor]:
    """Tensors (1, h, length, c) that are stored token by token, like those of a layer."""
    c = bench.width // bench.heads
    dtype = torch.bfloat16 if bench.precisions[0] == "bf16" else torch.float32
    return [
        torch.randn(1, length, bench.heads, c, device=bench.device, dtype=dtype).transpose(1, 2).requires_grad_()
        for length in lengths
    ]


def as_heads(queries: Tensor, keys: Tensor, values: Tensor, groups: int) -> Tensor:
    """Groups of queries as heads of grouped-query attention."""
    b, h, n, c = queries.shape
    of_groups = queries.reshape(b, h * groups, n // groups, c)
    return F.scaled_dot_product_attention(of_groups, keys, values, enable_gqa=True).reshape(b, h, n, c)


def products(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (queries * queries.shape[-1] ** -0.5 @ keys.mT).softmax(-1) @ values


def query_groups(bench: Bench) -> Iterator[Row]:
    """Groups of queries, against plain products under torch.compile."""
    device = torch.device(bench.device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    for n in bench.lengths:
        k = k_of(n)
        parts = heads_of(bench, n, k, k)
        plain = torch.compile(products) if bench.compiles else products
        chosen = num_groups(1, bench.heads, n, k, processors)
        for groups in sorted({1, 4, 16, 64, chosen}):
            if groups > 1 and (n % groups or n // groups < 16):
                continue
            forms = {"samples": lambda *qkv, s=groups: attend_in_groups(Heads(*qkv), s)}
            if groups > 1:
                forms["heads"] = lambda *qkv, s=groups: as_heads(*qkv, s)
            for form, attend in forms.items():
                what = f"attention, k = {k}, {groups} groups as {form}" + " (chosen)" * (groups == chosen)
                sides = (kernel_step(bench, side, parts) for side in (attend, plain))
                at = f"n = {n}, width {bench.width}"
                yield [what, "plain products" + ", compiled" * bench.compiles, at, *compare(bench, *sides, ROUNDS), ""]


def over_tokens(bench: Bench) -> Iterator[Row]:
    """Softmax over the tokens, as in Verma without E: by reductions, against torch's own."""
    dtype = torch.bfloat16 if bench.precisions[0] == "bf16" else torch.float32
    for n, columns in itertools.product(bench.lengths, sorted({64, bench.width})):
        scores = torch.randn(1, n, columns, device=bench.device, dtype=dtype, requires_grad=True)
        forms = (lambda x: ColumnSoftmax.apply(x, 1), lambda x: x.softmax(1, dtype=x.dtype))
        sides = (kernel_step(bench, form, [scores]) for form in forms)
        at = f"n = {n}, {columns} columns"
        yield ["softmax over tokens, by reductions", "torch's softmax", at, *compare(bench, *sides, ROUNDS), ""]


def linear_kernel(bench: Bench) -> Iterator[Row]:
    """Verma without E, Y = H (L V), against the Triton kernel of fla-org's flash-bidirectional-linear-attention."""
    if bench.device != "cuda" or not find_spec("flash_bla"):
        why = "not installed: pip install git+https://github.com/fla-org/flash-bidirectional-linear-attention"
        yield ["Verma without E, H (L V)", "flash_bla's simple_la", "", "", "", why, "", ""]
        return
    from flash_bla.ops.simple_la.fused import simple_la  # type: ignore[import-not-found]

    def ours(H: Tensor, L: Tensor, values: Tensor) -> Tensor:
        return H @ (L.mT @ values)

    compiled = torch.compile(ours)
    for n in bench.lengths:
        parts = [part.detach().softmax(-1).requires_grad_() for part in heads_of(bench, n, n, n)]
        error = (simple_la(*parts, scale=1.0).float() - ours(*(part.double() for part in parts))).abs().max()
        sides = (kernel_step(bench, side, parts) for side in (compiled, lambda *x: simple_la(*x, scale=1.0)))
        figures = compare(bench, *sides, ROUNDS)
        at = f"n = {n}, width {bench.width}, they differ by {error:.1e}"
        yield ["Verma without E, H (L V)", "flash_bla's simple_la", at, *figures, ""]


def windows(bench: Bench) -> Iterator[Row]:
    """Longformer's window, w = 512: flex_attention against products of blocks."""
    what, against = "window of 512 tokens, flex_attention", "products of blocks"
    if bench.device != "cuda":
        yield [what, against, "", "", "", "flex_attention has no gradients on a CPU", "", ""]
        return
    formula = PatternFormula(0, Blocks.of_windows(1, 256, 256), is_banded=True)
    products_of_blocks = torch.compile(lambda *qkv: formula.by_blocks(Heads(*qkv)))
    for n in bench.lengths:
        parts = heads_of(bench, n, n, n)
        by_flex = attend_in_window(Heads(*parts), 256, 0)
        error = (by_flex.float() - formula.by_blocks(Heads(*(part.float() for part in parts)))).abs().max()
        sides = (
            kernel_step(bench, side, parts)
            for side in (lambda *qkv: attend_in_window(Heads(*qkv), 256, 0), products_of_blocks)
        )
        at = f"n = {n}, width {bench.width}, they differ by {error:.1e}"
        yield [what, f"{against}, compiled", at, *compare(bench, *sides, ROUNDS), ""]


# Trainings of four blocks: images in a batch, their side in pixels, and the width; the mode of torch.compile; and the
# ratio to timm that was wanted.
TRAININGS = (
    (32, 64, 768, None, "1.8"),
    (1, 256, 768, None, "20"),
    (8, 128, 768, None, "4"),
    (32, 64, 192, None, ""),
    (1, 64, 768, "reduce-overhead", ""),
    (32, 64, 384, None, ""),
    (32, 64, 192, "reduce-overhead", ""),
    (1, 64, 768, None, ""),
)
TIMM, BF16, VIT_PYTORCH = "timm's ViT", "longseq with bf16_residual", "vit-pytorch with linformer"


def trainings(bench: Bench) -> Iterator[Row]:
    """A whole training step against timm's ViT with exact attention, compiled in the same mode. Both take the mean of
    the tokens. With one image it is a latency, with 32 a throughput."""
    shrink = 1 if bench.device == "cuda" else 8
    for batch, side, width, mode, wanted in TRAININGS:
        peers = [TIMM]
        if (batch, side, mode) in ((32, 64, None), (1, 256, None)):
            peers.append(BF16)
        if (batch, side, width) == (32, 64, 768) and find_spec("linformer") and find_spec("vit_pytorch"):
            peers.append(VIT_PYTORCH)
        yield from _of_training(bench, peers, max(batch // shrink, 1), side // shrink, width // shrink, mode, wanted)


def _of_training(
    bench: Bench, peers: list[str], batch: int, side: int, width: int, mode: str | None, wanted: str
) -> Iterator[Row]:
    """The rows of one size, which hold the GPU's memory no longer than they are made."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    options: dict[str, Any] = {"batch": batch, "mode": mode}

    def step_of(name: str) -> Step:
        return training_step(bench, _model(name, side, width), side, side, bench.precisions[0], **options)

    ours = step_of("longseq")
    for peer in peers:
        what = f"training step, k = {k_of(side * side)}" + (f", {mode}" if mode else "")
        at = f"{batch} images of {side} x {side}, width {width}"
        yield [what, peer, at, *compare_queued(bench, ours, step_of(peer), ROUNDS), wanted if peer == TIMM else ""]


def _model(name: str, side: int, width: int) -> nn.Module:
    """A classifier of four blocks, with a token for each pixel and Linformer attention, except for timm's."""
    n, heads = side * side, max(width // 64, 1)
    if name == TIMM:
        size: Any = {"img_size": side, "patch_size": 1, "embed_dim": width, "depth": 4, "num_heads": heads}
        return VisionTransformer(**size, num_classes=10, class_token=False, global_pool="avg")
    if name == VIT_PYTORCH:
        from linformer import Linformer as PyPILinformer
        from vit_pytorch.efficient import ViT

        trunk = PyPILinformer(width, n + 1, 4, k=k_of(n), heads=heads, share_kv=True)
        return ViT(image_size=side, patch_size=1, num_classes=10, dim=width, transformer=trunk, pool="mean")
    encoder = ImageEncoder(
        (3, side, side), Linformer(k_of(n)), dim=width, depth=4, heads=heads, bf16_residual=name == BF16
    )
    return nn.Sequential(as_measured(encoder), nn.Linear(width, 10))


def classifier(
    bench: Bench, n: int, mechanism: Mechanism, depth: int = 4
) -> tuple[ImageEncoder, nn.Module, tuple[int, int]]:
    """An encoder of an image with n pixels, the model with its head, and the image's sides."""
    height = 1 << (n.bit_length() - 1) // 2
    sides = (height, n // height)
    encoder = as_measured(ImageEncoder((3, *sides), mechanism, dim=bench.width, depth=depth, heads=bench.heads))
    return encoder, nn.Sequential(encoder, nn.Linear(bench.width, 10)), sides


def mfu(bench: Bench) -> Iterator[Row]:
    """Counted FLOPs per second of a training step, against the device's peak."""
    peak = peak_flops(torch.cuda.get_device_name(), "bf16-mixed") if bench.device == "cuda" else None
    for n in bench.lengths:
        torch.compiler.reset()
        encoder, model, sides = classifier(bench, n, Linformer(k_of(n)))
        flops = flops_per_sample(Classifier(encoder, 10)).training
        step = training_step(bench, model, *sides, bench.precisions[0])
        for _ in range(3):
            step()
        seconds = statistics.median(queued(bench, step, 4)[0] for _ in range(ROUNDS))
        share = f"**{flops / seconds / peak:.2f}**" if peak else ""
        best = f"{peak / 1e12:.0f} TFLOP/s" if peak else "not known"
        at = f"n = {math.prod(sides)}, width {bench.width}, {1e3 * seconds:.3g} ms"
        yield [
            "MFU of a training step, depth 4",
            "the device's peak",
            at,
            f"{flops / seconds / 1e12:.3g} TFLOP/s",
            best,
            share,
            "",
            "",
        ]


def longest(bench: Bench, most: int = 1 << 28) -> Iterator[Row]:
    """The longest sequence that can be trained at batch 1, to within an eighth."""
    for mechanism in (Linformer(k_of(bench.lengths[0]), projection=Separable()), Verma()):

        def fits(rows: int, mechanism: Mechanism = mechanism) -> bool:
            if 16 * rows > most:
                return False
            try:
                encoder = ImageEncoder(
                    (3, rows, 16), mechanism, dim=bench.width, depth=4, heads=bench.heads, positions="none"
                )
                model = nn.Sequential(as_measured(encoder), nn.Linear(bench.width, 10)).to(bench.device)
                with autocast(bench, bench.precisions[0]):
                    loss = model(torch.randn(1, 3, rows, 16, device=bench.device)).sum()
                loss.backward()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    return False
                raise
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            return True

        n = 16 * largest(fits, min(bench.lengths) // 16)
        what = "longest sequence trained at batch 1, depth 4, Separable or without E"
        yield [what, "", type(mechanism).__name__ + f", width {bench.width}", f"n = {n:,}", "", "", "", ""]


def a_million(bench: Bench, side: int = 1024) -> Iterator[Row]:
    """One training step on all pixels of an image, as benchmarks/million.py measures it, on this device."""
    for name, mechanism in million.mechanisms(min(256, side * side // 4)).items():
        peak = peak_of(torch.device(bench.device))  # counted from here, as other parts ran before
        with autocast(bench, bench.precisions[0]):
            measured = million.step(side, mechanism, None, 3, bench.device)
        figures = [f"{measured['seconds']:.3g} s", f"{peak() / 2**30:.3g} GiB"]
        yield [f"training step on {side * side:,} tokens, width 64, depth 4", "", name, *figures, "", "", ""]


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    part.__name__: part
    for part in (trainings, mfu, blocks, query_groups, a_million, longest, linear_kernel, windows, over_tokens)
}


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    for name in arguments.parts:
        for width in arguments.width if name in ("blocks", "query_groups") else arguments.width[:1]:
            on_gpu = arguments.device == "cuda"
            precisions = ("bf16",) if on_gpu else ("32",)
            bench = Bench(arguments.device, width, max(width // 64, 1), precisions, tuple(arguments.n), (), ())
            options: dict[str, Any] = {}
            if not on_gpu:  # sizes that a CPU finishes in seconds
                options = {
                    "a_million": {"side": math.isqrt(max(arguments.n))},
                    "longest": {"most": 2 * max(arguments.n)},
                }
            yield from PARTS[name](bench, **options.get(name, {}))


def train_lra(folder: str) -> NoReturn:
    """Long Range Arena's Image: CIFAR-10 in grey, a token for each of its 1,024 pixels, without augmentation."""
    root = Path(__file__).parents[1]
    configs = [root / "configs" / name for name in ("image/cifar10.yaml", "trainer/gpu.yaml")]
    command = [sys.executable, root / "train.py", "fit", "--config", configs[0], "--config", configs[1]]
    command += ["--data.root", folder, "--data.augment", "[]", "--trainer.max_time", "00:00:30:00"]
    raise SystemExit(subprocess.run(command, check=False).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--n", type=PositiveInt, nargs="+", default=[16384, 65536, 4096])
    parser.add_argument("--width", type=PositiveInt, nargs="+", default=[768, 384])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no row after this time")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu"))
    parser.add_argument("--lra", metavar="DIR", help="train on Long Range Arena's Image and do nothing else")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device: there is no GPU here; give --device cpu --n 64 128 --width 32")
    if arguments.lra:
        train_lra(arguments.lra)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    report = Report(arguments.out, machine(arguments.device), sys.argv)
    write_within(
        arguments.minutes, rows(arguments), lambda done, late: report.write(HEADER, done, markdown(HEADER, done) + late)
    )


if __name__ == "__main__":
    main()
