"""The command ``explain``: which pixels or moments of a file decided for each of the likeliest classes."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.deploy._explain_bag import explain_bag
from longseq.deploy.predictor import Predictor, load, refuse_no_file
from longseq.encoders import FeatureEncoder
from longseq.encoders.drawing import pixels_of
from longseq.encoders.lettering import legible, lettering
from longseq.encoders.patches import stride_of
from longseq.reports.plots import COLOURS, can_be_drawn, refuse_foreign_picture, save, styled
from longseq.training.answers.attribution import Attribution, attribute
from longseq.training.answers.events import Event
from longseq.training.answers.predictions import batches_of, is_heard
from longseq.training.data import InputSpec, bounds


def explain(
    ckpt_path: str,
    input: str,
    top: int | None = None,
    out: str = "explained.png",
    allow_class: list[str] = [],  # noqa: B006  (jsonargparse shows it)
) -> None:
    """Draw which pixels or moments of a file decided for each of its likeliest classes, and print where they are.

    The figure shows two attributions side by side. Gradient times input says how much a class's score depends on each
    number of the image or spectrogram. The rollout says how much each token contributes to the encoder's output through
    the attention. The figure also shows what some summary tokens of the last layer look at: rows of E, or of L for
    Verma without E. A sound longer than the model's clips is split into windows, and the one with the clearest answer
    is explained. Of features, such as the tiles of a slide, it writes the share of each token: a table beside the
    figure, and a figure at the tokens' coordinates or times.

    Args:
        ckpt_path: A checkpoint of fit, or a shared folder.
        input: An image file, a sound file, or a file of features.
        top: How many classes; by default 3, or all if there are fewer.
        out: The figure to write, a .png, .pdf or .svg.
        allow_class: Packages whose classes the checkpoint may name, in addition to longseq's.

    Raises:
        ValueError: If there is no such file, or no such number of classes.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the file cannot be read.
    """
    refuse_no_file(input)
    if not can_be_drawn(out):
        raise ArgumentError("out", f"must be a .png, .pdf or .svg, got {out}; explained.png is usual")
    refuse_foreign_picture(Path(out), "out")
    predictor = load(ckpt_path, allow_class=allow_class)
    if top is None:
        top = min(3, len(predictor.class_names))
    if not 1 <= top <= len(predictor.class_names):
        raise ArgumentError("top", f"must be in 1..{len(predictor.class_names)} (the classes), got {top}; 3 are usual")
    for line in explain_file(predictor, input, top, Path(out)):
        print(line)


def explain_file(predictor: Predictor, path: str, top: int, out: Path) -> list[str]:
    """Write the picture of a file, and return what `explain` prints.

    Args:
        predictor: The model and what reads the file.
        path: The file.
        top: How many classes.
        out: The picture.

    Raises:
        ValueError: If the model has no attention to show.
    """
    model = predictor.model
    batch, start, chances = _clearest_part(predictor, path)
    highest = chances.topk(top)
    labels = highest.indices.tolist()
    if isinstance(model.encoder, FeatureEncoder):
        return explain_bag(model, batch, start, chances, labels, out)
    attributions = attribute(model, batch, labels)
    names = [f"{model.class_names[label]} {chances[label]:.2f}" for label in labels]
    row_seconds = model.encoder.row_seconds
    inputs = predictor.data.inputs
    lines = [
        f"{name}: {_where(model.encoder, attribution, start, inputs)}"
        for name, attribution in zip(names, attributions, strict=True)
    ]
    with torch.no_grad():
        picture, rows = model.encoder.front_end(batch), model.encoder.rows(batch)
    picture = picture[0] if rows is None else picture[0, :, : int(rows)]
    if row_seconds is None:
        figure = _draw_image(model.encoder, picture, names, attributions, bounds(inputs))
    else:
        # a model that gives each sample one class would find an event in every frame
        events = predictor.events(path) if model.task.names_silence and model.encoder.any_length else []
        figure = _draw_sound(model.encoder, picture, names, attributions, start, events)
    save(figure, out)
    return [*lines, str(out)]


def _clearest_part(predictor: Predictor, path: str) -> tuple[Any, float, Float[Tensor, " classes"]]:
    """The part of a file in which a class has its highest probability: a batch of one, its start in seconds, and the
    probabilities of the classes."""
    data, model = predictor.data, predictor.model
    parts = data.parts(path, None, None, model.encoder.any_length)
    best: tuple[Any, float, Tensor] | None = None
    for part in parts:
        (batch,) = batches_of(data, [part])
        with torch.inference_mode():
            chances = model.predict_step(batch, 0)[0]
        if is_heard(chances) and (best is None or chances.max() > best[2].max()):
            best = batch, part[1], chances
    if best is None:
        raise ArgumentError("input", f"must hold something besides gaps, got {path}; give another")
    return best


def _where(encoder: Any, attribution: Attribution, start: float, inputs: InputSpec) -> str:
    """Where half of the attribution lies: in which shortest time, or in how many pixels or numbers."""
    if encoder.row_seconds is None:
        size = attribution.gradient.abs().sum(0).flatten()
        pixels = int((size.sort(descending=True).values.cumsum(0) < size.sum() / 2).sum()) + 1
        unit = "pixels" if inputs.kind == "images" else "numbers"
        return f"half of the attribution lies in {pixels} of {len(size)} {unit}"
    first, last = shortest_half(attribution.by_row())
    frame = encoder.row_seconds / stride_of(encoder.trunk.patch_embed)[0]
    begin, end = start + first * frame, start + (last + 1) * frame
    digits = 2 if end - begin >= 0.05 else 6
    return f"half of the attribution lies between {begin:.{digits}f} and {end:.{digits}f} s"


def shortest_half(shares: Float[Tensor, " n"]) -> tuple[int, int]:
    """The first and the last index of the shortest range that holds half of the sum of the shares."""
    until = [0.0, *shares.double().cumsum(0).tolist()]
    half, best, first = until[-1] / 2, (0, len(shares) - 1), 0
    for last in range(len(shares)):
        while until[last + 1] - until[first + 1] >= half and first < last:
            first += 1
        if until[last + 1] - until[first] >= half and last - first < best[1] - best[0]:
            best = first, last
    return best


_LONGEST = 60  # most characters of a name on its own line
_IN_COLUMN = 22  # most characters of a line of a title above an image
_LABELS = 165  # characters that fit side by side across a spectrogram
_LANES = 8  # labels that fit one above another in a spectrogram


def _short(name: str) -> str:
    name = legible(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."


def _title(name: str, chance: str = "") -> str:
    """A title wrapped to fit above an image, with a probability after the name."""
    lines = wrap(name, _IN_COLUMN, max_lines=3, placeholder="...") or [""]
    fits = len(lines[-1]) + 1 + len(chance) <= _IN_COLUMN
    return "\n".join([*lines[:-1], f"{lines[-1]} {chance}"] if fits else [*lines, chance]).rstrip()


def _lanes(events: Sequence[Event], start: float, end: float) -> Iterator[tuple[Event, int, float]]:
    """Each event with the lane of its label, counted from the bottom, and where the label begins. Labels in a lane
    overlap only if there are more labels at once than lanes."""
    until = [start] * _LANES
    for event in sorted(events):
        width = (len(_short(event.class_name)) + 2) / _LABELS * (end - start)
        begin = max(min(event.start, end - width), start)
        free = [lane for lane in range(_LANES) if until[lane] <= begin]
        lane = free[0] if free else min(range(_LANES), key=until.__getitem__)
        until[lane] = max(begin + width, event.end)
        yield event, lane, begin


@styled
def _draw_image(
    encoder: Any, picture: Tensor, names: list[str], attributions: list[Attribution], limits: tuple[float, float] | None
) -> Figure:
    rows = attributions[0].summaries
    columns, small = len(names) + 2, max(len(rows), 1)
    titles = ["input", _title(f"rollout, for {names[0].rpartition(' ')[0]}")]
    titles += [_title(name, chance) for name, _, chance in (label.rpartition(" ") for label in names)]
    spare = 0.14 * max(title.count("\n") for title in titles)  # inches for title lines after the first
    figure = Figure((2.1 * columns, (4.0 if len(rows) else 2.4) + spare), dpi=120)
    grid = figure.add_gridspec(2 if len(rows) else 1, columns * small, height_ratios=[2, 1] if len(rows) else [1])
    shown = pixels_of(picture, limits)
    size = encoder.trunk.patch_embed.dynamic_feat_size(shown.shape[:2])  # the grid of tokens
    gradients = (attribution.gradient.abs().sum(0) for attribution in attributions)
    heats = [None, attributions[0].rollout.reshape(size), *gradients]
    for column, (title, heat) in enumerate(zip(titles, heats, strict=True)):
        axes = figure.add_subplot(grid[0, column * small : (column + 1) * small])
        axes.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest", alpha=1 if heat is None else 0.35)
        if heat is not None:
            extent = (-0.5, shown.shape[1] - 0.5, shown.shape[0] - 0.5, -0.5)
            axes.imshow(heat, cmap="Reds", alpha=0.7, interpolation="nearest", extent=extent)
        axes.set_title(legible(title), fontsize=8, **lettering(title))
        axes.set_axis_off()
    for number, row in enumerate(rows):
        axes = figure.add_subplot(grid[1, number * columns : (number + 1) * columns])
        most = float(row.abs().max().clamp(min=1e-30))
        axes.imshow(row.reshape(size), cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest")
        axes.set_axis_off()
        if not number:
            axes.set_title("what summary tokens look at", fontsize=8, loc="left")
    return figure


@styled
def _draw_sound(
    encoder: Any, picture: Tensor, names: list[str], attributions: list[Attribution], start: float, events: list[Event]
) -> Figure:
    rows = attributions[0].summaries
    figure = Figure((9, 6.5 if len(rows) else 5), dpi=120)
    top, shares, rollout, *of_rows = figure.subplots(4 if len(rows) else 3, 1, sharex=True)
    frame = encoder.row_seconds / stride_of(encoder.trunk.patch_embed)[0]
    end = start + picture.shape[1] * frame
    values = picture.mean(0).T if picture.shape[2] > 1 else picture[..., 0].flip(0)  # the first channel is on top
    known = values[~values.isnan()]
    loudest = float(known.max())
    quietest = loudest - 6 * math.log(10) if picture.shape[2] > 1 else float(known.min())
    top.imshow(
        values, cmap="magma", vmin=quietest, vmax=loudest, origin="lower", aspect="auto",
        interpolation="nearest", extent=(start, end, 0, len(values)),
    )  # fmt: skip
    top.grid(False)
    top.set(ylabel="band", title="What it hears")
    for event, lane, begin in _lanes(events, start, end):
        bottom = lane / _LANES
        top.axvspan(event.start, event.end, bottom, bottom + 0.03, color=COLOURS[4])
        label = top.text(begin, (bottom + 0.04) * len(values), _short(event.class_name), color="white", fontsize=6)
        label.set(**lettering(event.class_name))
        label.set_bbox({"facecolor": "black", "alpha": 0.5, "pad": 0.3, "linewidth": 0})
    for number, (name, attribution) in enumerate(zip(names, attributions, strict=True)):
        of_frames = attribution.by_row()[: picture.shape[1]]
        times = [start + (row + 0.5) * frame for row in range(len(of_frames))]
        label, _, chance = name.rpartition(" ")
        shares.plot(times, of_frames / frame, color=COLOURS[2 + number], label=f"{_short(label)} {chance}", linewidth=1)
    shares.set(ylabel="share a second", title="Gradient times input")
    # above the axes, where the legend hides no curve
    lines = shares.lines  # given, because by itself a legend leaves out names that begin with _
    labels = [str(line.get_label()) for line in lines]
    for text in shares.legend(lines, labels, fontsize=7, loc="lower right", bbox_to_anchor=(1, 1)).get_texts():
        text.set(**lettering(text.get_text()))
    in_row = encoder.trunk.patch_embed.grid_size[1]
    weights = attributions[0].rollout.unflatten(0, (-1, in_row)).sum(1)
    times = [start + (row + 0.5) * encoder.row_seconds for row in range(len(weights))]
    rollout.plot(times, weights / encoder.row_seconds, color=COLOURS[0], linewidth=1)
    rollout.set_ylabel("share a second")
    title = f"Rollout of the attention, for {_short(names[0].rpartition(' ')[0])}"
    rollout.set_title(title, **lettering(title))
    for axes in of_rows:
        looked = rows.unflatten(1, (-1, in_row)).abs().sum(2)
        looked = looked / looked.amax(1, keepdim=True).clamp(min=1e-30)
        extent = (start, start + looked.shape[1] * encoder.row_seconds, len(looked), 0)
        axes.imshow(looked, cmap="Blues", aspect="auto", interpolation="nearest", extent=extent)
        axes.grid(False)
        axes.set(ylabel="summary token", yticks=[], title="What summary tokens of the last layer look at")
    figure.axes[-1].set_xlabel("seconds")
    return figure
