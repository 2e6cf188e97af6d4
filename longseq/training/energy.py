"""The energy of a training and of a prediction, where the machine counts it."""

import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from longseq.compat.torch import gpu_joules
from longseq.training.devices.processes import copies
from longseq.training.throughput import wait_for

POWERCAP = Path("/sys/class/powercap")
_KWH = 3.6e6  # joules


class EnergyMeter(pl.Callback):
    """Count the joules of a training, with its validations, and those of the test.

    The counters are those of processors and their memory (RAPL, which Linux shows in /sys/class/powercap) and of GPUs
    (NVML, with the package nvidia-ml-py). They count all that happens on these parts, other programs and idle time too,
    but no disks, fans or losses of the power supply. All processes are summed. If a GPU trains, its counter is needed;
    processors are added where theirs can be read. A resumed training continues its sum, if it has one process; steps
    that it repeats count once.

    TensorBoard shows the sum after each validation and at the end, as energy/joules.

    Attributes:
        figures: energy/training_joules and energy/joules_per_prediction, as far as they are known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}
        self._counters: Counters | None = None
        self._of_training = self._of_test = 0.0  # joules of this process
        self._samples = 0.0  # of this process, in the test
        self._is_training = self._is_continued = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._counters = self._counters or Counters(trainer.strategy.root_device, trainer.local_rank == 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step and not (self._is_continued and trainer.world_size == 1):
            self._of_training = math.nan  # a part of it was not counted, or by another process
        self._is_training = True
        self._begin(pl_module)

    def on_train_batch_end(self, *_: Any) -> None:
        self._of_training += self._passed()

    def on_validation_batch_end(self, *_: Any) -> None:
        if self._is_training:
            self._of_training += self._passed()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_training:
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(trainer, pl_module)
        self._is_training = False

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._of_test = self._samples = 0.0
        self._begin(pl_module)

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._of_test += self._passed()
        self._samples += len(batch[1]) / copies(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wait_for(pl_module.device)
        self._of_test += self._passed()
        joules, samples = _sums(trainer, pl_module, self._of_test, self._samples)
        if not math.isnan(joules):
            self.figures["energy/joules_per_prediction"] = joules / samples

    def summary(self) -> str:
        """The energy of the training and of a prediction, or why it is not known, in a sentence for the card."""
        assert self._counters is not None
        training = self.figures.get("energy/training_joules")
        if training is None:
            return f"Energy: not available ({self._counters.missing or 'a part of the training was not counted'})."
        test = self.figures.get("energy/joules_per_prediction")
        of_test = "" if test is None else f", and the test {test:.3g} J for each prediction"
        parts = " and ".join(self._counters.names)
        return f"Energy of {parts}: the training took {training:,.0f} J ({training / _KWH:.3g} kWh){of_test}."

    def _begin(self, pl_module: pl.LightningModule) -> None:
        wait_for(pl_module.device)
        self._passed()

    def _passed(self) -> float:
        # called after each batch, because RAPL's counters start again from 0 after some minutes
        assert self._counters is not None
        return self._counters.passed()

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wait_for(pl_module.device)
        self._of_training += self._passed()
        (joules,) = _sums(trainer, pl_module, self._of_training)
        if math.isnan(joules):
            self.figures.clear()  # of an earlier part, on another machine
            return
        self.figures["energy/training_joules"] = joules
        for logger in trainer.loggers:
            logger.log_metrics({"energy/joules": joules}, step=max(trainer.global_step - 1, 0))  # as in Lightning

    def state_dict(self) -> dict[str, Any]:
        return {} if not self._of_training or math.isnan(self._of_training) else {"joules": self._of_training}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.figures:  # otherwise the test loads the best checkpoint after the training
            self._of_training, self._is_continued = state_dict["joules"], True
            self.figures["energy/training_joules"] = state_dict["joules"]  # if nothing is left to train


def _sums(trainer: pl.Trainer, pl_module: pl.LightningModule, *values: float) -> list[float]:
    """The sum of each value over all processes."""
    own = torch.tensor(values, device=pl_module.device)
    return trainer.strategy.all_gather(own).reshape(-1, len(values)).sum(0).tolist()


class Counters:
    """The energy counters of the parts that this process uses.

    Args:
        device: Where it computes.
        counts_processors: Whether it counts the processors of the machine; only one process may.
        powercap: The folder in which Linux shows RAPL; None for the usual one.

    Attributes:
        names: The parts that are counted.
        missing: Why nothing can be counted; empty if something can.
    """

    def __init__(self, device: torch.device, counts_processors: bool, powercap: Path | None = None) -> None:
        self._device = device
        self._zones = _zones(powercap or POWERCAP) if counts_processors else {}
        self.names, self.missing = [], ""
        is_readable = bool(self._zones) and None not in map(_joules, self._zones)
        if device.type == "cpu" and counts_processors and not is_readable:
            self.missing = f"its processors show no energy in {powercap or POWERCAP}"
            if self._zones:
                self.missing = f"this user may not read {min(self._zones)}"
        elif device.type != "cpu" and gpu_joules(device) is None:
            self.missing = "its GPU reports no energy, or nvidia-ml-py is not installed"
        if is_readable:
            self.names.append("the processors")
        else:
            self._zones = {}
        if device.type != "cpu":
            self.names.append("the GPU")
        self._last = self._read()

    def passed(self) -> float:
        """The joules since the last call; NaN if they cannot be counted."""
        before, self._last = self._last, self._read()
        if self.missing:
            return math.nan
        joules = 0.0
        for (was, span), (now, _) in zip(before, self._last, strict=True):
            joules += now - was if now >= was else now - was + span  # the counter has started again from 0
        return joules

    def _read(self) -> list[tuple[float, float]]:
        """Joules and range of each counter."""
        readings = [(_joules(zone), span) for zone, span in self._zones.items()]
        if self._device.type != "cpu":
            readings.append((gpu_joules(self._device), math.inf))
        return [(math.nan if joules is None else joules, span) for joules, span in readings]


def _zones(powercap: Path) -> dict[Path, float]:
    """The counters of packages and of their memory, and the joules after which each starts again. Other zones (core,
    uncore, psys) are parts of packages, or contain them."""
    zones = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's have this name too
        try:
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                zones[zone / "energy_uj"] = int((zone / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
    return zones


def _joules(counter: Path) -> float | None:
    try:
        return int(counter.read_text()) / 1e6
    except (OSError, ValueError):  # by default only root may read it
        return None
