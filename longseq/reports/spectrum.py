"""The spectrum of the context matrix, by layer and head: what Linformer's figure 1 shows (arXiv:2006.04768)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from longseq.attention import Verma
from longseq.attention.layer import AttentionLayer
from longseq.reports.plots import machine, markdown, panels, styled, write_csv
from longseq.training import Classifier
from longseq.training.checkpoint import build, read_checkpoint

EXACT = 4096  # tokens up to which all singular values are computed
_LEADING = 512  # those that are computed of longer sequences


def spectrum(
    ckpt_path: str,
    root: str | None = None,
    num_inputs: int = 8,
    energy: float = 0.9,
    out: str = "spectrum",
) -> None:
    """Measure the singular values of the context matrices of a trained model over inputs of its test split.

    The context matrix P takes values to outputs, Y = P V: softmax(Q K') for softmax, with k columns for Linformer, and
    H L for Verma. The logits are Q K' / sqrt(c), before any softmax, which a follow-up study found to raise the rank.
    The table says how many singular values hold a share of their sum: the k that a layer needs. Verma's P tells nothing
    of its k, for its rank is at most c, the channels of a head, whatever k is.

    Args:
        ckpt_path: A checkpoint of fit.
        root: Folder of its data, if it has moved.
        num_inputs: How many inputs of the test split to average over.
        energy: The share of the sum of singular values.
        out: Folder for table.md, table.csv, spectrum.png and, but for Verma, linformer.yaml.

    Raises:
        ValueError: If the share is not in 0..1, or a number is not positive.
    """
    if not 0 < energy < 1:
        raise ValueError(f"energy must be between 0 and 1, got {energy}; 0.9 is usual")
    if num_inputs < 1:
        raise ValueError(f"num_inputs must be positive, got {num_inputs}; 8 is a start")
    checkpoint = read_checkpoint(ckpt_path)
    model = Classifier.load_from_checkpoint(ckpt_path).eval()
    description = checkpoint["data"]
    if root is not None:
        description = {**description, "init_args": {**description["init_args"], "root": root}}
    data = build(description)
    data.setup("test")
    chosen = torch.randperm(len(data.test_set), generator=torch.Generator().manual_seed(0))[:num_inputs].tolist()
    curves = {"P": [], "logits": []}
    n = 0
    for index in chosen:
        inputs, _ = data.test_set.__getitems__([index])
        matrices = list(context_matrices(model, inputs))
        n = max(n, matrices[0][0].shape[1])
        for which, position in (("P", 0), ("logits", 1)):
            curves[which].append(torch.stack([cumulative(pair[position]) for pair in matrices]))
    mean = {which: average(each) for which, each in curves.items()}  # layers, heads, values
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    needed = {which: (curve < energy).sum(-1) + 1 for which, curve in mean.items()}
    rows = [
        [layer, head, int(needed["P"][layer, head]), int(needed["logits"][layer, head])]
        for layer in range(len(mean["P"]))
        for head in range(mean["P"].shape[1])
    ]
    header = ["layer", "head", f"k for {energy:.0%} of P", f"k for {energy:.0%} of the logits"]
    write_csv(folder / "table.csv", header, rows)
    attention = type(model.encoder.attention).__name__
    what = f"{attention}, {n} tokens, mean over {len(chosen)} inputs of the test split of {type(data).__name__}"
    text = f"{what}; {machine()}\n\n{markdown(header, rows)}\n"
    written = "table.md, table.csv, spectrum.png"
    if not isinstance(model.encoder.attention, Verma):
        per_layer = [int(heads.max()) for heads in needed["P"]]
        suggestion = yaml.safe_dump({"class_path": "Linformer", "init_args": {"k": per_layer, "sharing": "key_value"}})
        text += f"for a Linformer with a k for each layer (the most that one of its heads needs):\n\n{suggestion}"
        (folder / "linformer.yaml").write_text(f"# {energy:.0%} of the singular values of {ckpt_path}\n{suggestion}")
        written += ", linformer.yaml"
    (folder / "table.md").write_text(text)
    _draw(mean, energy, attention).savefig(folder / "spectrum.png")
    print(f"{text}\n{folder}/{written}")


def context_matrices(model: Classifier, inputs: Any) -> Iterator[tuple[Float[Tensor, "h n k"], Float[Tensor, "h n k"]]]:
    """P and the logits of every layer for one input, in float64.

    P is what the mechanism's own formula gives for values that are the identity.
    """
    seen: list[tuple[Any, Any]] = []
    layers: list[Any] = [block.attn for block in model.encoder.trunk.blocks]
    tokens: list[Tensor] = []
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda _, x: tokens.append(x[0])))
        model(inputs)
    with _watched(layers, seen), torch.no_grad():
        for layer, x in zip(layers, tokens, strict=True):
            AttentionLayer.attend(layer, x, x, None)  # all queries, by the formula, where the model takes short cuts
    for layer_mix, (queries, keys) in seen:
        queries, keys = queries.double(), keys.double()
        k, channels = keys.shape[2:]
        identity = torch.eye(k, -(-k // channels) * channels, dtype=torch.float64).expand(*keys.shape[:2], -1, -1)
        parts = [layer_mix(queries, keys, part, None, None, 0.0) for part in identity.split(channels, dim=-1)]
        yield torch.cat(parts, dim=-1)[0, ..., :k], (queries @ keys.mT)[0] * channels**-0.5


@contextmanager
def _watched(layers: list[AttentionLayer], seen: list[Any]) -> Iterator[None]:
    """Note each layer's formula, queries and keys while the model runs."""
    formulas = [layer.mix for layer in layers]

    def noting(mix: Any) -> Any:
        def noted(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
            seen.append((mix, (queries, keys)))
            return mix(queries, keys, *rest)

        return noted

    for layer, mix in zip(layers, formulas, strict=True):
        layer.mix = noting(mix)
    try:
        yield
    finally:
        for layer, mix in zip(layers, formulas, strict=True):
            layer.mix = mix


def cumulative(matrices: Float[Tensor, "h n k"]) -> Float[Tensor, "h m"]:
    """The cumulative sum of singular values, as a share of their whole sum.

    Of matrices larger than EXACT, the leading ones by a randomised SVD; what the others can sum to at most, by Cauchy
    and Schwarz from the Frobenius norm that is left, counts in the whole, so that the shares are lower bounds.
    """
    if min(matrices.shape[1:]) <= EXACT:
        values = torch.linalg.svdvals(matrices)
        return values.cumsum(-1) / values.sum(-1, keepdim=True).clamp(min=1e-300)
    values = torch.svd_lowrank(matrices, q=_LEADING, niter=4)[1]
    others = min(matrices.shape[1:]) - _LEADING
    left = (matrices.square().sum((1, 2)) - values.square().sum(-1)).clamp(min=0)
    return values.cumsum(-1) / (values.sum(-1) + (others * left).sqrt())[:, None]


def average(curves: list[Float[Tensor, "l h _"]]) -> Float[Tensor, "l h m"]:
    """The mean over inputs, whose lengths may differ: a shorter one's curve stays at 1."""
    longest = max(curve.shape[-1] for curve in curves)
    return torch.stack([torch.nn.functional.pad(c, (0, longest - c.shape[-1]), value=1.0) for c in curves]).mean(0)


@styled
def _draw(mean: dict[str, Tensor], energy: float, attention: str) -> Any:
    figure, axes = panels(3)
    shades = [(0.0, 0.45 * t + 0.1, 0.7 - 0.3 * t) for t in np.linspace(0, 1, len(mean["P"]))]
    titles = {"P": f"{attention}: context matrix P", "logits": "Logits, before softmax"}
    for panel, (which, title) in zip(axes[:2], titles.items(), strict=True):
        for layer, heads in enumerate(mean[which]):
            panel.plot(range(1, heads.shape[-1] + 1), heads.mean(0), color=shades[layer], label=f"layer {layer}")
            panel.fill_between(
                range(1, heads.shape[-1] + 1), heads.amin(0), heads.amax(0), color=shades[layer], alpha=0.12
            )
        panel.axhline(energy, color="grey", linewidth=0.8, linestyle=":")
        panel.set(xlabel="singular values, the largest first", ylabel="share of their sum", ylim=(0, 1.02), title=title)
    axes[0].legend(fontsize=7, loc="lower right")
    at = int((mean["P"].mean((0, 1)) < energy).sum()) + 1  # where layers and heads differ most
    image = axes[2].imshow(mean["P"][:, :, at - 1], cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes[2].grid(False)
    axes[2].set(xlabel="head", ylabel="layer", title=f"Share of the first {at} in P")
    axes[2].set_xticks(range(mean["P"].shape[1]))
    axes[2].set_yticks(range(mean["P"].shape[0]))
    figure.colorbar(image, ax=axes[2], shrink=0.8)
    return figure
