"""Check and time the Triton kernels, attention to few keys first: python benchmarks/few_keys.py [--seconds 240].

The most telling lines come first, and nothing begins after --seconds. Errors are largest differences from float64 over
the largest value, beside those of torch's fused kernel. Times are those of CUDA graphs, so the host's time does not
count; inputs take turns, so that the GPU's cache does not hold them. The sweep prints the settings that are fastest for
longseq/attention/few_keys.py. --device cpu runs small sizes in Triton's interpreter.
"""

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from longseq.attention import column_softmax as columns
from longseq.attention.column_softmax import ColumnSoftmax, column_softmax
from longseq.attention.few_keys import Settings, attend_to_few, run_backward, run_forward, settings_for, suits_few_keys
from longseq.attention.heads import Heads
from longseq.attention.mixer import masked_scores
from longseq.attention.query_groups import attend_in_groups, groups_for

START = time.perf_counter()
BEYOND_CACHE = 2e8  # bytes of inputs that take turns


def show(*words: object) -> None:
    print(f"{time.perf_counter() - START:5.1f} s ", *words, flush=True)


class Case:
    """The inputs of attention with (b, n) queries, width h c and k keys, stored token by token."""

    def __init__(
        self, device: str, b: int, n: int, h: int, c: int, k: int, dtype: torch.dtype, is_masked: bool = False
    ) -> None:
        self.name = f"b {b}, n {n}, h {h}, c {c}, k {k}, {str(dtype)[6:]}" + ", masked" * is_masked
        self.flops, self.bytes = 4 * b * n * h * c * k, b * n * h * c * dtype.itemsize
        generator = torch.Generator(device).manual_seed(0)

        def drawn(length: int, parts: int = 1) -> list[Tensor]:
            numbers = torch.randn(b, length, parts * h * c, device=device, generator=generator).to(dtype)
            heads = (part.unflatten(-1, (h, c)).transpose(1, 2) for part in numbers.chunk(parts, -1))
            return [part.requires_grad_() for part in heads]

        (self.queries,), (self.keys, self.values) = drawn(n), drawn(k, 2)
        self.grad = drawn(n)[0].detach()
        self.mask = None
        if is_masked:
            self.mask = torch.rand(b, 1, 1, k, device=device, generator=generator) < 0.7

    @property
    def parts(self) -> list[Tensor]:
        return [self.queries, self.keys, self.values]

    @property
    def heads(self) -> Heads:
        return Heads(*self.parts, key_mask=self.mask)


def products(heads: Heads) -> Tensor:
    scores = heads.queries * heads.queries.shape[-1] ** -0.5 @ heads.keys.mT
    return masked_scores(scores, heads.key_mask).softmax(-1) @ heads.values


def fused(heads: Heads) -> Tensor:
    """What longseq does without the kernel."""
    return attend_in_groups(heads, groups_for(heads.queries, heads.keys))


def results(attend: Callable[[Heads], Tensor], case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    parts = [(part if dtype is None else part.to(dtype)).detach().requires_grad_() for part in case.parts]
    out = attend(Heads(*parts, key_mask=case.mask))
    return [out, *torch.autograd.grad(out, parts, case.grad.to(out.dtype))]


def check(case: Case) -> None:
    """Right is at most twice the error of torch's kernel. In float32 both kernels use TF32."""
    if case.queries.is_cuda and not suits_few_keys(case.heads):
        show("not for the kernel:", case.name)
        return
    exact = results(products, case, torch.float64)
    own = [results(attend_to_few, case) for _ in range(2)]
    errors = []
    for given in (own[0], results(fused, case)):
        errors.append(
            [(ours.double() - best).abs().max() / best.abs().max() for ours, best in zip(given, exact, strict=True)]
        )
    ours, theirs = (torch.stack(part).tolist() for part in errors)
    allowed = 1e-3 if case.queries.dtype == torch.float32 else 1e-6
    is_right = all(own <= 2 * other + allowed for own, other in zip(ours, theirs, strict=True))
    is_equal = all(torch.equal(*pair) for pair in zip(*own, strict=True))
    texts = [f"{name} {a:.1e} ({b:.1e})" for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True)]
    show("right" if is_right else "WRONG", "" if is_equal else "NOT DETERMINISTIC", case.name + ":", *texts)


