"""How fast a training is on a busy machine, for several ways in which OpenMP's threads wait for each other.

    python benchmarks/busy.py [--busy 0 4 8] [--settings GOMP_SPINCOUNT=1000 ...] [--seconds 8] [--rounds 3]

Each setting has a process of its own, which trains configs/image/digits.yaml. The processes take turns. In a turn one
process takes steps for --seconds, after three seconds that are not counted, because it needs one or two to adapt to its
neighbours. The other trainings sleep meanwhile. The busy processes run `while True: pass`, from the first turn of their
row to its last one. Without flags all takes eight minutes: three rows of busy processes, three rounds, four settings,
eleven seconds a turn.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from longseq.reports.plots import markdown, markdown_row

HEADER = ["busy processes", "setting", "steps/s, median (each round)", "time, libgomp's = 1", "time, PASSIVE's = 1"]
NOT_COUNTED = 3.0  # seconds at the beginning of a turn
PREFIX = "steps per second:"  # of the lines in which a training reports its speed
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")
OURS, DEFAULT, PASSIVE = "", "GOMP_SPINCOUNT=300000", "OMP_WAIT_POLICY=PASSIVE"
NAMES = {OURS: "longseq's own choice", DEFAULT: f"`{DEFAULT}`, what libgomp does by itself"}
# a callback of the trainings: it waits for a line on standard input, and then lets steps run for some seconds
IN_TURNS = f"""
import time
import pytorch_lightning as pl

class InTurns(pl.Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds, self.begin, self.steps = seconds, None, 0

    def on_train_batch_end(self, trainer, *_) -> None:
        now, self.steps = time.perf_counter(), self.steps + 1
        if trainer.global_step == 1:
            print("{PREFIX} 0", flush=True)
        elif self.begin is None and now - self.asked > {NOT_COUNTED}:
            self.begin, self.steps = now, 0
        elif self.begin is not None and now - self.begin > self.seconds:
            print("{PREFIX}", self.steps / (now - self.begin), flush=True)
        else:
            return
        if trainer.global_step == 1 or self.begin != now:
            input()
            self.begin, self.asked = None, time.perf_counter()
"""
FIT = [
    sys.executable, "-m", "longseq", "fit", "--config", "image/digits", "--trainer.accelerator", "cpu",
    "--trainer.max_epochs", "100000", "--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0",
    "--trainer.enable_progress_bar", "false", "--allow_class", "busy_in_turns",
    "--trainer.callbacks+=busy_in_turns.InTurns", "--trainer.callbacks.seconds",
]  # fmt: skip


class Training:
    """A training in its own process, which sleeps until it is asked for a turn."""

    def __init__(self, setting: str, seconds: float, folder: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment |= dict(word.split("=", 1) for word in setting.split())
        self.process = subprocess.Popen(
            [*FIT, str(seconds)],
            cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._answer()

    def steps_per_second(self) -> float:
        """Take a turn, and return its speed."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(PREFIX):
                return float(line.removeprefix(PREFIX))
        raise SystemExit(f"error: a training has ended with {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run so many busy processes meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=NonNegativeInt, nargs="+", default=[0, 4, 8], help="how many busy processes")
    parser.add_argument(
        "--settings", nargs="+", default=["OMP_NUM_THREADS=1"],
        help="settings besides longseq's own, libgomp's and PASSIVE: variables of the environment, with spaces between",
    )  # fmt: skip
    parser.add_argument("--seconds", type=PositiveFloat, default=8.0, help="how long a turn is")
    parser.add_argument("--rounds", type=PositiveInt, default=3, help="how many turns each setting has in a row")
    options = parser.parse_args()
    settings = list(dict.fromkeys([OURS, DEFAULT, PASSIVE, *options.settings]))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        (Path(folder) / "busy_in_turns.py").write_text(IN_TURNS)
        trainings = {}
        for setting in settings:
            trainings[setting] = Training(setting, options.seconds, folder)
            ended.callback(trainings[setting].end)
        time.sleep(2)  # until the last one sleeps
        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before the first turn", file=sys.stderr)
        print(
            "wanted: longseq's own choice at most 1.05 times libgomp's time beside 0, 1.2 times PASSIVE's beside others"
        )
        print("\n" + markdown(HEADER, []), end="")
        for number in options.busy:
            rates: dict[str, list[float]] = {setting: [] for setting in settings}
            with busy(number):
                for _ in range(options.rounds):
                    for setting, training in trainings.items():
                        rates[setting].append(training.steps_per_second())
            for setting, own in rates.items():
                ratios = [
                    statistics.median(other / one for one, other in zip(own, rates[base], strict=True))
                    for base in (DEFAULT, PASSIVE)
                ]
                per_round = f"{statistics.median(own):.2f} ({', '.join(f'{rate:.2f}' for rate in own)})"
                row = [number, NAMES.get(setting, f"`{setting}`"), per_round, *(f"**{ratio:.2f}**" for ratio in ratios)]
                print(markdown_row(row), end="", flush=True)


if __name__ == "__main__":
    main()
