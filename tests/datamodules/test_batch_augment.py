"""Augmentation of whole batches, and batches that are finished on the device of the training."""

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from fake_gpu import DEVICE, fake_gpu
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from datamodules import DataModule, Digits, ImageFolder, Mirror, Shift
from datamodules.batch_augment import Affine, divided, draws_of
from datamodules.samples import Clips, ForTraining, LabelledTensors, Unfinished, mix

ALL = [v2.RandomHorizontalFlip(0.3), Shift(0.25), v2.RandomAffine(20.0, (0.2, 0.1), (0.8, 1.2)), Mirror()]


def pixels(number: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, (number, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# The numbers


def test_the_numbers_of_a_sample_are_hashes_of_seed_epoch_index_and_their_own_number():
    places = [(0, 0), (0, 1), (7, 49_999), (2**20 + 3, 123_456)]
    for seed in (0, 1, 2**63 - 1):
        expected = [[mix(seed, *place, number) / 2**63 for number in range(5)] for place in places]
        assert (draws_of(seed, places, 5) - torch.tensor(expected, dtype=torch.float64)).abs().max() < 2**-52


def test_the_numbers_are_uniform_and_independent():
    draws = draws_of(0, [(epoch, index) for epoch in range(100) for index in range(100)], 3)
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, 10, 0, 1)
    assert ((counts - 3000).abs() < 5 * 3000**0.5).all()
    columns = torch.cat([draws, draws.roll(1, 0), draws.roll(100, 0)], dim=1)  # and those of neighbours
    assert (torch.corrcoef(columns.T) - torch.eye(9)).abs().max() < 0.05


# The changes


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 5, 12), (2, 1, 9)])
def test_a_batch_is_shifted_as_a_cut_from_its_reflection(shape):
    batch, draws = pixels(40, *shape), draws_of(0, [(0, index) for index in range(40)], 2)
    shifted = Shift(0.25).change(batch, draws)
    height, width = shape[1:]
    down, across = (min(round(0.25 * side), side - 1) for side in (height, width))
    for image, result, (y, x) in zip(batch.numpy(), shifted.numpy(), draws.tolist(), strict=True):
        padded = np.pad(image, ((0, 0), (down, down), (across, across)), mode="reflect")
        top, left = int(y * (2 * down + 1)), int(x * (2 * across + 1))
        assert np.array_equal(result, padded[:, top : top + height, left : left + width])


@pytest.mark.parametrize(("kind", "flip"), [(v2.RandomHorizontalFlip, np.fliplr), (v2.RandomVerticalFlip, np.flipud)])
def test_a_batch_is_flipped_as_often_as_asked(kind, flip):
    batch, draws = pixels(1000, 1, 4, 3), draws_of(0, [(0, index) for index in range(1000)], 1)
    (_, (change,)) = divided([kind(0.3)])
    changed = change.change(batch, draws)
    is_flipped = [
        np.array_equal(after[0], flip(before[0])) for before, after in zip(batch, changed.numpy(), strict=True)
    ]
    assert all(flipped or torch.equal(*pair) for flipped, *pair in zip(is_flipped, batch, changed, strict=True))
    assert 250 < sum(is_flipped) < 350


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 20, 33)])
def test_a_batch_is_turned_moved_and_zoomed_as_torchvision_does_one_image_whose_edge_goes_on(shape):
    affine = v2.RandomAffine(20.0, (0.2, 0.1), (0.8, 1.2))
    batch = functional.gaussian_blur(pixels(60, *shape), [5, 5])
    draws = draws_of(0, [(0, index) for index in range(60)], 4)
    changed = Affine(affine).change(batch, draws)
    height, width = shape[1:]
    angles = []
    for image, result, (angle, x, y, zoom) in zip(batch, changed, draws.tolist(), strict=True):
        angles.append(40 * angle - 20)
        moved = [round(0.2 * width * (2 * x - 1)), round(0.1 * height * (2 * y - 1))]
        around = functional.pad(image, [width, height], padding_mode="edge")
        expected = functional.affine(around, angles[-1], moved, 0.8 + 0.4 * zoom, [0.0], fill=0)
        expected = functional.center_crop(expected, [height, width])
        assert (result != expected).float().mean() < 0.005  # the last bits decide which of two pixels is nearer
    assert min(angles) < -17 and max(angles) > 17


def test_a_rotation_of_a_batch_is_torchvisions_of_one_image_whose_edge_goes_on():
    batch, draws = functional.gaussian_blur(pixels(60, 3, 20, 33), [5, 5]), draws_of(0, [(0, n) for n in range(60)], 4)
    (_, (change,)) = divided([v2.RandomRotation((10.0, 60.0))])
    for image, result, draw in zip(batch, change.change(batch, draws), draws[:, 0].tolist(), strict=True):
        around = functional.pad(image, [60], padding_mode="edge")
        expected = functional.center_crop(functional.rotate(around, 60 - 50 * draw), [20, 33])
        assert (result != expected).float().mean() < 0.005


