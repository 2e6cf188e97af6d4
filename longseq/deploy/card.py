"""The model card of a run: README.md in its folder, and card.png."""

import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from torch import Tensor

import longseq
from longseq.encoders.lettering import drawable, key_of
from longseq.files.description import settings_of
from longseq.files.storage import is_foreign, refuse_foreign, write_text
from longseq.reports.baseline import Baseline
from longseq.reports.interval import wilson
from longseq.reports.plots import COLOURS, machine, markdown, refuse_foreign_picture, save, styled
from longseq.training.board.class_axes import are_short, figure_with_key, write_classes
from longseq.training.board.curves import read_curves
from longseq.training.board.summary import summary
from longseq.training.classifier import Classifier
from longseq.training.data import InputSpec

_Curves = Mapping[str, Sequence[tuple[int, float]]]  # by the tag of TensorBoard: optimizer steps and values

FILES = ("README.md", "card.png")
_SIDE, _TICK = 150.0, 7.0  # of the confusion matrix and of its labels, in points
_FEW = 20  # with fewer test samples of a class, its figures say little


def write_card(
    run: Path,
    model: Classifier,
    data: Any,
    figures: Mapping[str, float],
    by_class: Mapping[str, Sequence[float]],
    confusions: Tensor | None,
    tested: str,
    command: str,
    baseline: Baseline | None = None,
    course: str = "",
) -> None:
    """Write what a trained model is, how good it is, and how it was trained.

    Args:
        run: The run's folder; the curves are read from its TensorBoard events, if there are any.
        model: The trained model.
        data: The data module, after setup.
        figures: Figures of the best validation and of the test.
        by_class: Figures of each class in the test, by their names.
        confusions: Counts of true class (row) and predicted class (column) in the test; None if they are not counted.
        tested: The checkpoint that was tested.
        command: The command that trained it.
        baseline: A simple model on the same splits, if there is one.
        course: Sentences on the training: how many steps it took, if the command does not say so, and its energy.
    """
    curves = read_curves(run)
    is_drawn = bool(curves) or confusions is not None
    if is_drawn:
        save(_draw(curves, model, confusions), run / FILES[1], dpi=100)
    splits = data.splits()
    num_tested = num_tested_of(model.trainer, len(splits["test"]), confusions)
    counts = {name: model.task.counts(split.labels, model.num_classes).tolist() for name, split in splits.items()}
    sections = [
        _front_matter(run.parent.name, model, data, figures, num_tested),
        f"# {run.parent.name}",
        _first_sentence(model, data),
        _result(model, figures, num_tested, tested),
        "" if baseline is None else _compared(baseline),
        "![Loss and accuracy of the training, and confusions of the test](card.png)" if is_drawn else "",
        "" if model.mix is None else _mixed(type(model.mix).__name__, _words(model.task.best)),
        f"## {_things(model).capitalize()}\n\nSamples of each split, and figures of the test.",
        _classes(model.class_names, counts, by_class, "amount" if model.task.predicts == "amounts" else "class"),
        "\n".join(["## Remarks on the data\n", *(f"- {line}" for line in data.remarks)]) if data.remarks else "",
        "## Intended use and limits",
        _limits(model, data.inputs, counts["test"]),
        "## All figures",
        markdown(["figure", "value"], [[_words(name), f"{value:.4f}"] for name, value in sorted(figures.items())]),
        "## How it was trained",
        f"    {command}",
        course,
        f"longseq {longseq.__version__}{_commit()}; {machine(model.device.type)}. {_speed(curves)}",
        f"```\n{summary(model)}\n```",
        f"The `config.yaml` of the run has every setting. Those of the model:\n\n```\n{_settings(model)}\n```",
    ]
    write_text(run / FILES[0], "\n\n".join(section.strip("\n") for section in sections if section) + "\n")


_MARK = rb"\A---\n(?:.*\n)*?library_name: longseq\n"


def replace_card(of_run: Path, folder: Path) -> None:
    """Put the card of a run beside a model that was written to a folder, in place of an earlier model's. Other files of
    these names in the run's folder are not shared."""
    if of_run.resolve() == folder.resolve():
        return
    is_ours = (of_run / FILES[0]).is_file() and not is_foreign(of_run / FILES[0], _MARK)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
        if is_ours and (of_run / name).is_file():
            shutil.copyfile(of_run / name, folder / name)


