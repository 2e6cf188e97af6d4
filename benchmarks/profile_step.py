"""Draw where the time of a training step goes: python benchmarks/profile_step.py [--out docs/performance.png].

One image of 64x64 pixels, one token per pixel, width 128, depth 4, on the CPU. The same weights go through timm's own
forward pass with the mechanisms' formulas, and through longseq's forward pass, in turns.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from longseq import ImageEncoder, Linformer, Verma
from longseq.attention import Mechanism
from longseq.attention.layer import AttentionLayer
from longseq.attention.verma import VermaLayer
from longseq.reports.plots import COLOURS, machine, panels, styled

SIDE, STEPS = 64, 8
# A profiled operation belongs to the first kind that has a word in the operation's name.
KINDS = {
    "attention's kernel and softmaxes": ("scaled_dot_product", "softmax"),
    "matrix products": ("mm", "conv"),
    "GELU": ("gelu",),
    "LayerNorm": ("layer_norm",),
    "copies, sums, fills": ("copy", "add", "cat", "fill", "sum", "mul", "div", "empty", "zero", "slice"),
    "AdamW": ("adam",),
    "the rest": ("",),
}


def steps(mechanism: Mechanism, pool: str, precision: str) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    encoder = ImageEncoder((3, SIDE, SIDE), mechanism, dim=128, depth=4, heads=4, pool=pool)
    head = nn.Linear(128, 10)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], fused=True)
    image, label = torch.randn(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.long)
    short_cut = VermaLayer.attend

    def step(forward: nn.Module, attend: Any) -> None:
        VermaLayer.attend = attend
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = head(forward(image))
        F.cross_entropy(logits.float(), label).backward()
        optimizer.step()
        VermaLayer.attend = short_cut

    return {
        "timm's forward pass": lambda: step(encoder.trunk, AttentionLayer.attend),
        "ours": lambda: step(encoder, short_cut),
    }


def milliseconds(step: Callable[[], None]) -> dict[str, float]:
    """The milliseconds of one step, by kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    totals: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kind = next(kind for kind, names in KINDS.items() if any(name in event.key.lower() for name in names))
        totals[kind] += event.self_cpu_time_total / 1e3
    return totals


@styled
def draw(bars: dict[str, dict[str, float]]) -> Any:
    figure, (axes,) = panels(1, width=8.0, height=3.8)
    names = list(bars)[::-1]
    left = [0.0] * len(names)
    for kind, colour in zip(KINDS, [COLOURS[i] for i in (3, 2, 6, 4, 5, 7, 1)], strict=True):
        widths = [bars[name].get(kind, 0.0) for name in names]
        axes.barh(names, widths, left=left, color=colour, label=kind, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="milliseconds of a training step, under the profiler", title="Where the time of a step goes")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=4)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/performance.png"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    bars: dict[str, dict[str, float]] = {}
    for name, mechanism, pool, precision in (
        ("Linformer, float32", Linformer(128), "avg", "32"),
        ("Linformer, class token", Linformer(128), "token", "32"),
        ("Linformer, bfloat16", Linformer(128), "avg", "bf16"),
        ("Verma, float32", Verma(), "avg", "32"),
    ):
        both = steps(mechanism, pool, precision)
        measured: dict[str, list[dict[str, float]]] = {how: [] for how in both}
        for _ in range(STEPS):
            for how, step in both.items():
                measured[how].append(milliseconds(step))
        for how, times in measured.items():
            medians = {kind: sorted(time.get(kind, 0.0) for time in times)[STEPS // 2] for kind in KINDS}
            bars[f"{name}\n{how}"] = medians
            print(f"{name}, {how}: " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in medians.items()))
    print(machine())
    draw(bars).savefig(options.out)


if __name__ == "__main__":
    main()