# Which transforms change batches


class Darker(v2.Transform):
    def forward(self, image: Tensor) -> Tensor:
        return image // 2


class ShiftOfMine(Shift):
    def forward(self, image: Tensor) -> Tensor:
        return image.flip(1)


@pytest.mark.parametrize(
    ("transforms", "number"),
    [
        (ALL, 4),
        ([Shift(), v2.RandAugment()], 0),
        ([v2.RandAugment(), Shift(), v2.RandomVerticalFlip()], 2),
        ([Darker(), ShiftOfMine(), Mirror()], 1),
        ([v2.RandomRotation(5.0)], 1),
        ([v2.RandomRotation(5.0, expand=True)], 0),
        ([v2.RandomAffine(5.0, shear=3)], 0),
        ([v2.RandomAffine(5.0, fill=7)], 0),
        ([v2.RandomAffine(5.0, interpolation=v2.InterpolationMode.BILINEAR)], 0),
        ([], 0),
    ],
)
def test_the_last_transforms_change_batches_and_the_order_stays(transforms: list, number: int):
    single, of_batches = divided(transforms)
    assert (single, len(of_batches)) == (transforms[: len(transforms) - number], number)


def test_transforms_of_samples_come_before_those_of_batches():
    batch = pixels(32, 1, 8, 8)
    samples = LabelledTensors(batch, torch.zeros(32).long())
    drawn = ForTraining(samples, [Darker(), Shift()], seed=0).__getitems__(list(range(32)))[0]
    halved = LabelledTensors(batch // 2, torch.zeros(32).long())
    assert torch.equal(drawn, ForTraining(halved, [Shift()], seed=0).__getitems__(list(range(32)))[0])


def test_sounds_are_changed_one_by_one_also_by_transforms_of_images():
    clips = Clips([torch.rand(length) for length in (40, 60)], torch.arange(2))
    inputs: Any = ForTraining(clips, [v2.RandomHorizontalFlip(1.0)], seed=0, is_deferred=True).__getitems__([0, 1])[0]
    for index, length in enumerate((40, 60)):
        assert torch.equal(inputs["waveforms"][index, :length], clips.inputs[index].flip(0))


# The draws


def epoch(data: DataModule, number: int) -> Tensor:
    loader: Any = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return torch.cat([inputs for inputs, _ in loader])


def digits(**options: Any) -> Digits:
    data = Digits(augment=copy.deepcopy(ALL), **options)
    data.setup()
    return data


def test_what_a_batch_draws_is_a_function_of_seed_epoch_and_index():
    data = digits()
    first = epoch(data, 0)
    torch.rand(100)
    assert torch.equal(epoch(data, 0), first)
    assert torch.equal(epoch(digits(num_workers=2), 0), first)
    assert torch.equal(epoch(digits(batch_size=17), 0), first)
    assert not torch.equal(epoch(data, 1).sort(0)[0], first.sort(0)[0])
    assert not torch.equal(epoch(digits(seed=1), 0).sort(0)[0], first.sort(0)[0])


def test_batches_that_are_augmented_leave_the_global_generator_alone():
    data = digits()
    before = torch.get_rng_state()
    epoch(data, 0)
    assert torch.equal(torch.get_rng_state(), before)


# Batches that the device finishes


class Recorder(pl.LightningModule):
    """Keeps the training batches that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        self.seen.append((inputs.clone(), labels.clone()))
        return self.weight

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 25:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "25.ckpt"))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch[0], Tensor) and len(batch) == 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def as_on_a_gpu(data: DataModule, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> list[Any]:
    """Let the data module take the CPU for a GPU. Returns a list of the training loader's batches."""
    monkeypatch.setattr(data, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(data, "_free_bytes", lambda _: free_bytes)
    batches: list[Any] = []
    transfer = data.transfer_batch_to_device

    def noted(batch: Any, *arguments: Any) -> Any:
        batches.append(batch)
        return transfer(batch, *arguments)

    monkeypatch.setattr(data, "transfer_batch_to_device", noted)
    return batches


def fitted(data: DataModule, folder: Path, epochs: int = 2, ckpt_path: str | None = None) -> Recorder:
    model = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, default_root_dir=folder,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


def are_equal(first: Sequence[tuple[Tensor, Tensor]], second: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(*pair) for batches in zip(first, second, strict=True) for pair in zip(*batches, strict=True)
    )


@pytest.mark.parametrize("augment", [[], ALL, [v2.RandomHorizontalFlip(), v2.RandAugment(2), Shift()]])
@pytest.mark.parametrize("free_bytes", [2**30, 0])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "balanced": True}])
def test_batches_that_a_device_finishes_are_those_of_the_loader_bit_for_bit(
    augment, free_bytes, options, tmp_path, monkeypatch, capsys
):
    plain = fitted(Digits(augment=copy.deepcopy(augment), **options), tmp_path)
    capsys.readouterr()
    data = Digits(augment=copy.deepcopy(augment), **options)
    batches = as_on_a_gpu(data, monkeypatch, free_bytes)
    assert are_equal(fitted(data, tmp_path).seen, plain.seen)
    is_on_device = bool(free_bytes) and not any(isinstance(transform, v2.RandAugment) for transform in augment)
    of_training = [batch for batch in batches if isinstance(batch, Unfinished)]
    assert len(of_training) == (len(plain.seen) if augment or is_on_device else 0)
    assert all((batch.inputs.ndim == 1) is is_on_device for batch in of_training)  # indices alone
    line = "data: the training set (0.1 MB) stays on the GPU, where its batches are made"
    assert (line in capsys.readouterr().err) is is_on_device


