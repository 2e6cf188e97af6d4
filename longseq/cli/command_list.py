"""Every command, each in one record: help, parsers and what runs a command follow from it. Imports no torch."""

from typing import NamedTuple


class Command(NamedTuple):
    """What a command does, and how it runs.

    Attributes:
        sentence: What it does, for the help.
        package: Where the module with the command's name has a function of this name, whose arguments are the flags. If
            it is empty, the command is a method of `Commands` (model_commands.py) or `Trainer` (data_commands.py).
        needs_model: Whether the method needs a model and a trainer, and not data alone.
    """

    sentence: str
    package: str = ""
    needs_model: bool = True


COMMANDS = {
    "fit": Command("Train a model, test its best checkpoint, and print where everything is."),
    "validate": Command("Print a checkpoint's figures on the validation split."),
    "test": Command("Print a checkpoint's figures on the test split."),
    "predict": Command("Print path, class and probability of each file of a folder."),
    "preview": Command("Draw training inputs as the model sees them, with their labels."),
    "stats": Command("Print the sizes of splits and classes, and figures of the training set.", needs_model=False),
    "check": Command("Open every file of a data set, and list those that are broken.", needs_model=False),
    "shard": Command("Write a data set as tar archives of many samples each, as WebDataset does.", needs_model=False),
    "benchmark": Command("Measure time and memory of attention against sequence length and k.", "longseq.reports"),
    "spectrum": Command("Measure how few tokens a trained model's attention needs, and suggest k.", "longseq.reports"),
    "approximation": Command("Measure how far shortened attention is from exact attention.", "longseq.reports"),
    "sweep": Command("Train a grid of settings with several seeds, and tabulate their accuracies.", "longseq.reports"),
    "needle": Command("Measure in how long a recording a model still hears one word.", "longseq.reports"),
    "contract": Command(
        "Test your own mechanism, projection or data module on what longseq asks of it.", "longseq.contract"
    ),
    "explain": Command(
        "Draw which pixels or moments of a file decided for each of its likeliest classes.", "longseq.deploy"
    ),
    "board": Command("Show runs in TensorBoard, for this machine alone.", "longseq.cli"),
    "export": Command(
        "Write a trained model as ONNX, as a program of torch.export, or as a folder to share.", "longseq.deploy"
    ),
}
