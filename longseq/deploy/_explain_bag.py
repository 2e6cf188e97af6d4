"""``explain`` for features: the share of each token, such as a tile of a slide, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from longseq.encoders import FeatureEncoder
from longseq.encoders.forward_pass import encode_tokens, shares
from longseq.encoders.gated_pooling import GatedPooling
from longseq.encoders.lettering import legible, lettering
from longseq.files.storage import refuse_foreign
from longseq.reports.plots import COLOURS, panels, save, styled, write_csv
from longseq.training.answers.attribution import attributions
from longseq.training.classifier import Classifier

_SIDE, _MOST_IN_ROW = 4.0, 4  # inches of a panel, and panels side by side


def table_beside(picture: Path) -> Path:
    """The path of the table.

    Raises:
        ValueError: If another program has written a file there.
    """
    table = picture.with_suffix(".csv")
    refuse_foreign(table, "out", b"token,")
    return table


def explain_bag(
    model: Classifier, batch: Any, start: float, chances: Tensor, labels: Sequence[int], out: Path
) -> list[str]:
    """Write the share of each token in the scores of some classes: a table and a picture.

    A share is gradient times input, summed over the features by its absolute values; the shares of a class sum to one.
    A pooling with learned weights adds these weights.

    Args:
        model: The classifier, with a FeatureEncoder, in evaluation.
        batch: One bag.
        start: Its start in the recording, in seconds.
        chances: The probability of each class.
        labels: The classes.
        out: The picture.

    Returns:
        What `explain` prints.
    """
    encoder: Any = model.encoder
    table = table_beside(out)
    columns: dict[str, Tensor] = {}
    if isinstance(encoder.trunk.attn_pool, GatedPooling):
        with torch.no_grad():
            tokens, present = encode_tokens(encoder.trunk, *encoder.prepared(batch))
            columns["pooling weight"] = shares(encoder.trunk, tokens, present)[0]
    lines = []
    names = [f"{model.class_names[label]} {chances[label]:.2f}" for label in labels]
    for name, attribution in zip(names, attributions(model, batch, labels), strict=True):
        share = attribution._replace(gradient=attribution.gradient[: encoder.num_features]).by_row()
        del attribution  # as large as the bag
        columns[name] = share
        until = share.sort(descending=True).values.double().cumsum(0)
        tokens_of_half = min(int((until < until[-1] / 2).sum()) + 1, len(share))
        lines.append(f"{name}: half of the attribution lies in {tokens_of_half} of {len(share)} tokens")
    places = _places(encoder, batch, start)
    header = [
        "token",
        *places,
        *(name if name not in names else f"share of {name.rpartition(' ')[0]}" for name in columns),
    ]
    numbers = [list(map(_written, column.tolist())) for column in (*places.values(), *columns.values())]
    write_csv(table, header, list(zip(range(len(numbers[0])), *numbers, strict=True)))
    save(_draw(list(columns), list(columns.values()), places), out)
    return [*lines, str(table), str(out)]


def _written(value: float) -> str:
    return f"{value:.8g}"


def _places(encoder: FeatureEncoder, batch: Any, start: float) -> dict[str, Tensor]:
    """The coordinates of each token or its time; an empty dictionary if it has neither."""
    if encoder.num_coordinates:
        xy = encoder.features_of(batch)[0, :, encoder.num_features :].double()
        return {"x": xy[:, 0], "y": xy[:, 1]}
    if encoder.token_seconds is not None:
        return {
            "start": start
            + encoder.token_seconds * torch.arange(encoder.features_of(batch).shape[1], dtype=torch.float64)
        }
    return {}


@styled
def _draw(names: Sequence[str], columns: Sequence[Tensor], places: dict[str, Tensor]) -> Figure:
    if "x" in places:
        across = min(len(names), _MOST_IN_ROW)
        figure, grid = panels(across, -(-len(names) // across), _SIDE, _SIDE)
        for axes in grid[len(names) :]:
            axes.set_axis_off()
        x, y = (places[name].numpy() for name in "xy")
        side = smallest_distance(np.stack([x, y], axis=1))
        for axes, name, column in zip(grid, names, columns, strict=False):
            _draw_tiles(axes, x, y, side, column.numpy())
            axes.set_title(legible(name), **lettering(name))
        return figure
    figure, grid = panels(1, len(names), 9.0, 1.8)
    at = places["start"].numpy() if places else np.arange(len(columns[0]))
    for number, (axes, name, column) in enumerate(zip(grid, names, columns, strict=True)):
        axes.step(at, column.numpy(), where="post", color=COLOURS[2 + number % 6], linewidth=1)
        axes.set_title(legible(name), **lettering(name))
        axes.set(ylabel="share", ylim=(0, None))
    grid[-1].set_xlabel("seconds" if places else "token")
    return figure


def smallest_distance(places: np.ndarray) -> float:
    """The smallest distance between two different places, along the axis in which they are farther apart; 1 if there
    are no two."""
    places = np.unique(places, axis=0)
    if len(places) < 2:
        return 1.0
    from sklearn.neighbors import KDTree  # takes a second to import

    return float(KDTree(places, metric="chebyshev").query(places, 2)[0][:, 1].min())


def _draw_tiles(axes: Axes, x: np.ndarray, y: np.ndarray, side: float, share: np.ndarray) -> None:
    """Squares around the coordinates, in an image: 200,000 of them are as fast as one."""
    most = 2048  # pixels of the image along its longer side
    left, top = x.min(), y.min()
    span = max(x.max() - left, y.max() - top) + side
    pixel = max(side / 4, span / most)
    wide, high = (int(np.ceil((values.max() - values.min() + side) / pixel)) for values in (x, y))
    image = np.full((high, wide), np.nan)
    order = np.argsort(share)  # where squares share a pixel, the largest share is seen
    columns, rows = ((x - left) / pixel).astype(int)[order], ((y - top) / pixel).astype(int)[order]
    of_side = max(round(side / pixel), 1)
    for down in range(of_side):
        for right in range(of_side):
            image[np.minimum(rows + down, high - 1), np.minimum(columns + right, wide - 1)] = share[order]
    extent = (left, left + wide * pixel, top + high * pixel, top)
    drawn = axes.imshow(image, cmap="YlOrRd", vmin=0, extent=extent, interpolation="nearest")
    axes.set_facecolor("#dddddd")
    axes.grid(False)
    axes.figure.colorbar(drawn, ax=axes, shrink=0.7)
    axes.tick_params(labelsize=6)