def refuse_other_card(folder: Path, argument: str) -> None:
    """Check that a folder holds no README.md or card.png that longseq did not write.

    Raises:
        ValueError: If it does; the message names the argument.
    """
    refuse_foreign(folder / FILES[0], argument, _MARK)
    if not (folder / FILES[0]).exists():  # a card.png of longseq 0.1 has no mark, but a README.md beside it
        refuse_foreign_picture(folder / FILES[1], argument)


def _front_matter(name: str, model: Classifier, data: Any, figures: Mapping[str, float], num_tested: int | None) -> str:
    """The metadata that the Hugging Face Hub reads: what the model does, its licence, and the figure of its test."""
    of = {"images": "image", "sounds": "audio"}.get(data.inputs.kind)
    is_known = of is not None and model.task.predicts == "classes"  # the Hub has no tag for other tasks
    tag = f"pipeline_tag: {of}-classification\n" if is_known else ""
    licence = "license: unknown  # name one before you share the model, such as apache-2.0\n"
    head, best = f"---\nlibrary_name: longseq\n{tag}{licence}tags:\n- longseq\n", model.task.best
    if not is_known or f"test/{best}" not in figures:
        return f"{head}---"
    interval = interval_of(model, figures, num_tested)
    of = "" if interval is None else f", 95 % interval {interval[0]:.3f} to {interval[1]:.3f}"
    dataset = type(data).__name__
    metric = {"type": best, "value": round(figures[f"test/{best}"], 6), "name": f"Test {_words(best)}{of}"}
    result = {
        "task": {"type": tag.split()[1]},
        "dataset": {"type": dataset.lower(), "name": dataset, "split": "test"},
        "metrics": [metric],
    }
    index = [{"name": name, "results": [result]}]
    return f"{head}{yaml.safe_dump({'model-index': index}, sort_keys=False, allow_unicode=True)}---"


def _mixed(mix: str, best: str) -> str:
    return (
        f"In training, samples are mixed ({mix}): the loss and the {best} of the training are measured on mixed "
        f"samples. The {best} counts one of the two labels of a mixture, also where the other one has the larger "
        "share. So both are worse than on whole samples, and may be worse than those of the validation."
    )


def _things(model: Classifier) -> str:
    """What the model predicts, in the plural."""
    return "amounts" if model.task.predicts == "amounts" else "classes"


def _first_sentence(model: Classifier, data: Any) -> str:
    sizes = ", ".join(f"{len(split)} {name}" for name, split in data.splits().items())
    of, task = f"{data.inputs.kind}, {model.num_classes} {_things(model)}", type(model.task).__name__
    return f"A model of {of}, trained with longseq ({task}) on {type(data).__name__}: {sizes}. `longseq.load` reads it."


def interval_of(model: Classifier, figures: Mapping[str, float], num_tested: int | None) -> tuple[float, float] | None:
    """The 95 % interval of the test accuracy; None for other figures, and without a test of known size."""
    accuracy = figures.get("test/accuracy")
    if model.task.best != "accuracy" or accuracy is None or not num_tested:
        return None
    return wilson(round(accuracy * num_tested), num_tested)


def num_tested_of(trainer: Any, num_samples: int, confusions: Tensor | None) -> int | None:
    """How many samples were tested; None if only a part was and no confusions count it."""
    if confusions is not None:
        return int(confusions.sum())
    limit = trainer.limit_test_batches  # 1.0 means all batches, 1 means one batch
    return num_samples if isinstance(limit, float) and limit == 1 else None


def _result(model: Classifier, figures: Mapping[str, float], num_tested: int | None, tested: str) -> str:
    best = model.task.best
    figure = figures.get(f"test/{best}")
    if figure is None:
        return "It was not tested."
    of = "a part of the test split" if num_tested is None else f"{num_tested} samples"
    text = f"**Test {_words(best)}: {figure:.4f}** on {of}"
    interval = interval_of(model, figures, num_tested)
    if interval is not None:
        text += f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
    weights = {"averaged.ckpt": "the averaged weights", "last.ckpt": "the last weights"}
    return f"{text}, with {weights.get(Path(tested).name, 'the checkpoint of the best validation')}."


def _compared(baseline: Baseline) -> str:
    return (
        f"Baseline: {baseline.name}, fitted to the same training split in {baseline.seconds:.1f} s, "
        f"has a test accuracy of {baseline.test:.4f} (validation {baseline.val:.4f})."
    )


