"""How close attention over k shortened tokens comes to attention over all n, and what the theorems say about it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.reports._checks import require_positive
from longseq.reports.plots import COLOURS, Report, machine, panels, styled


def approximation(
    n: list[int] = [128, 512, 1024],  # noqa: B006  (jsonargparse shows them)
    k: list[int] = [8, 16, 32, 64, 128],  # noqa: B006
    channels: int = 16,
    smoothness: float = 16.0,
    draws: int = 8,
    steps: int = 200,
    out: str = "approximation",
) -> None:
    """Measure the relative error of softmax attention whose keys and values are shortened by E and F.

    Queries, keys and values are Gaussian; keys and values are smooth along the tokens, like neighbouring pixels or
    frames. The table compares several E and F: means over windows (mean); matrices trained for this error (learned);
    E = F = R with entries from N(0, 1/k) (gaussian); and the theorems' delta R and exp(-delta) R with delta = 2^-n
    (theorem). With the theorems' matrices every logit vanishes and the softmax is uniform, so the table also has the
    error of a uniform softmax over all tokens (uniform). Linformer's theorem 2 promises an error of epsilon for
    k = min(9 c log c, 5 log n) / epsilon^2, up to a constant; the table has epsilon for constant 1.

    Args:
        n: Sequence lengths.
        k: Shortened lengths.
        channels: c, the channels of a head.
        smoothness: Tokens over which keys and values change; 0 makes each token independent of its neighbours.
        draws: Number of random queries, keys and values to average over.
        steps: Training steps of E and F.
        out: Folder for table.md, table.csv and approximation.png.

    Raises:
        ValueError: If a number is out of its range, a list is empty or repeats a number, or an n is shorter than all k.
    """
    require_positive(n=n, k=k, channels=channels, draws=draws, steps=steps)
    if not 0 <= smoothness < math.inf:
        raise ArgumentError("smoothness", f"must be 0 or more, got {smoothness}; 0 makes tokens independent")
    if min(k) > min(n):
        what = f"must hold a number of at most {min(n)}, the shortest n, got {k}"
        raise ArgumentError("k", f"{what}; add a smaller one, or leave out this n")
    what = f"relative error, {channels} channels, smooth over {smoothness:g} tokens, mean of {draws} draws"
    report = Report(out, f"{what}; {machine()}")
    rows = []
    for length in n:
        for size in [size for size in k if size <= length]:
            errors = {
                name: relative_error(make(length, size), length, channels, smoothness, draws)
                for name, make in _ways(channels, smoothness, steps).items()
            }
            bound = math.sqrt(min(9 * channels * math.log(channels), 5 * math.log(length)) / size)
            rows.append([length, size, *(f"{error:.4f}" for error in errors.values()), f"{bound:.3f}"])
            print(f"n {length:>6}  k {size:>5}  " + "  ".join(f"{a} {b:.3f}" for a, b in errors.items()), flush=True)
    names = [*_ways(channels, smoothness, steps)]
    header = ["n", "k", *names, "theorem's epsilon"]
    report.end(report.write(header, rows), _draw(rows, n, names), "approximation.png")


def random_inputs(
    n: int, channels: int, smoothness: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (n, c) of variance 1. A Gaussian smooths keys and values along the tokens."""
    queries, keys, values = torch.randn(3, n, channels, dtype=torch.float64, generator=generator)
    if smoothness:
        distance = torch.arange(n)[:, None] - torch.arange(n)
        kernel = torch.exp(-0.5 * (distance / smoothness).square()).double()
        kernel = kernel / kernel.square().sum(1, keepdim=True).sqrt()
        keys, values = kernel @ keys, kernel @ values
    return queries, keys, values


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Float[Tensor, "n c"]:
    return (queries @ keys.mT * queries.shape[-1] ** -0.5).softmax(-1) @ values


def relative_error(pair: tuple[Tensor, Tensor], n: int, channels: int, smoothness: float, draws: int) -> float:
    """||Y - softmax(Q (E K)') F V|| / ||Y||, in the Frobenius norm, the mean over inputs unseen in training."""
    E, F = pair
    generator = torch.Generator().manual_seed(1)
    errors = []
    for _ in range(draws):
        queries, keys, values = random_inputs(n, channels, smoothness, generator)
        exact = attend(queries, keys, values)
        errors.append(float((exact - attend(queries, E @ keys, F @ values)).norm() / exact.norm()))
    return sum(errors) / len(errors)


def _ways(channels: int, smoothness: float, steps: int) -> dict[str, Callable[[int, int], tuple[Tensor, Tensor]]]:
    def gaussian(n: int, k: int) -> tuple[Tensor, Tensor]:
        R = torch.randn(k, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * k**-0.5
        return R, R

    def theorem(n: int, k: int) -> tuple[Tensor, Tensor]:
        R, _ = gaussian(n, k)
        delta = 2.0**-n
        return delta * R, math.exp(-delta) * R

    def uniform(n: int, k: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, n, dtype=torch.float64), torch.full((1, n), 1 / n, dtype=torch.float64)

    def mean(n: int, k: int) -> tuple[Tensor, Tensor]:
        window = torch.arange(n) * k // n
        means = (window == torch.arange(k)[:, None]).double()
        means = means / means.sum(1, keepdim=True)
        return means, means

    def learned(n: int, k: int) -> tuple[Tensor, Tensor]:
        start = mean(n, k)[0]
        E, F = start.clone().requires_grad_(), start.clone().requires_grad_()
        optimizer = torch.optim.Adam([E, F], lr=0.1 / n)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            queries, keys, values = random_inputs(n, channels, smoothness, generator)
            exact = attend(queries, keys, values)
            error = (exact - attend(queries, E @ keys, F @ values)).square().sum() / exact.square().sum()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            decay.step()
        return E.detach(), F.detach()

    return {"mean": mean, "learned": learned, "gaussian": gaussian, "theorem": theorem, "uniform": uniform}


@styled
def _draw(rows: list[list[Any]], lengths: list[int], names: list[str]) -> Any:
    figure, axes = panels(len(lengths), width=3.6)
    for panel, n in zip(axes, lengths, strict=True):
        of_length = [row for row in rows if row[0] == n]
        x = [row[1] for row in of_length]
        for number, name in enumerate([*names, "theorem's epsilon"]):
            is_bound = number == len(names)
            errors = [float(row[2 + number]) for row in of_length]
            panel.plot(x, errors, ":" if is_bound else "o-", color=COLOURS[0 if is_bound else 2 + number], label=name)
        panel.set_xscale("log", base=2)
        panel.set(xlabel="k", ylabel="relative error", yscale="log", title=f"n = {n}")
    axes[0].legend(fontsize=7)
    return figure
