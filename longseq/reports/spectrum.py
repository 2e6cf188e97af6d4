"""The spectrum of the context matrix, by layer and head: what Linformer's figure 1 shows (arXiv:2006.04768)."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from jaxtyping import Float, Int64
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention import Linformer, Softmax
from longseq.attention.heads import Tokens
from longseq.attention.layer import AttentionLayer
from longseq.attention.sources import inputs_of, watched
from longseq.files.checkpoint import CheckpointError
from longseq.reports.plots import Report, machine, markdown, panels, styled
from longseq.training import Classifier
from longseq.training.classifier import model_and_data

EXACT = 4096  # tokens up to which all singular values are computed
_LEADING = 512  # how many are computed for longer sequences


def spectrum(
    ckpt_path: str,
    root: str | None = None,
    num_inputs: int = 8,
    energy: float = 0.9,
    out: str = "spectrum",
    allow_class: list[str] = [],  # noqa: B006  (jsonargparse shows it)
) -> None:
    """Measure the singular values of the context matrices of a trained model over inputs of its test split.

    The context matrix P maps values to outputs, Y = P V: it is softmax(Q K' / sqrt(c)) for softmax, with k columns for
    Linformer, and H L for Verma. The logits are Q K' / sqrt(c), before any softmax, and of rank c at most; Bakouch and
    Leconte (2023) found that softmax raises the rank. The table says how many singular values hold a share of their
    sum: the k that a layer needs. The rank is that of float64, the most of any input. Verma's P says nothing about its
    k, because the rank of P is at most c, the channels of a head, for any k.

    Args:
        ckpt_path: A checkpoint of fit.
        root: Folder of the checkpoint's data, if the data has moved.
        num_inputs: How many inputs of the test split to average over.
        energy: The share of the sum of singular values.
        out: Folder for table.md, table.csv, spectrum.png and, for Softmax and Linformer, linformer.yaml.
        allow_class: Packages whose classes the checkpoint may name, besides ours.

    Raises:
        ValueError: If the share is not in 0..1, or a number is not positive.
        CheckpointError: If the checkpoint cannot be read, names no data, or has weights that are not finite.
    """
    if not 0 < energy < 1:
        raise ArgumentError("energy", f"must be between 0 and 1, got {energy}; 0.9 is usual")
    if num_inputs < 1:
        raise ArgumentError("num_inputs", f"must be positive, got {num_inputs}; 8 is a start")
    model, data = model_and_data(ckpt_path, allow_class, root)
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise CheckpointError(f"{ckpt_path}: holds weights that are not finite; give another")
    data.setup("test")
    samples = data.splits()["test"]
    chosen = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))[:num_inputs].tolist()
    curves = {"P": [], "logits": []}  # of each input
    n = 0
    for index in chosen:
        inputs, _ = samples.__getitems__([index])
        matrices = list(context_matrices(model, inputs))
        n = max(n, matrices[0][0].shape[1])
        for which, position in (("P", 0), ("logits", 1)):
            curves[which].append(stacked([cumulative(pair[position]) for pair in matrices]))
    mean = {which: stacked(per_input).mean(0) for which, per_input in curves.items()}  # layers, heads, values
    needed = {which: (curve < energy).sum(-1) + 1 for which, curve in mean.items()}
    most = mean["P"].shape[-1]  # singular values that are known
    counts = [*needed.values(), *(ranks(stacked(per_input)).amax(0) for per_input in curves.values())]
    is_known = most != _LEADING or n <= EXACT  # else smaller singular values are not computed
    rows = []
    for layer, head in itertools.product(*map(range, mean["P"].shape[:2])):
        k_and_rank = [int(count[layer, head]) for count in counts]
        shown = [str(count) if count <= most else f"> {most}" for count in k_and_rank[:2]]
        rows.append([layer, head, *shown, *(str(r) if is_known or r < most else f">= {r}" for r in k_and_rank[2:])])
    of = f"k for {energy:.0%} of"
    header = ["layer", "head", f"{of} P", f"{of} the logits", "rank of P", "rank of the logits"]
    attention = type(model.encoder.attention).__name__
    what = f"{attention}, {n} tokens, mean over {len(chosen)} inputs of the test split of {type(data).__name__}"
    report = Report(out, f"{what}; {machine()}")
    text, others = markdown(header, rows) + "\n", []
    suggested = report.folder / "linformer.yaml"
    suggested.unlink(missing_ok=True)  # remove a suggestion left by an earlier model
    if isinstance(model.encoder.attention, Softmax | Linformer) and int(needed["P"].max()) <= most:
        per_layer = [int(heads.max()) for heads in needed["P"]]
        suggestion = yaml.safe_dump({"class_path": "Linformer", "init_args": {"k": per_layer, "sharing": "key_value"}})
        text += f"for a Linformer with a k for each layer (the most that one of its heads needs):\n\n{suggestion}"
        suggested.write_text(f"# {energy:.0%} of the singular values of {ckpt_path}\n{suggestion}")
        others = [suggested.name]
    report.end(report.write(header, rows, text), _draw(mean, energy, attention), "spectrum.png", *others)


def context_matrices(model: Classifier, inputs: Any) -> Iterator[tuple[Float[Tensor, "h n k"], Float[Tensor, "h n k"]]]:
    """P and the logits of every layer for one input, in float64.

    P is the output of the mechanism's own formula when the values are the identity matrix. Where each head has its own
    k, matrices of a smaller k are padded with columns of zeros, which add only singular values of 0.
    """
    layers: list[Any] = [block.attn for block in model.encoder.trunk.blocks]
    if not layers or not all(isinstance(layer, AttentionLayer) for layer in layers):
        what = model.encoder.attention if layers else "no blocks"
        raise ArgumentError("ckpt_path", f"must be a model with attention in every block, got {what}; give another")
    with inputs_of(layers) as seen, torch.no_grad():
        model(inputs)
    for layer, (x, present, rope) in zip(layers, seen, strict=True):
        with watched(layer) as calls, torch.no_grad():
            # attend uses the formula for all queries; the layer itself may take a shortcut
            AttentionLayer.attend(layer, Tokens(x, x, present, rope))
        most = max(heads.keys.shape[2] for heads in calls)
        formula = layer.formula
        if isinstance(formula, nn.Module):
            formula = copy.deepcopy(formula).double()
        contexts, logits = [], []
        for heads in calls:  # one call for all heads, or one for each head
            queries, keys = heads.queries.double(), heads.keys.double()
            k, channels = keys.shape[2:]
            identity = torch.eye(k, -(-k // channels) * channels, dtype=torch.float64).expand(*keys.shape[:2], -1, -1)
            heads = heads._replace(queries=queries, keys=keys, dropout=0.0)
            parts = [formula(heads._replace(values=part)) for part in identity.split(channels, dim=-1)]
            contexts.append(F.pad(torch.cat(parts, dim=-1)[0, ..., :k], (0, most - k)))
            logits.append(F.pad((queries @ keys.mT)[0] * channels**-0.5, (0, most - k)))
        yield torch.cat(contexts), torch.cat(logits)


def cumulative(matrices: Float[Tensor, "h n k"]) -> Float[Tensor, "h m"]:
    """The cumulative sum of singular values, as a share of their whole sum.

    For matrices larger than EXACT, a randomised SVD gives the leading singular values. The whole sum then includes an
    upper bound of the sum of the others (Cauchy-Schwarz, from the rest of the Frobenius norm), so the shares are lower
    bounds.
    """
    if min(matrices.shape[1:]) <= EXACT:
        values = torch.linalg.svdvals(matrices)
        return values.cumsum(-1) / values.sum(-1, keepdim=True).clamp(min=1e-300)
    values = torch.svd_lowrank(matrices, q=_LEADING, niter=4)[1]
    others = min(matrices.shape[1:]) - _LEADING
    left = (matrices.square().sum((1, 2)) - values.square().sum(-1)).clamp(min=0)
    return values.cumsum(-1) / (values.sum(-1) + (others * left).sqrt())[:, None]


def ranks(curves: Float[Tensor, "*of m"]) -> Int64[Tensor, "*of"]:
    """The rank of matrices whose cumulative shares these are: as numpy counts it, singular values above m times the
    rounding error of the largest one. For more than EXACT tokens, that of the leading ones."""
    shares = torch.cat([curves[..., :1], curves.diff(dim=-1)], -1)
    return (shares > curves.shape[-1] * torch.finfo(curves.dtype).eps * shares[..., :1]).sum(-1)


def stacked(curves: list[Float[Tensor, "*of _"]]) -> Float[Tensor, "_ *of m"]:
    """Stack curves of layers or inputs, whose lengths may differ. A shorter curve is extended with its last value,
    which is 1 unless only the leading singular values are known."""
    longest = max(curve.shape[-1] for curve in curves)
    return torch.stack([torch.cat([c, c[..., -1:].expand(*c.shape[:-1], longest - c.shape[-1])], -1) for c in curves])


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
    most = mean["P"].shape[-1]
    at = min(int((mean["P"].mean((0, 1)) < energy).sum()) + 1, most)  # where layers and heads differ most
    image = axes[2].imshow(mean["P"][:, :, at - 1], cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes[2].grid(False)
    axes[2].set(xlabel="head", ylabel="layer", title=f"Share of the first {at} in P")
    axes[2].set_xticks(range(mean["P"].shape[1]))
    axes[2].set_yticks(range(mean["P"].shape[0]))
    figure.colorbar(image, ax=axes[2], shrink=0.8)
    return figure