def _classes(
    names: Sequence[str],
    counts: Mapping[str, Sequence[int]],
    by_class: Mapping[str, Sequence[float]],
    what: str = "class",
) -> str:
    are_numbered = bool(key_of(names)) or not are_short(drawable(names), _SIDE, _TICK)  # in the picture
    rows = [
        [
            *([label] if are_numbered else []),
            " ".join(name.split()).replace("|", "\\|"),
            *(of_split[label] for of_split in counts.values()),
            *("" if math.isnan(values[label]) else f"{values[label]:.3f}" for values in by_class.values()),
        ]
        for label, name in enumerate(names)
    ]
    return markdown([*(["number"] if are_numbered else []), what, *counts, *by_class], rows)


def _limits(model: Classifier, inputs: InputSpec, tested: Sequence[int]) -> str:
    encoder: Any = model.encoder
    lines = [f"It is meant for {inputs.kind} like those that it was trained on, and for these {_things(model)}."]
    if model.task.best == "accuracy":
        lines.append("Every input gets one of the classes, also one that belongs to none of them.")
    if inputs.shape[-1:] == (None,):
        longest = f"of up to {encoder.seconds:g} s at {inputs.rate_hz} Hz; longer ones in windows, and"
        length = f"of any length at {inputs.rate_hz} Hz," if encoder.any_length else longest
        lines.append(f"Its inputs are {inputs.kind} {length} other rates after resampling.")
    elif inputs.kind == "images" and not encoder.any_length:
        lines.append(f"It sees {' x '.join(map(str, encoder.picture_shape[1:]))} pixels; others are resized.")
    elif inputs.kind != "images":
        facts = [" x ".join("any" if side is None else str(side) for side in inputs.shape)]
        facts += [] if inputs.unit is None else [f"in {inputs.unit}"]
        facts += [] if inputs.rate_hz is None else [f"at {inputs.rate_hz:g} Hz"]
        facts += [] if inputs.channels is None else [f"channels {', '.join(inputs.channels)}"]
        lines.append(f"It takes {inputs.kind} of {', '.join(facts)}.")
    few = sum(count < _FEW for count in tested)
    if few:
        lines.append(f"{few} of the {len(tested)} classes have fewer than {_FEW} samples in the test.")
    lines.append("The figures are those of one training and one test split; other data and other seeds give others.")
    return "\n".join(f"- {line}" for line in lines)


def _settings(model: Classifier) -> str:
    return "\n".join(f"{name}: {value}" for name, value in settings_of(model.hparams).items())


def _speed(curves: _Curves) -> str:
    """The throughput of the training."""
    rates = []
    for what in ("samples", "tokens"):
        values = [value for _, value in curves.get(f"throughput/{what}_per_second", ())]
        rates += [f"{median(values):,.0f} {what}"] if values else []
    return f"{' and '.join(rates)} a second." if rates else ""


def _commit() -> str:
    """The git commit that longseq runs from; "" if it is installed without its repository."""
    root = Path(longseq.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    described = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return f" ({described.stdout.strip()})" if described.returncode == 0 else ""


def _words(name: str) -> str:
    return name.replace("/", " ").replace("_", " ")


@styled
def _draw(curves: _Curves, model: Classifier, confusions: Tensor | None) -> Any:
    names = drawable(model.class_names)
    numbered = [] if confusions is None or are_short(names, _SIDE, _TICK) else names
    figure, upper = figure_with_key(10.8, 3.0, numbered, _TICK, key_of(model.class_names))
    losses, bests, matrix = upper.subplots(1, 3)
    for axes, what in ((losses, "loss"), (bests, model.task.best)):
        for number, split in enumerate(("train", "val")):
            points = curves.get(f"{split}/{what}", ())
            if points:
                marker = "." if len(points) == 1 else None  # a line through one point is invisible
                axes.plot(*zip(*points, strict=True), color=COLOURS[2 + number], label=split, marker=marker)
        axes.set(xlabel="step", title=_words(what).capitalize())
        if axes.lines:
            axes.legend()
    if confusions is None:
        matrix.set_axis_off()
        return figure
    shares = confusions / confusions.sum(1, keepdim=True).clamp(min=1)
    matrix.imshow(shares.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    matrix.set(xlabel="predicted class", ylabel="true class", title="Confusions of the test")
    matrix.grid(False)
    write_classes(matrix, names, _SIDE, _TICK)
    return figure
