"""How long commands take to start, compared with the import of torch and Lightning, in turns in one run.

python benchmarks/start.py [--rounds 5]
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jsonargparse.typing import PositiveInt
from PIL import Image

from longseq.reports.plots import markdown
from longseq.training.throughput import timed

ROOT = Path(__file__).parents[1]
LONGSEQ = [sys.executable, "-m", "longseq"]
IMPORTS = [sys.executable, "-c", "import torch, pytorch_lightning"]
TINY = ["--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0", "--trainer.max_steps", "1"]


def seconds(command: list[str], folder: str, code: int, until: str | None) -> float:
    """Seconds until a command ends with the expected exit code, or until it has printed some words before that."""
    times: list[float] = []
    with timed(times):
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        is_reached = any(until is not None and until in line for line in process.stdout)  # stops at the words
        if not is_reached:
            process.wait()
    process.communicate()
    if process.returncode != code or is_reached != (until is not None):
        what = f"ended with {process.returncode}, expected {code}, and {until or 'its end'}"
        raise SystemExit(f"error: {shlex.join(command)} {what}")
    return times[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=PositiveInt, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        Image.new("L", (8, 8)).save(f"{folder}/image.png")
        step = [*LONGSEQ, "fit", "--config", "image/digits", *TINY, "--trainer.limit_test_batches", "0"]
        subprocess.run(step, cwd=folder, check=True, capture_output=True)
        # this callback prints a line when the first batch is done
        (Path(folder) / "announcing.py").write_text(
            "import pytorch_lightning as pl\n\nclass Announce(pl.Callback):\n    def on_train_batch_end(self, *_):\n"
            "        print('the first step is done', flush=True)\n"
        )
        announce = ["--allow_class", "announcing", "--trainer.callbacks+=announcing.Announce"]
        predict = [*LONGSEQ, "predict", "--ckpt_path", "runs/digits/0/last.ckpt", "--input", "image.png"]
        commands: dict[str, tuple[list[str], int, str | None]] = {  # with the exit code, and the words that are timed
            "import torch, pytorch_lightning": (IMPORTS, 0, None),
            "longseq --help": ([*LONGSEQ, "--help"], 0, None),
            "longseq ft (no such command)": ([*LONGSEQ, "ft"], 2, None),
            "longseq fit --config no/such": ([*LONGSEQ, "fit", "--config", "no/such"], 2, None),
            "longseq fit --help": ([*LONGSEQ, "fit", "--help"], 0, None),
            "longseq fit --model.encodr x": ([*LONGSEQ, "fit", "--model.encodr", "x"], 2, None),
            "predict of one file": (predict, 0, None),
            "fit, until the first step is done": ([*step, *announce], 0, "the first step is done"),
        }
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, (command, code, until) in commands.items():
                taken[name].append(seconds(command, folder, code, until))
    base = taken["import torch, pytorch_lightning"]
    rows = []
    for name, times in taken.items():
        ratios = [time / one for time, one in zip(times, base, strict=True)]
        per_round = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        rows.append(
            [f"`{name}`", f"{statistics.median(times):.2f}", f"**{statistics.median(ratios):.2f}** ({per_round})"]
        )
    print(markdown(["command", "seconds, median", "against the imports, median (each round)"], rows), end="")


if __name__ == "__main__":
    main()
