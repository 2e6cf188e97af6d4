"""Time local mixing, forward and backward: longseq's kernel against torch's convolution.

    python benchmarks/local_mixing.py --device cuda      # in under 40 s

Each side is compiled on a GPU and runs in turns with the others. The convolution has either the tokens' memory layout
(channels last) or, in bf16, also its own (contiguous). In bf16 tokens are float32 and the convolution runs under
autocast, as in a training. ``error`` is the largest difference from the same formula in float64, over the largest
value, of the values and of the gradients.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from in_turns import Row, write_within
from torch import Tensor, nn

from longseq.encoders.local_kernel import mixed_locally, suits_local_kernel
from longseq.reports.plots import Report, machine, markdown

HEADER = ["batch x rows x columns x width", "precision", "side", "ms", "time, channels last = 1", "error"]
SHAPES = [(256, 32, 32, 128), (32, 64, 64, 192), (1, 256, 256, 768)]
Side = Callable[[Tensor], Tensor]


def sides(convolution: nn.Conv2d, columns: int, device: str, low: bool) -> dict[str, Side]:
    """What is compared: tokens (b, n, d) to tokens."""

    def channels_last(tokens: Tensor) -> Tensor:
        return tokens + convolution(tokens.mT.unflatten(2, (-1, columns))).flatten(2).mT

    def contiguous(tokens: Tensor) -> Tensor:
        return tokens + convolution(tokens.mT.contiguous().unflatten(2, (-1, columns))).flatten(2).mT

    def kernel(tokens: Tensor) -> Tensor:
        return mixed_locally(tokens, convolution.weight, convolution.bias, None, 0, columns)  # type: ignore[arg-type]

    made: dict[str, Side] = {"channels last": channels_last}
    if low:
        made["contiguous"] = contiguous
    if suits_local_kernel(torch.empty(1, device=device), 9):
        made["longseq's kernel"] = kernel
    if device == "cuda":
        made = {name: torch.compile(side, dynamic=False) for name, side in made.items()}
    return made


def results(side: Side, tokens: Tensor, grad: Tensor, convolution: nn.Conv2d, low: bool) -> list[Tensor]:
    """Values and the gradients of tokens, weight and bias."""
    tokens = tokens.detach().requires_grad_()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=low):
        out = side(tokens)
    return [out.detach(), *torch.autograd.grad(out, [tokens, *convolution.parameters()], grad)]


def milliseconds(run: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):  # queued one behind the other, as in a training
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / 5


def exact_results(tokens: Tensor, grad: Tensor, convolution: nn.Conv2d, columns: int) -> list[Tensor]:
    """The same in float64: for each number of the kernel, the grid shifted by whole tokens."""
    weight, bias = (part.detach().double() for part in convolution.parameters())
    grid, back = (part.double().unflatten(1, (-1, columns)) for part in (tokens, grad))
    rows = grid.shape[1]
    around, back_around = (F.pad(part, (0, 0, 1, 1, 1, 1)) for part in (grid, back))
    out, of_tokens, of_weight = grid + bias, back.clone(), torch.empty_like(weight)
    for y, x in itertools.product(range(3), range(3)):
        shifted = around[:, y : y + rows, x : x + columns]
        out += weight[:, 0, y, x] * shifted
        of_tokens += weight[:, 0, y, x] * back_around[:, 2 - y : 2 - y + rows, 2 - x : 2 - x + columns]
        of_weight[:, 0, y, x] = (back * shifted).sum((0, 1, 2))
    return [out.flatten(1, 2), of_tokens.flatten(1, 2), of_weight, back.sum((0, 1, 2))]


def rows(device: str, shapes: list[tuple[int, int, int, int]], rounds: int) -> Iterator[Row]:
    for low, (b, height, columns, d) in itertools.product((True, False), shapes):
        torch.manual_seed(0)
        torch.compiler.reset()
        tokens, grad = (torch.randn(b, height * columns, d, device=device) for _ in range(2))
        convolution = nn.Conv2d(d, d, 3, padding=1, groups=d, device=device)
        exact = exact_results(tokens, grad, convolution, columns)
        compared = sides(convolution, columns, device, low)
        runs = {name: partial(results, side, tokens, grad, convolution, low) for name, side in compared.items()}
        errors = {name: error(run(), exact) for name, run in runs.items()}  # the first call compiles
        del exact
        for run in runs.values():
            milliseconds(run, device)
        times = [{name: milliseconds(run, device) for name, run in runs.items()} for _ in range(rounds)]
        medians = {name: statistics.median(of_round[name] for of_round in times) for name in runs}
        for name, ms in medians.items():
            ratio = f"**{ms / medians['channels last']:.2f}**"
            precision = "bf16" if low else "fp32"
            yield [f"{b} x {height} x {columns} x {d}", precision, name, f"{ms:.3g}", ratio, f"{errors[name]:.1e}"]


def error(ours: list[Tensor], exact: list[Tensor]) -> float:
    gaps = [(a - e).abs().max() / e.abs().max() for a, e in zip(ours, exact, strict=True)]
    return float(torch.stack(gaps).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", nargs="+", help="such as 32x64x64x192: batch, rows, columns, width")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=0.6, help="begin no row after this time")
    parser.add_argument("--out", type=Path, default=Path("docs/results/local_mixing"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device: there is no GPU here; give --device cpu --shapes 2x8x8x16")
    shapes: Any = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes or []] or SHAPES
    report = Report(arguments.out, machine(arguments.device))
    measured = rows(arguments.device, shapes, arguments.rounds)
    write_within(
        arguments.minutes, measured, lambda done, late: report.write(HEADER, done, markdown(HEADER, done) + late)
    )


if __name__ == "__main__":
    main()
