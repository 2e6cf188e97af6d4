"""One record for each command. Help, parsers and the function to run follow from it. Imports no torch."""

from typing import NamedTuple


class Command(NamedTuple):
    """What a command does, and how it runs.

    Attributes:
        sentence: What it does, for the help.
        package: The package of a module with the command's name. Its function of the same name runs the command, with
            the flags as arguments. If empty, a method of `Commands` (model_commands.py) or `Trainer`
            (data_commands.py) runs it.
        needs_model: Whether the method needs a model and a trainer in addition to data.
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
    "embed": Command("Run sounds or images through a frozen network, and write its tokens as features.", "longseq.cli"),
    "benchmark": Command("Measure time and memory of attention against sequence length and k.", "longseq.reports"),
    "spectrum": Command("Measure how few tokens a trained model's attention needs, and suggest k.", "longseq.reports"),
    "approximation": Command("Measure how far shortened attention is from exact attention.", "longseq.reports"),
    "sweep": Command("Train a grid of settings with several seeds, and tabulate their accuracies.", "longseq.reports"),
    "needle": Command("Measure the longest recording in which a model still finds one word.", "longseq.reports"),
    "contract": Command(
        "Test that your own mechanism, projection, task or data module does what longseq requires.", "longseq.contract"
    ),
    "explain": Command(
        "Draw which pixels or moments of a file decided for each of its most probable classes.", "longseq.deploy"
    ),
    "review": Command("Show a page of predictions, on this machine only, and save what is corrected.", "longseq.cli"),
    "board": Command("Show runs in TensorBoard, on this machine only.", "longseq.cli"),
    "export": Command(
        "Write a trained model as ONNX, as a program of torch.export, or as a folder to share.", "longseq.deploy"
    ),
}
