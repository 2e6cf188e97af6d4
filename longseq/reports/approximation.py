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
    k: list[int] = [8, 16, 32, 64, 128, 256],  # noqa: B006
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
    error of a uniform softmax over all tokens (uniform). P_low is the context matrix P cut to its k largest singular
    values (Linformer, equation 6). No matrix of rank k that knows P, but not the values, has a smaller mean error than
    rank k: the cut of P S, where S makes the values smooth (Eckart and Young). Verma's theorem has the theorems'
    matrices in Verma's attention, whose error is that from Verma without E.

    Linformer's theorem 2 promises an error of epsilon for k = min(9 c log c, 5 log n) / epsilon^2, up to a constant;
    the table has epsilon for constant 1. Verma's theorem (section 3.2) promises it for k = 5 log n / (epsilon^2 -
    epsilon^3), and then for 9 log c in place of 5 log n, a k without n; none says that no epsilon below 1 has this k.

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
    rows, names = [], []
    for length in n:
        sizes = [size for size in k if size <= length]
        by_rank = errors_by_rank(length, sizes, channels, smoothness, draws)
        for size in sizes:
            ways = _ways(channels, smoothness, steps)
            errors = {
                name: relative_error(make(length, size), length, channels, smoothness, draws)
                for name, make in ways.items()
            }
            errors |= dict(zip(("P_low", "rank k"), by_rank[size], strict=True))
            pair = ways["theorem"](length, size)
            errors["Verma's theorem"] = relative_error(pair, length, channels, smoothness, draws, attend_by_verma)
            bound = math.sqrt(min(9 * channels * math.log(channels), 5 * math.log(length)) / size)
            promised = (epsilon(5 * math.log(length), size), epsilon(9 * math.log(channels), size))
            bounds = (f"{bound:.3f}", *("none" if e is None else f"{e:.3f}" for e in promised))
            rows.append([length, size, *(f"{error:.4f}" for error in errors.values()), *bounds])
            print(f"n {length:>6}  k {size:>5}  " + "  ".join(f"{a} {b:.3f}" for a, b in errors.items()), flush=True)
            names = [*errors]
    header = ["n", "k", *names, "theorem's epsilon", "Verma's epsilon", "Verma's without n"]
    report.end(report.write(header, rows), _draw(rows, n, names), "approximation.png")


def random_inputs(
    n: int, channels: int, smoothness: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (n, c) of variance 1. A Gaussian smooths keys and values along the tokens."""
    queries, keys, values = torch.randn(3, n, channels, dtype=torch.float64, generator=generator)
    if smoothness:
        kernel = _smoothing(n, smoothness)
        keys, values = kernel @ keys, kernel @ values
    return queries, keys, values


def _smoothing(n: int, smoothness: float) -> Float[Tensor, "n n"]:
    """S: it makes independent tokens smooth along the sequence, and keeps their variance."""
    if not smoothness:
        return torch.eye(n, dtype=torch.float64)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    kernel = torch.exp(-0.5 * (distance / smoothness).square()).double()
    return kernel / kernel.square().sum(1, keepdim=True).sqrt()


def context_matrix(queries: Tensor, keys: Tensor) -> Float[Tensor, "n k"]:
    return (queries @ keys.mT * queries.shape[-1] ** -0.5).softmax(-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Float[Tensor, "n c"]:
    return context_matrix(queries, keys) @ values


def attend_by_verma(queries: Tensor, keys: Tensor, values: Tensor) -> Float[Tensor, "n c"]:
    scale = queries.shape[-1] ** -0.5
    return (queries * scale).softmax(-1) @ ((keys.mT * scale).softmax(-1) @ values)


def relative_error(
    pair: tuple[Tensor, Tensor],
    n: int,
    channels: int,
    smoothness: float,
    draws: int,
    formula: Callable[[Tensor, Tensor, Tensor], Tensor] = attend,
) -> float:
    """||Y - softmax(Q (E K)') F V|| / ||Y||, in the Frobenius norm, the mean over inputs unseen in training."""
    E, F = pair
    generator = torch.Generator().manual_seed(1)
    errors = []
    for _ in range(draws):
        queries, keys, values = random_inputs(n, channels, smoothness, generator)
        exact = formula(queries, keys, values)
        errors.append(float((exact - formula(queries, E @ keys, F @ values)).norm() / exact.norm()))
    return sum(errors) / len(errors)


def errors_by_rank(
    n: int, sizes: list[int], channels: int, smoothness: float, draws: int
) -> dict[int, tuple[float, float]]:
    """By k, the relative error of P_low and the smallest mean error of any matrix of rank k, on the inputs of
    ``relative_error``: the singular values of P S beyond the k-th are what such a matrix must lose of P V."""
    generator = torch.Generator().manual_seed(1)
    sums = {k: (0.0, 0.0) for k in sizes}
    for _ in range(draws):
        queries, keys, values = random_inputs(n, channels, smoothness, generator)
        P = context_matrix(queries, keys)
        size = (P @ values).norm()
        left, sigma, right = torch.linalg.svd(P)
        lost = torch.linalg.svdvals(P @ _smoothing(n, smoothness)).square()
        for k, (of_low, of_best) in sums.items():
            rest = left[:, k:] @ (sigma[k:, None] * (right[k:] @ values))  # (P - P_low) V
            least = (channels * lost[k:].sum()).sqrt()
            sums[k] = (of_low + float(rest.norm() / size), of_best + float(least / size))
    return {k: (low / draws, best / draws) for k, (low, best) in sums.items()}


def epsilon(numerator: float, k: int) -> float | None:
    """The smallest epsilon with k = numerator / (epsilon^2 - epsilon^3); None if this k is too small for any."""
    wanted = numerator / k
    low, high = 0.0, 2 / 3  # where epsilon^2 - epsilon^3 is largest
    if wanted > high**2 - high**3:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle**2 - middle**3 < wanted else (low, middle)
    return high


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
            colour = COLOURS[0] if is_bound else COLOURS[(2 + number) % len(COLOURS)]
            marker = ":" if is_bound else "s--" if name in ("P_low", "rank k") else "o-"
            panel.plot(x, errors, marker, color=colour, label=name)
        panel.set_xscale("log", base=2)
        panel.set(xlabel="k", ylabel="relative error", yscale="log", title=f"n = {n}", ylim=(1e-4, None))
    axes[0].legend(fontsize=6)
    return figure
