"""Nothing in a training step makes the host wait for a GPU, tested on a GPU that is not there (tests/fake_gpu.py)."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from encoder_kinds import KINDS
from fake_gpu import DEVICE, Waits, fake_gpu, move
from jsonargparse import Namespace
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from datamodules import Digits
from longseq import ImageEncoder, Linformer, Verma
from longseq.attention import LSTM, Linear, Mechanism
from longseq.attention.examples import every_mechanism
from longseq.cli.runs.callbacks import BestCheckpoint, RunRecord, callbacks_of_training
from longseq.encoders import Encoder, WaveformEncoder
from longseq.tasks import Masked, MultiLabel, SingleLabel, Task
from longseq.training import Classifier
from longseq.training.board.tensorboard import InputSamples


def step(encoder: Encoder, inputs: Any, device: torch.device) -> None:
    """Forward pass, loss, backward pass and AdamW."""
    encoder._is_measured = True
    model = Classifier(encoder, 3)
    model = move(model) if device == DEVICE else model.to(device)
    inputs = tree_map(lambda part: torch.empty(part.shape, dtype=part.dtype, device=device), inputs)
    labels = torch.zeros(
        len(inputs["lengths"] if isinstance(inputs, dict) else inputs), dtype=torch.long, device=device
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model.task.loss(model(inputs), labels, model.loss_weights, 0.1).backward()
    optimizer.step()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


OF_ENCODERS = [
    pytest.param(kind, number, Linformer(7), id=f"{kind.__name__} {number}")
    for kind in KINDS
    for number in range(len(kind.examples(Linformer(7))))
]
# torch's LSTM asks the driver of a GPU before it looks at its tensors; projections are called alike in both mechanisms
OF_MECHANISMS = [
    pytest.param(WaveformEncoder, 0, mechanism, id=f"{mechanism}")
    for mechanism in every_mechanism()
    if not isinstance(mechanism, LSTM)
    and (not isinstance(mechanism, Verma) or isinstance(mechanism.projection, Linear))
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "number", "mechanism"), [*OF_ENCODERS, *OF_MECHANISMS])
def test_a_step_keeps_all_tensors_on_the_gpu_and_waits_for_none(kind: Any, number: int, mechanism: Mechanism) -> None:
    encoder, inputs = kind.examples(mechanism)[number]
    with fake_gpu() as waits:
        step(encoder, inputs, DEVICE)
    assert waits.found == []


@pytest.mark.parametrize(("kind", "number", "mechanism"), OF_ENCODERS)
def test_a_step_runs_on_the_meta_device(kind: Any, number: int, mechanism: Mechanism) -> None:
    step(*kind.examples(mechanism)[number], torch.device("meta"))


class NoDevice(CPUAccelerator):
    """Sets nothing up."""

    def setup_device(self, device: torch.device) -> None:
        pass


class OnFakeGpu(SingleDeviceStrategy):
    """One device, which is not there; the module is moved to it before."""

    def __init__(self) -> None:
        super().__init__(DEVICE, accelerator=NoDevice())

    def model_to_device(self) -> None:
        pass

    def teardown(self) -> None:
        pass


class Random(torch.utils.data.Dataset):
    """Images of three classes, one or any number for each."""

    def __init__(self, several: bool) -> None:
        self.label = torch.tensor([0, 1, 1]) if several else torch.tensor(1)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 4, 4, dtype=torch.uint8), self.label


class Enough(Exception):  # noqa: N818 (it is no error)
    """The steps are done. The end of an epoch would save tensors that have no numbers."""


class Counter(pl.Callback):
    """What the host has waited for in each step."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits
        self.of_steps: list[list[str]] = []

    def on_train_batch_start(self, *_: Any) -> None:  # what came before belongs to the end of the step before
        if self.of_steps:
            self.of_steps[-1] += self.waits.found
        self.of_steps.append([])
        self.waits.found.clear()
        if len(self.of_steps) == 7:
            raise Enough


@pytest.mark.parametrize("task", [SingleLabel(), MultiLabel(), Masked()], ids=lambda task: type(task).__name__)
def test_a_training_waits_for_the_gpu_at_logged_steps_alone(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all callbacks of a training from the command line; batches come to the device, which is no wait for it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 0)
    best, settings = (
        BestCheckpoint(tmp_path, task),
        Namespace(peak_flops=None, checkpoint_minutes=10.0, minutes=None, data=Namespace()),
    )
    settings.trainer = Namespace(logger=None)
    with fake_gpu() as waits:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.note("synchronize"))
        counter = Counter(waits)
        callbacks = callbacks_of_training(best, RunRecord(tmp_path), settings, True, "fit", 0.0)
        callbacks = [callback for callback in callbacks if not isinstance(callback, InputSamples)]  # it draws pictures
        trainer = pl.Trainer(
            strategy=OnFakeGpu(), logger=TensorBoardLogger(tmp_path), callbacks=[*callbacks, counter], max_epochs=2,
            log_every_n_steps=3, gradient_clip_val=1.0, limit_val_batches=0, enable_model_summary=False,
        )  # fmt: skip
        encoder = ImageEncoder((1, 4, 4), Linformer(4), dim=8, depth=1, heads=1)
        encoder._is_measured = True
        model = move(Classifier(encoder, 3, task=task))
        with pytest.raises(Enough):
            trainer.fit(model, DataLoader(Random(isinstance(task, MultiLabel)), batch_size=4))
    quiet = [found for number, found in enumerate(counter.of_steps) if number in (1, 3, 4)]
    assert [what for found in quiet for what in found if "apply_func" not in what] == []
    assert any("divergence.py" in what for what in counter.of_steps[2]), "a logged step asks for the loss"


class Arrived(OnFakeGpu):
    """A device whose tensors have no numbers; a training ends where the model would be moved to it."""

    def __init__(self) -> None:
        SingleDeviceStrategy.__init__(self, torch.device("meta"), accelerator=NoDevice())

    def model_to_device(self) -> None:
        raise Enough


def test_the_training_set_is_measured_before_the_model_comes_to_its_device(tmp_path: Path) -> None:
    """Lightning's setup shows the device as the model's before the model is there."""
    trainer = pl.Trainer(strategy=Arrived(), logger=False, default_root_dir=tmp_path, enable_checkpointing=False)
    encoder = ImageEncoder((1, 8, 8), Linformer(4, projection=Linear("singular")), dim=8, depth=1, heads=1)
    with pytest.raises(Enough):
        trainer.fit(Classifier(encoder, 10), Digits())
    assert encoder._has_statistics()
