"""In how long a recording a model still finds a sound of one second: accuracy against duration."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.files.checkpoint import CheckpointError
from longseq.reports._checks import Device, require_device, require_positive
from longseq.reports.interval import wilson
from longseq.reports.plots import COLOURS, Report, machine, panels, styled
from longseq.training.answers.predictions import answers
from longseq.training.classifier import model_and_data
from longseq.training.data import Part
from longseq.training.memory import keep_freed_memory
from longseq.training.throughput import peak_memory_gib, timed


def needle(
    ckpt_path: str,
    seconds: list[float] = [10.0, 60.0, 600.0],  # noqa: B006  (jsonargparse shows them)
    trials: int = 50,
    window: float | None = None,
    root: str | None = None,
    device: Device = "cpu",
    out: str = "needle",
    allow_class: list[str] = [],  # noqa: B006
) -> None:
    """Measure the accuracy of a model of Needles by duration, on recordings of the test split's digits and backgrounds.

    A model for any length (any_length) processes each recording as one sequence. With --window any model also processes
    each in windows that overlap by half, and answers with the class that has the highest probability in a window. A
    model of bounded clips then processes windows only. The interval is Wilson's, for 95 %. Time is the median of a pass
    over one recording, spectrogram included. Memory is the peak so far, of the process or on the GPU.

    Args:
        ckpt_path: A checkpoint of a training on Needles.
        seconds: Durations of the recordings.
        trials: Recordings of each duration.
        window: Length of the windows in seconds; by default there are no windows.
        root: Folder of the data, if it has moved.
        device: Where the model runs; the recordings are made on the CPU.
        out: Folder for table.md, table.csv and needle.png.
        allow_class: Packages whose classes the checkpoint may name, besides ours.

    Raises:
        ValueError: If a number is not positive, seconds is empty or holds a number twice, the device is absent, or the
            model cannot process recordings of these durations.
        CheckpointError: If the checkpoint cannot be read, or its data cannot make recordings of any duration.
        SettingError: If its task predicts no classes.
    """
    require_positive(seconds=seconds, trials=trials, window=1 if window is None else window)
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
    rows: list[list[Any]] = []
    for duration in sorted(seconds):
        right = dict.fromkeys(ways, 0)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for trial in range(trials):
            waveform, label = data.recording(duration, trial)
            for way, samples in ways.items():
                with timed(times[way], device):
                    right[way] += answer(model, waveform.to(device), samples) == label
        tokens = int(model.encoder.count_tokens(_inputs(waveform[None])))
        for way in ways:
            low, high = wilson(right[way], trials)
            figures = f"{right[way] / trials:.3f}", f"{low:.3f} to {high:.3f}", f"{median(times[way]):.3g}"
            peak = f"{peak_memory_gib(torch.device(device)):.2f}"
            rows.append([f"{duration:g}", way, tokens, right[way], trials, *figures, peak])
            print("  ".join(f"{name} {value}" for name, value in zip(header, rows[-1], strict=True)), flush=True)
    title = f"Needles: {data.question}, {data.level_db:g} dB"
    report.end(report.write(header, rows), draw(rows, 1 / data.num_classes, title), "needle.png")


def answer(model: Any, waveform: Tensor, window: int | None) -> int:
    """The label that a model gives a recording, as one sequence or in windows of so many samples."""
    window, hop = (len(waveform),) * 2 if window is None else (window, max(window // 2, 1))
    missing = max(window - len(waveform), -(len(waveform) - window) % hop)
    windows = torch.nn.functional.pad(waveform, (0, missing)).unfold(0, window, hop)
    parts: list[Part] = [("", 0.0, None)] * len(windows)
    chances = [part.probabilities for part in answers(model, map(_inputs, windows.split(64)), parts)]
    return int(torch.stack(chances).amax(0).argmax())


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
