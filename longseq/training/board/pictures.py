"""Draw what TensorBoard shows: inputs, confusions, figures by class, weights of tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from longseq.encoders.drawing import WIDTH, panels, small
from longseq.encoders.lettering import cut, drawable, key_of, lettering
from longseq.training.board.class_axes import are_short, figure_with_key, write_classes
from longseq.training.classifier import Classifier

_SIDE, _TICK = 200.0, 6.0  # of the confusion matrix and of its labels, in points


@torch.no_grad()
def draw_inputs(
    model: Classifier, inputs: Any, labels: Tensor, limits: tuple[float, float] | None = (0, 255)
) -> Figure:
    """Draw a batch as the model sees it, with class names above. In training mode the inputs are mixed and masked.

    Args:
        model: Its encoder has measured its inputs.
        inputs: As the data module yields them, on the model's device.
        labels: One for each input.
        limits: The smallest and the largest number that an input may hold; None if there are no limits.
    """
    encoder = model.encoder
    inputs, targets = model.mixed(inputs, labels) if model.training else (inputs, labels)
    class_names = drawable(model.class_names)
    names = [model.task.names(target, class_names) for target in targets]
    return encoder.draw(pictures_of(model, inputs), names, limits)


@torch.no_grad()
def pictures_of(model: Classifier, inputs: Any) -> list[Float[Tensor, "channels _ width"]]:
    """The images or spectrograms of a batch after the front end, without padding; masked in training mode."""
    encoder = model.encoder
    pictures, rows = encoder.front_end(inputs), encoder.rows(inputs)
    if model.training:
        pictures = encoder.augment((pictures - encoder.mean) / encoder.std) * encoder.std + encoder.mean
    counts = [pictures.shape[2]] * len(pictures) if rows is None else rows.tolist()
    return [picture[:, :count] for picture, count in zip(pictures.float().cpu(), counts, strict=True)]


@small
def draw_confusions(matrix: Int[Tensor, "classes classes"], class_names: Sequence[str]) -> Figure:
    """Draw how often each true class (row) is predicted as each class (column): counts, coloured by share of the row.
    Many classes, or long names, are numbers with a key below.

    Colours grow with the square root of the share, so that one error in a hundred is visible.
    """
    names, num_classes = drawable(class_names), len(class_names)
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    numbered = [] if are_short(names, _SIDE, _TICK) else names
    figure, upper = figure_with_key(WIDTH, WIDTH, numbered, _TICK, key_of(class_names))
    axes = upper.add_subplot(
        xlabel="predicted class",
        ylabel="true class",
        title=f"{int(matrix.trace())} of {int(matrix.sum())} right ({matrix.trace() / matrix.sum():.1%}); "
        "coloured by share of the true class",
    )
    axes.imshow(shares.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    write_classes(axes, names, _SIDE, _TICK)
    if num_classes <= 15:
        for row, column in matrix.nonzero().tolist():
            colour = "white" if shares[row, column] > 0.4 else "black"
            of_text = {"ha": "center", "va": "center", "color": colour, "fontsize": 6}
            axes.text(column, row, str(int(matrix[row, column])), **of_text, in_layout=False)  # it takes no room
    return figure


@small
def draw_by_class(figures: Mapping[str, Sequence[float]], class_names: Sequence[str], most: int = 20) -> Figure:
    """Draw figures of each class as dots on a line from 0 to 1, for the worst classes by the last figure.

    Args:
        figures: Of each metric, a figure for each class; NaN where a class has none.
        class_names: The names of the classes.
        most: How many classes.
    """
    (*_, last) = figures.values()
    worst = sorted(range(len(class_names)), key=lambda label: (math.isnan(last[label]), last[label]))[:most]
    figure = Figure((WIDTH, 0.6 + 0.16 * len(worst)), layout="constrained")
    axes = figure.add_subplot(xlim=(-0.02, 1.02))
    for (name, of_classes), marker in zip(figures.items(), "<>osd", strict=False):
        axes.plot([of_classes[label] for label in worst], range(len(worst)), marker, label=name, markersize=3.5)
    names = [cut(name, 72 * WIDTH / 2, _TICK) for name in drawable(class_names)]
    axes.set_yticks(range(len(worst)), [names[label] for label in worst], **lettering(*names))
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_title(f"{len(worst)} of {len(class_names)} classes, the worst first" if len(worst) > 1 else "")
    figure.legend(loc="outside lower center", ncols=len(figures), frameon=False, fontsize=6.5)
    return figure


@small
def draw_token_maps(maps: Mapping[str, Float[Tensor, "maps rows columns"]], seconds: float | None) -> Figure:
    """Draw weights of tokens by their places: of an image as small pictures, of a sound as strips along time.

    Each map is coloured by its own largest weight: blue above zero, red below.

    Args:
        maps: By their names, maps of the grid of tokens.
        seconds: From one row of tokens to the next; None for images.
    """
    if seconds is None:
        most_maps = max(len(of) for of in maps.values())
        figure, grid = panels(len(maps), *((3, 1.05) if most_maps == 1 else (1, 0.25 + WIDTH / most_maps)))
        for axes, (name, of) in zip(grid, maps.items(), strict=True):
            scaled = of / of.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            gap = torch.full((len(of), of.shape[1], max(1, of.shape[2] // 8)), math.nan)
            row = torch.cat((scaled, gap), 2).transpose(0, 1).flatten(1)[:, : -gap.shape[2]]  # beside each other
            axes.imshow(row, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
            axes.set_title(name)
            axes.set_axis_off()
        return figure
    figure, grid = panels(len(maps), 1, 0.75)
    for axes, (name, of) in zip(grid, maps.items(), strict=True):
        strips = of.sum(2)
        strips = strips / strips.abs().amax(1, keepdim=True).clamp(min=1e-30)
        extent = (0, strips.shape[1] * seconds, len(strips), 0)
        axes.imshow(strips, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest", extent=extent)
        axes.set(title=name, yticks=[], xlabel="seconds")
        axes.label_outer()
    return figure
