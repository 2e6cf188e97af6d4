"""What docs/stability.md promises by name, as the code has it now.

`python tests/promised.py` writes it to tests/stable/VERSION/, before the first release of a second version number.
"""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import longseq
from longseq.cli.command_list import COMMANDS
from longseq.cli.flags import FLAGS, FLAGS_OF_PREDICT
from longseq.cli.predict.output_files import COLUMNS

STABLE = Path(__file__).with_name("stable")
PACKAGES = ("longseq", "longseq.attention", "longseq.encoders", "longseq.tasks", "longseq.training", "datamodules")
CONFIGURATIONS = {"image": ["image/digits"], "sound": ["audio/folder", "--data.root", "recordings"]}
OF_ONE_RUN = ("resume", "ckpt_path", "debug", "allow_class")  # flags alone


def exported() -> dict[str, list[str]]:
    """The public names of each package."""
    return {package: sorted(importlib.import_module(package).__all__) for package in PACKAGES}


def flags() -> dict[str, list[str]]:
    """The flags of each command, without those of data, model and trainer."""
    own: dict[str, Any] = {"fit": FLAGS, "predict": FLAGS_OF_PREDICT}
    for name, command in COMMANDS.items():
        if command.package:
            function = getattr(importlib.import_module(f"{command.package}.{name}"), name)
            own[name] = inspect.signature(function).parameters
    return {name: list(own.get(name, [])) for name in COMMANDS}


def main() -> None:
    folder = STABLE / longseq.__version__
    folder.mkdir(exist_ok=True)
    promises = {"commands": flags(), "names": exported(), "columns": list(COLUMNS)}
    (folder / "names.json").write_text(json.dumps(promises, indent=1) + "\n")
    for name, words in CONFIGURATIONS.items():
        command = [sys.executable, "train.py", "fit", "--config", *words, "--print_config"]
        settings = yaml.safe_load(subprocess.check_output(command, cwd=STABLE.parents[1]))
        settings["trainer"] = {"max_epochs": settings["trainer"]["max_epochs"]}  # the others are Lightning's
        recorded = {key: value for key, value in settings.items() if key not in OF_ONE_RUN}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recorded, sort_keys=False))


if __name__ == "__main__":
    main()