def seconds(act: Callable[[Any], object], cases: list[Any]) -> float:
    """Seconds of the GPU for one call, the median of five graphs' replays."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        act(cases[0])
        return time.perf_counter() - begin
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for case in cases[:2]:
            act(case)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(8, len(cases))
    with torch.cuda.graph(graph):
        for index in range(rounds):
            act(cases[index % len(cases)])
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / rounds)
    return sorted(times[1:])[2]


def in_turns(device: str, b: int, n: int, h: int, c: int, k: int, dtype: torch.dtype) -> list[Case]:
    """As many cases as exceed the GPU's cache."""
    copies = 1 if device == "cpu" else math.ceil(BEYOND_CACHE / (b * n * h * c * dtype.itemsize))
    return [Case(device, b, n, h, c, k, dtype) for _ in range(copies)]


def forward(attend: Callable[[Heads], Tensor]) -> Callable[[Case], object]:
    def act(case: Case) -> None:
        with torch.no_grad():
            attend(case.heads)

    return act


def both_ways(attend: Callable[[Heads], Tensor]) -> Callable[[Case], object]:
    return lambda case: torch.autograd.grad(attend(case.heads), case.parts, case.grad)


def compare(cases: list[Case], sides: dict[str, Callable[[Heads], Tensor]]) -> None:
    case = cases[0]
    for what, way, flops, passes in (("forward", forward, 1, 2), ("forward and backward", both_ways, 3, 5)):
        texts = []
        for name, attend in sides.items():
            taken = seconds(way(attend), cases)
            rates = f"{flops * case.flops / taken / 1e12:.0f} TFLOP/s, {passes * case.bytes / taken / 1e9:.0f} GB/s"
            texts.append(f"{name} {1e3 * taken:.3f} ms" + f" ({rates})" * (name == "kernel"))
        show(case.name, what + ":", "; ".join(texts))


