"""Joules of a training and of a prediction, with counters that only the test moves."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.compat.torch import gpu_joules
from longseq.training import Classifier, energy
from longseq.training.energy import Counters, EnergyMeter

CPU = torch.device("cpu")
SPAN = 65_536_000  # microjoules; real ones have some 262 GJ
STEP, VALIDATION, TEST = 2_000_000, 500_000, 250_000  # microjoules of a batch


class Powercap:
    """The folder of Linux, with a package, its memory, and zones that must not be counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used = 0
        zones = {"0": "package-0", "0:0": "core", "0:1": "uncore", "0:2": "dram", "1": "package-1", "2": "psys"}
        for place, name in zones.items():
            zone = folder / f"intel-rapl:{place}"
            zone.mkdir(parents=True)
            (zone / "name").write_text(f"{name}\n")
            (zone / "max_energy_range_uj").write_text(f"{SPAN}\n")
        (folder / "intel-rapl").mkdir()  # the control type
        self.use(SPAN - 700_000)  # the counters start again soon

    def use(self, microjoules: int) -> None:
        """Let a package use a number, the other one as much, and the memory half of it."""
        self.used += microjoules
        for zone in self.folder.glob("intel-rapl:*"):
            used = self.used // 2 if zone.name.endswith(":2") else self.used
            (zone / "energy_uj").write_text(f"{used % SPAN}\n")


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Powercap:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    return Powercap(tmp_path / "powercap")


def test_packages_and_memory_are_counted_and_a_counter_may_start_again(powercap: Powercap) -> None:
    counters = Counters(CPU, counts_processors=True)
    assert counters.names == ["the processors"] and not counters.missing
    for microjoules in (600_000, 600_000, 60_000_000, 60_000_000):
        powercap.use(microjoules)
        assert counters.passed() == pytest.approx(2.5 * microjoules / 1e6)
    assert counters.passed() == 0
    assert Counters(CPU, counts_processors=False).passed() == 0  # another process of this machine counts them


def test_counters_that_are_absent_or_unreadable_are_named(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = powercap.folder / "intel-rapl:1/energy_uj"
    counter.unlink()
    counter.mkdir()  # tests may run as root, who may read every file
    counters = Counters(CPU, counts_processors=True)
    assert counters.missing.startswith("this user may not read") and counters.passed() != counters.passed()
    monkeypatch.setattr(energy, "POWERCAP", powercap.folder / "absent")
    counters = Counters(CPU, counts_processors=True)
    assert counters.missing == f"its processors show no energy in {powercap.folder / 'absent'}"


def test_a_gpu_is_counted_by_nvml(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py is not installed here, and there is no GPU."""
    gpu = torch.device("cuda", 1)
    assert gpu_joules(gpu) is None and "nvidia-ml-py is not installed" in Counters(gpu, True).missing
    millijoules = {"handle of 1": 5_000}

    class NVMLError(Exception):
        pass

    def consumption(handle: str) -> int:
        if handle not in millijoules:
            raise NVMLError("Not Supported")
        return millijoules[handle]

    pynvml = SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetTotalEnergyConsumption=consumption, __spec__="")
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda device: f"handle of {device.index}")
    counters = Counters(gpu, True)
    assert counters.names == ["the processors", "the GPU"]
    millijoules["handle of 1"] += 3_000
    powercap.use(2_000_000)
    assert counters.passed() == pytest.approx(3 + 5)
    assert Counters(torch.device("cuda", 0), True).missing


@pytest.fixture
def used(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> Powercap:
    """Each batch of a training uses energy."""
    for name, microjoules in (("training_step", STEP), ("validation_step", VALIDATION), ("test_step", TEST)):
        monkeypatch.setattr(Classifier, name, _using(getattr(Classifier, name), powercap, microjoules))
    return powercap


def _using(step: Callable[..., Any], powercap: Powercap, microjoules: int) -> Callable[..., Any]:
    def using(self: Classifier, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking:
            powercap.use(microjoules)
        return step(self, batch, batch_idx)

    return using


FIT = ["fit", "--config", "image/digits", "--model.encoder.dim", "8", "--model.encoder.depth", "1", "--experiment", "x"]
LIMITS = ["--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "2", "--trainer.limit_test_batches", "3"]


def test_the_joules_of_a_resumed_training_are_on_its_card_in_its_figures_and_in_tensorboard(
    command: Callable, used: Powercap, tmp_path: Path
) -> None:
    run = tmp_path / "runs/x/0"
    done = command(*FIT, *LIMITS, "--trainer.max_epochs", "1", "--data.batch_size", "8")
    assert done.code == 0, done.err
    of_epoch, of_prediction = 2.5 * (4 * 2 + 2 * 0.5), 2.5 * 0.25 / 8
    figures = json.loads((run / "metrics.json").read_text())
    assert figures["energy/training_joules"] == pytest.approx(of_epoch)
    assert figures["energy/joules_per_prediction"] == pytest.approx(of_prediction)

    used.use(10**9)  # in the pause
    done = command("fit", "--resume", run, "--trainer.max_epochs", "2")
    assert done.code == 0, done.err
    figures = json.loads((run / "metrics.json").read_text())
    assert figures["energy/training_joules"] == pytest.approx(2 * of_epoch)
    card = (run / "README.md").read_text()
    assert "Energy of the processors: the training took 45 J (1.25e-05 kWh), and the test 0.0781 J for each" in card
    sums = {}
    for folder in {path.parent for path in run.rglob("events.out.*")}:
        events = EventAccumulator(str(folder)).Reload()
        if "energy/joules" in events.Tags()["scalars"]:
            sums |= {scalar.step: scalar.value for scalar in events.Scalars("energy/joules")}
    assert sums == pytest.approx({3: of_epoch, 7: 2 * of_epoch})


def test_a_card_says_why_there_is_no_energy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=CPU), local_rank=0)
    meter = EnergyMeter()
    meter.setup(trainer, SimpleNamespace(), "fit")  # type: ignore[arg-type]
    assert meter.summary() == f"Energy: not available (its processors show no energy in {tmp_path})."
    assert meter.figures == {} and meter.state_dict() == {}


def test_a_sum_ends_where_a_training_goes_on_without_counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=CPU, all_gather=lambda values: values),
        local_rank=0, world_size=1, global_step=5, loggers=[],
    )  # fmt: skip
    model: Any = SimpleNamespace(device=CPU)
    meter = EnergyMeter()
    meter.setup(trainer, model, "fit")
    meter.load_state_dict({"joules": 7.0})
    assert meter.figures == {"energy/training_joules": 7.0}
    meter.on_train_start(trainer, model)
    meter.on_train_batch_end()
    meter.on_train_end(trainer, model)
    assert meter.figures == {} and meter.state_dict() == {}
