"""In how long a recording a model still finds a sound of one second: accuracy against duration."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import ArgumentError, require
from longseq.files.checkpoint import CheckpointError
from longseq.reports._checks import Device, require_device, require_positive
from longseq.reports.interval import wilson
from longseq.reports.plots import COLOURS, Report, machine, panels, styled, write_csv
from longseq.training.classifier import model_and_data
from longseq.training.memory import keep_freed_memory
from longseq.training.throughput import peak_memory_gib, timed


def needle(
    ckpt_path: str,
    seconds: list[float] = [10.0, 60.0, 600.0],  # noqa: B006  (jsonargparse shows them)
    trials: int = 50,
    window: float | None = None,
    empty_hours: float | None = None,
    found: float = 0.9,
    root: str | None = None,
    device: Device = "cpu",
    out: str = "needle",
    allow_class: list[str] = [],  # noqa: B006
) -> None:
    """Measure the accuracy of a model of Needles by duration, on recordings of the test split's digits and backgrounds.

    A model for any length (any_length) processes each recording as one sequence. With --window any model also processes
    each in windows that overlap by half, and answers with the class that has the highest score (logit) in a window: a
    probability is near 1 in windows without a digit too. A model of bounded clips then processes windows only. The
    interval is Wilson's, for 95 %. Time is the median of a pass over one recording, spectrogram included. Memory is the
    peak so far, of the process or on the GPU.

    With --empty_hours recordings without digits are processed too. A false alarm is a recording, or a window, whose
    highest score is at least a threshold: the highest one at which --found of the validation split have the right
    answer with such a score. Each way of processing has its own threshold. Overlapping windows are counted one by one.

    Args:
        ckpt_path: A checkpoint of a training on Needles.
        seconds: Durations of the recordings.
        trials: Recordings of each duration.
        window: Length of the windows in seconds; by default there are no windows.
        empty_hours: Hours of recordings without digits, of each duration; by default false alarms are not counted.
        found: The share of the validation split that is right at the threshold of false alarms.
        root: Folder of the data, if it has moved.
        device: Where the model runs; the recordings are made on the CPU.
        out: Folder for table.md, table.csv, needle.png, and trials.csv with the class and the answer of each recording.
        allow_class: Packages whose classes the checkpoint may name, besides ours.

    Raises:
        ValueError: If a number is not positive, seconds is empty or holds a number twice, the device is absent, or the
            model cannot process recordings of these durations.
        CheckpointError: If the checkpoint cannot be read, or its data cannot make recordings of any duration.
        SettingError: If its task predicts no classes.
    """
    require_positive(seconds=seconds, trials=trials, window=1 if window is None else window)
    require_positive(empty_hours=1 if empty_hours is None else empty_hours)
    require(0 < found <= 1, "found", f"must be in 0..1, more than 0, got {found}; 0.9 is the default")
    require_device(device)
    model, data = model_and_data(ckpt_path, allow_class, root)
    if not hasattr(data, "recording"):
        what = f"was trained on {type(data).__name__}, which makes no recordings of any duration"
        raise CheckpointError(f"{ckpt_path}: {what}; train on Needles")
    model.task.require("classes")
    hears_all = model.encoder.any_length or (window is None and max(seconds) <= data.seconds)
    if not hears_all and (window is None or window > data.seconds):
        what = f"clips of {data.seconds:g} s are its longest; give --window {data.seconds:g}, or train with any_length"
        raise ArgumentError("ckpt_path", f"must be of a model for any length, but {what}")
    what = f"must be left out for the question {data.question}; only digit has false alarms"
    require(empty_hours is None or data.question == "digit", "empty_hours", what)
    ways: dict[str, int | None] = {"as one sequence": None} if hears_all else {}
    if window is not None:
        ways[f"in windows of {window:g} s"] = round(window * data.sample_rate_hz)
    data.setup("test")
    model.to(device)
    keep_freed_memory()  # otherwise each pass over an hour would request its gigabytes again, page by page
    settings = f"{data.question}, {data.level_db:g} dB, {data.background}, trained up to {data.seconds:g} s"
    report = Report(out, f"{model.encoder.attention!r}; Needles ({settings}); {machine(device)}")
    header = ["seconds", "heard", "tokens", "right", "trials"]
    header += ["accuracy", "95 % interval", "seconds a pass", "peak GiB"]
    thresholds: dict[str, float | None] = {}
    if empty_hours is not None:
        header += ["threshold", "false alarms", "hours without digits", "false alarms an hour"]
        thresholds = {way: threshold(model, data.val_set, samples, device, found) for way, samples in ways.items()}
        for way, least in thresholds.items():
            if least is None:
                print(
                    f"{way}: less than {found:g} of the validation split are right; there is no threshold", flush=True
                )
    rows: list[list[Any]] = []
    answers: list[list[Any]] = []
    for duration in sorted(seconds):
        right = dict.fromkeys(ways, 0)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for trial in range(trials):
            waveform, label = data.recording(duration, trial)
            for way, samples in ways.items():
                with timed(times[way], device):
                    answered = answer(model, waveform.to(device), samples)
                right[way] += answered == label
                answers.append([f"{duration:g}", way, trial, data.class_names[label], data.class_names[answered]])
        tokens = int(model.encoder.count_tokens(_inputs(waveform[None])))
        for way in ways:
            low, high = wilson(right[way], trials)
            figures = f"{right[way] / trials:.3f}", f"{low:.3f} to {high:.3f}", f"{median(times[way]):.3g}"
            peak = f"{peak_memory_gib(torch.device(device)):.2f}"
            row = [f"{duration:g}", way, tokens, right[way], trials, *figures, peak]
            if empty_hours is not None:
                row += _false_alarms(model, data, duration, empty_hours, ways[way], thresholds[way], device)
            rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in zip(header, rows[-1], strict=True)), flush=True)
    write_csv(report.folder / "trials.csv", ["seconds", "heard", "trial", "class", "answer"], answers)
    title = f"Needles: {data.question}, {data.level_db:g} dB"
    report.end(report.write(header, rows), draw(rows, 1 / data.num_classes, title), "needle.png", "trials.csv")


def answer(model: Any, waveform: Tensor, window: int | None) -> int:
    """The label that a model gives a recording, as one sequence or in windows of so many samples."""
    return int(scores(model, waveform, window).amax(0).argmax())


def scores(model: Any, waveform: Tensor, window: int | None) -> Float[Tensor, "windows classes"]:
    """What a model scores in each window of a recording; as one sequence it is the only window."""
    window, hop = (len(waveform),) * 2 if window is None else (window, max(window // 2, 1))
    missing = max(window - len(waveform), -(len(waveform) - window) % hop)
    windows = torch.nn.functional.pad(waveform, (0, missing)).unfold(0, window, hop)
    with torch.inference_mode():
        return torch.cat([model.task.evidence(model(_inputs(part))) for part in windows.split(64)])


def threshold(model: Any, samples: Any, window: int | None, device: Device, found: float = 0.9) -> float | None:
    """The highest score with which this share of the samples have the right answer at this score or above; None if
    fewer are right."""
    highest = []
    for index in range(len(samples)):
        of_classes = scores(model, samples.sample(index).to(device), window).amax(0)
        if int(of_classes.argmax()) == int(samples.labels[index]):
            highest.append(float(of_classes.max()))
    needed = math.ceil(found * len(samples) - 1e-9)  # 0.9 * 70 is a little more than 63
    return sorted(highest, reverse=True)[needed - 1] if len(highest) >= needed else None


def _false_alarms(
    model: Any, data: Any, seconds: float, hours: float, window: int | None, least: float | None, device: Device
) -> list[Any]:
    """The last columns of a row: the threshold, and how often recordings without digits have a score from it on."""
    trials = math.ceil(hours * 3600 / seconds)
    hours = trials * seconds / 3600
    if least is None:
        return ["none", "", f"{hours:g}", ""]
    alarms = 0
    for trial in range(trials):
        waveform = data.empty_recording(seconds, trial).to(device)
        alarms += int((scores(model, waveform, window).amax(1) >= least).sum())
    return [f"{least:.3f}", alarms, f"{hours:g}", f"{alarms / hours:.3g}"]


def _inputs(waveforms: Tensor) -> dict[str, Tensor]:
    lengths = torch.full((len(waveforms),), waveforms.shape[1], device=waveforms.device)
    return {"waveforms": waveforms, "lengths": lengths}


@styled
def draw(rows: Sequence[Sequence[Any]], chance: float, title: str) -> Any:
    """Draw accuracy with its interval against duration, a line for each way of processing, from the table's rows."""
    figure, (axes,) = panels(1, width=5.0)
    for way in dict.fromkeys(row[1] for row in rows):
        of_way = [row for row in rows if row[1] == way]
        colour = COLOURS[3 if str(way).startswith("in windows") else 2]
        x, y = [float(row[0]) for row in of_way], [float(row[5]) for row in of_way]
        low, high = zip(*(map(float, row[6].split(" to ")) for row in of_way), strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(x, y, "o-", color=colour, label=f"heard {way}")
    axes.axhline(chance, color=COLOURS[1], linestyle=":", label="chance")
    axes.set(xscale="log", xlabel="seconds", ylabel="accuracy", ylim=(0, 1.03), title=title)
    axes.legend()
    return figure