def over_tokens(device: str, b: int, n: int, c: int) -> None:
    """Softmax over the tokens, as in Verma without E: by our kernels, by torch's reductions, and by torch.compile."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    scores = torch.randn(b, n, c, device=device).to(dtype)
    exact = scores.double().softmax(1)
    errors = [
        f"{float(((part - exact) / exact).abs().max()):.1e}" for part in (column_softmax(scores), scores.softmax(1))
    ]
    tensors = [scores.clone() for _ in range(math.ceil(BEYOND_CACHE / (scores.nbytes)) if device == "cuda" else 1)]

    def by_reductions(scores: Tensor) -> object:
        with patch.object(columns, "HAS_TRITON", False):
            return ColumnSoftmax.apply(scores, 1)

    sides: dict[str, Callable[[Tensor], object]] = {"kernels": column_softmax, "reductions": by_reductions}
    if device == "cuda":
        sides["compiled"] = torch.compile(lambda scores: scores.softmax(1))
    with torch.no_grad():
        times = {name: seconds(side, tensors) for name, side in sides.items()}
    rate = f"{3 * scores.nbytes / times['kernels'] / 1e9:.0f} GB/s"
    texts = [f"{name} {1e3 * taken:.3f} ms" for name, taken in times.items()]
    show(f"softmax over tokens, b {b}, n {n}, c {c}, relative error {errors[0]} ({errors[1]}):", *texts, rate)


def settings_to_try(is_cuda: bool, is_backward: bool) -> list[Settings]:
    """Tiles, warps and stages; the numbers of programs follow with the fastest of these."""
    if not is_cuda:
        return [Settings(32, 4, 1, 2)]
    forward = "64/4/1 64/4/2 64/4/3 64/8/2 128/4/2 128/8/1 128/8/2 128/8/3 32/4/2"
    backward = "32/4/2 32/8/2 64/4/1 64/4/2 64/8/1 64/8/2 64/8/3 64/16/2 128/8/1 128/8/2 128/16/2"
    ways = (map(int, way.split("/")) for way in (backward if is_backward else forward).split())
    return [Settings(block, warps, stages, 4 if is_backward else 8) for block, warps, stages in ways]


def launch(case: Case, settings: Settings, is_backward: bool) -> object:
    queries, keys, values = (part.detach() for part in case.parts)
    if is_backward:
        return run_backward(case.grad, queries, keys, values, case.mask, settings)
    return run_forward(queries, keys, values, case.mask, settings)


def sweep(cases: list[Case], is_cuda: bool) -> None:
    """Compile in threads, time, and then try other numbers of programs with the two fastest settings."""
    case = cases[0]
    (_, h, _, c), k, dtype = case.queries.shape, case.keys.shape[2], case.queries.dtype
    small = Case(case.queries.device.type, 1, 1024 if is_cuda else 64, h, c, k, dtype)

    def compiles(pair: tuple[Settings, bool]) -> bool:
        try:
            launch(small, pair[0], pair[1])
        except TritonError as error:
            show("does not fit:", *pair, str(error).splitlines()[0][:100])
            return False
        return True

    ways = [(settings, way) for way in (False, True) for settings in settings_to_try(is_cuda, way)]
    with ThreadPoolExecutor(8 if is_cuda else 1) as pool:
        ways = [way for way, fits in zip(ways, pool.map(compiles, ways), strict=True) if fits]
    for is_backward in (False, True):
        own = settings_for(dtype, c, k, is_backward)
        tried: dict[Settings, float] = {}

        def measure(settings: Settings, tried: dict[Settings, float] = tried, is_backward: bool = is_backward) -> None:
            if settings not in tried:
                tried[settings] = seconds(lambda case: launch(case, settings, is_backward), cases)

        for settings in (own, *(settings for settings, way in ways if way == is_backward)):
            measure(settings)
        for best in sorted(tried, key=tried.__getitem__)[:2]:
            for programs in (1, 2, 4, 8, 16):
                measure(best._replace(programs=programs))
        best = sorted(tried, key=tried.__getitem__)
        texts = [f"{tuple(settings)} {1e3 * tried[settings]:.3f}" for settings in best[:8]]
        what = "backward" if is_backward else "forward"
        show("sweep", what, case.name, f"(now {tuple(own)} {1e3 * tried[own]:.3f} ms):", "; ".join(texts))
        show("  slowest:", "; ".join(f"{tuple(settings)} {1e3 * tried[settings]:.3f}" for settings in best[-4:]))


def parts(device: str) -> Iterator[Callable[[], None]]:
    """What is done, the most telling first."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    is_cuda = device == "cuda"
    sides: dict[str, Callable[[Heads], Tensor]] = {"kernel": attend_to_few, "today": fused}
    if not is_cuda:
        yield lambda: check(Case(device, 2, 130, 3, 32, 40, fp32))
        yield lambda: check(Case(device, 1, 100, 2, 24, 17, fp16, True))
        yield lambda: compare(in_turns(device, 1, 200, 2, 32, 32, fp32), sides)
        yield lambda: over_tokens(device, 1, 300, 20)
        yield lambda: sweep(in_turns(device, 1, 200, 2, 32, 32, fp32), is_cuda)
        return
    yield lambda: check(Case(device, 2, 1000, 12, 64, 128, bf16))
    main = [(32, 4096, 12), (1, 65536, 12), (8, 16384, 12)]
    for b, n, h in main:
        yield lambda b=b, n=n, h=h: compare(in_turns(device, b, n, h, 64, 128, bf16), sides)
    yield lambda: sweep(in_turns(device, 32, 4096, 12, 64, 128, bf16), is_cuda)
    yield lambda: sweep(in_turns(device, 1, 65536, 12, 64, 128, bf16), is_cuda)
    shapes = [
        (1, 457, 3, 64, 100),
        (3, 1111, 2, 48, 7),
        (2, 4096, 4, 128, 128),
        (2, 999, 2, 16, 1),
        (2, 1111, 4, 64, 256),
    ]
    for (b, n, h, c, k), dtype, mask in itertools.product(shapes, (bf16, fp16, fp32), (False, True)):
        yield lambda b=b, n=n, h=h, c=c, k=k, dtype=dtype, mask=mask: check(Case(device, b, n, h, c, k, dtype, mask))
    for k in (64, 256):
        yield lambda k=k: sweep(in_turns(device, 32, 4096, 12, 64, k, bf16), is_cuda)
    for h, k in ((3, 128), (6, 128), (12, 64), (12, 256), (3, 64), (6, 256)):
        for b, n in ((32, 4096), (1, 65536), (8, 16384)):
            yield lambda b=b, n=n, h=h, k=k: compare(in_turns(device, b, n, h, 64, k, bf16), sides)
    yield lambda: compare(in_turns(device, 8, 16384, 12, 64, 128, fp32), sides)

    def against_compiler(b: int, n: int) -> None:
        torch.compiler.reset()
        compare(in_turns(device, b, n, 12, 64, 128, bf16), {**sides, "products, compiled": torch.compile(products)})

    for b, n in ((32, 4096), (1, 65536)):
        yield lambda b=b, n=n: against_compiler(b, n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing after this time")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # in float32 the kernel is used only with TF32
    for part in parts(arguments.device):
        if time.perf_counter() - START > arguments.seconds:
            show("no time left")
            return
        try:
            part()
        except (TritonError, RuntimeError) as error:
            show("FAILED", type(error).__name__, str(error)[:500])


if __name__ == "__main__":
    main()
