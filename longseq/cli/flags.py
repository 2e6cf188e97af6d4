"""Type, help and default of the flags that belong to no argument of model, data or trainer."""

from typing import Any

from jsonargparse import ArgumentParser

from longseq.training.answers.events import Settings

_SETTINGS = Settings()
FLAGS = {
    "experiment": (str | None, "Name of the runs' folder; by default the name of your data folder or config file."),
    "peak_flops": (float | None, "The device's dense peak in FLOP/s, to log MFU if longseq does not know it."),
    "resume": (bool | str, "Resume the newest unfinished run of the experiment, or the run in this folder.", False),
    "grow": (
        str | None, "Train on small images first: sizes, epochs and learning rates, such as 16x16:40,32x32:8@1e-3.",
    ),
    "folds": (
        int | None, "Cross-validation with this many folds: a run for each, and a table with mean and spread.",
    ),
    "minutes": (float | None, "Train for this many minutes, test included, instead of a number of epochs."),
    "baseline": (bool, "Compare the trained model with a simple one, in seconds.", True),
    "checkpoint_minutes": (float, "The longest time between two checkpoints of a training, in minutes.", 10.0),
    "skip_bad_steps": (int, "The most steps in a row that are skipped because the loss is not finite.", 0),
    "allow_class": (str | list[str], "A package whose classes may be named, in addition to those of longseq.", []),
}  # fmt: skip
FLAGS_OF_PREDICT = {
    "window": (float | None, "Split sounds into windows of this many seconds."),
    "hop": (float | None, "Seconds from the start of one window to the start of the next."),
    "top": (int | None, "Name this many classes, the most probable first."),
    "out": (str | None, "Write a .csv, .jsonl or .json file; a stopped run resumes with it."),
    "events": (str | None, "Write the events with their times: .csv, .txt for Audacity, .tsv for Raven."),
    "picture": (str | None, "Draw a recording with its events."),
    "page": (str | None, "Write a folder with a page to look at and correct the predictions."),
    "explained": (int | None, "How many files of the page have explain's picture, the most uncertain first."),
    "embeddings": (str | None, "Write the features of every file: .npz."),
    "threshold": (float | None, "The probability that an event must reach."),
    "smooth": (float, "Seconds over which probabilities are averaged.", _SETTINGS.smooth),
    "gap": (float, "Seconds below the threshold that do not end an event.", _SETTINGS.gap),
    "shortest": (float, "Length of the shortest event, in seconds.", _SETTINGS.shortest),
}


def add_flags(parser: ArgumentParser, flags: dict[str, Any]) -> None:
    """Add a table of flags to a parser."""
    for name, (kind, sentence, *default) in flags.items():
        parser.add_argument(f"--{name}", type=kind, help=sentence, **({"default": default[0]} if default else {}))