@pytest.mark.parametrize("free_bytes", [2**30, 0])
@pytest.mark.parametrize("before", ["as on a GPU", "on a CPU"])
def test_a_resumed_training_gets_the_batches_that_were_left_from_the_device_too(
    before, free_bytes, tmp_path, monkeypatch
):
    whole, rest = digits(), digits()
    if before == "as on a GPU":
        as_on_a_gpu(whole, monkeypatch, free_bytes)
    seen = fitted(whole, tmp_path).seen
    as_on_a_gpu(rest, monkeypatch, free_bytes)
    resumed = fitted(rest, tmp_path / "resumed", ckpt_path=str(tmp_path / "25.ckpt"))
    assert len(seen) > 30 and are_equal(resumed.seen, seen[25:])


def test_a_training_set_above_a_tenth_of_the_free_memory_stays_with_the_loader(tmp_path, monkeypatch):
    data = Digits()
    data.setup()
    size = data.train_set.inputs.nbytes  # type: ignore[union-attr]
    for free_bytes, is_there in ((10 * size, True), (10 * size - 10, False)):
        as_on_a_gpu(data, monkeypatch, free_bytes)
        assert data.train_dataloader().dataset.is_on_device is is_there  # type: ignore[attr-defined]


def test_images_in_files_are_finished_on_the_device_and_never_held_there(images, tmp_path, monkeypatch):
    def data() -> ImageFolder:
        return ImageFolder(str(images), in_memory=False, augment=[Shift()], batch_size=4)

    plain, other = fitted(data(), tmp_path), data()
    batches = as_on_a_gpu(other, monkeypatch, 2**40)
    assert are_equal(fitted(other, tmp_path).seen, plain.seen)
    assert {batch.inputs.shape[1:] for batch in batches if isinstance(batch, Unfinished)} == {(3, 8, 8)}


def test_no_change_of_a_batch_waits_for_the_gpu_or_leaves_it():
    with fake_gpu() as waits:
        training = ForTraining(LabelledTensors(torch.zeros(9, 3, 8, 8).byte(), torch.zeros(9).long()), ALL, seed=0)
        training.is_on_device = True
        indices, labels = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
        batch = Unfinished(indices, labels, torch.zeros(4, 8, dtype=torch.float64, device=DEVICE))
        training.finish(batch)  # the first batch brings the images there
        waits.found.clear()
        inputs, _ = training.finish(batch)
        assert not waits.found and (inputs.device, inputs.shape) == (DEVICE, (4, 3, 8, 8))


def test_the_copy_on_the_device_is_given_back_after_a_training(tmp_path, monkeypatch):
    data = Digits()
    as_on_a_gpu(data, monkeypatch, 2**30)
    fitted(data, tmp_path)
    assert data._training is None


def test_after_a_training_on_a_gpu_the_loader_makes_whole_batches(tmp_path):
    data = Digits(augment=[v2.RandomHorizontalFlip()])
    fitted(data, tmp_path, epochs=1)
    gpu = SimpleNamespace(root_device=torch.device("cuda"), distributed_sampler_kwargs=None)
    data.trainer = SimpleNamespace(state=data.trainer.state, strategy=gpu)  # type: ignore[union-attr, assignment]
    loader = data.train_dataloader()
    batch = loader.dataset.__getitems__([0, 1])  # type: ignore[attr-defined]
    assert not isinstance(batch, Unfinished)


def test_the_hook_of_a_model_gets_batches_that_are_finished(tmp_path, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(
        Recorder, "on_after_batch_transfer", lambda self, batch, number: seen.append(batch) or batch, raising=False
    )
    data = Digits(augment=[v2.RandomHorizontalFlip()])
    as_on_a_gpu(data, monkeypatch, 2**30)
    fitted(data, tmp_path, epochs=1)
    assert seen and not any(isinstance(batch, Unfinished) for batch in seen)
