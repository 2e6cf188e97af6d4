"""Flags of the commands that train and use a model, besides those of model, data and trainer: type, help, default."""

from typing import Any

from jsonargparse import ArgumentParser

from longseq.training.answers.events import Settings

_SETTINGS = Settings()
FLAGS = {
    "experiment": (str | None, "Name of the runs' folder; by default that of your data or config file."),
    "peak_flops": (float | None, "The device's dense peak in FLOP/s, to log MFU if longseq does not know it."),
    "resume": (bool | str, "Resume the newest unfinished run of the experiment, or the run in this folder.", False),
    "grow": (
        str | None, "Train on small images first: sizes, epochs and learning rates, such as 16x16:40,32x32:8@1e-3.",
    ),
    "folds": (
        int | None, "Cross-validation: a run for each of so many folds of the data, and a table with mean and spread.",
    ),
    "minutes": (float | None, "Train so long, and not so many epochs: the command ends then, its test included."),
    "baseline": (bool, "Compare the trained model with a simple one, in seconds.", True),
    "checkpoint_minutes": (float, "Most minutes between two checkpoints of a training.", 10.0),
    "skip_bad_steps": (int, "Most steps in a row to leave out if the loss is not finite.", 0),
    "allow_class": (str | list[str], "A package whose classes may be named, besides those of longseq.", []),
}  # fmt: skip
FLAGS_OF_PREDICT = {
    "window": (float | None, "Hear sounds in windows of so many seconds."),
    "hop": (float | None, "Seconds from one window to the next."),
    "top": (int | None, "Name so many classes, the most probable first."),
    "out": (str | None, "Write a .csv, .jsonl or .json file; a stopped run goes on with it."),
    "events": (str | None, "Write what is heard when: .csv, .txt for Audacity, .tsv for Raven."),
    "picture": (str | None, "Draw a recording with its events."),
    "embeddings": (str | None, "Write the features of every file: .npz."),
    "threshold": (float | None, "The probability that an event reaches."),
    "smooth": (float, "Seconds over which probabilities are averaged.", _SETTINGS.smooth),
    "gap": (float, "Seconds of silence that end no event.", _SETTINGS.gap),
    "shortest": (float, "Seconds of the shortest event.", _SETTINGS.shortest),
}


def add_flags(parser: ArgumentParser, flags: dict[str, Any]) -> None:
    """Add a table of flags to a parser."""
    for name, (kind, sentence, *default) in flags.items():
        parser.add_argument(f"--{name}", type=kind, help=sentence, **({"default": default[0]} if default else {}))
