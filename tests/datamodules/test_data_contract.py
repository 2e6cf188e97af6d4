"""What every data module promises, and the split that they share."""

import copy
import inspect

import pytest
import pytorch_lightning as pl
import torch
from small_sets import SMALL, noise, picture
from torch import nn
from torch.utils.data import DistributedSampler

import datamodules
from datamodules import FSDD, MNIST, DataError, Digits, Vowels
from datamodules.base import hold_out
from longseq.arguments import arguments_of
from longseq.contract.data import PROMISES
from longseq.contract.promise import Promise

EVERY = pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.__name__)


@pytest.fixture
def data(kind, tmp_path, monkeypatch):
    """A small data set of this kind; its setup has not run yet."""
    return SMALL[kind](tmp_path, monkeypatch)


def test_every_data_set_that_is_exported_has_a_small_one_and_is_tried():
    exported = [getattr(datamodules, name) for name in datamodules.__all__]
    kinds = {kind for kind in exported if issubclass(kind, datamodules.DataModule) and not inspect.isabstract(kind)}
    assert kinds == set(SMALL), "add a function to small_sets.py"


@EVERY
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.test.__name__)
def test_every_data_module_keeps_every_promise(kind, data, promise: Promise):
    promise(data)


@EVERY
def test_inputs_are_waveforms_or_of_the_type_and_shape_that_the_module_says_and_it_has_the_common_arguments(kind, data):
    assert {"batch_size", "num_workers", "val_fraction", "seed", "balanced", "augment"} <= set(arguments_of(data))
    data.setup()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for inputs, _ in loader:
            spec = data.inputs
            assert isinstance(inputs, dict) or (inputs.dtype, inputs.shape[1:]) == (spec.dtype, spec.shape)
            assert spec.kind != "images" or (spec.dtype, spec.shape) == (torch.uint8, data.shape)


@EVERY
def test_a_foreign_file_is_read_as_an_input_of_the_same_kind(kind, data, tmp_path):
    data.setup()
    ours = data.train_set.sample(0)
    foreign = tmp_path / "foreign"
    if ".wav" in data.predict_suffixes:
        noise(foreign / "x.wav", 22_050, 0.1)
        assert data.read(str(foreign / "x.wav")).shape == (int(0.1 * data.sample_rate_hz),)
    elif data.inputs.kind != "images":
        pytest.skip("no other program writes its files")
    else:
        picture(foreign / "x.wav.png", 50)
        assert data.read(str(foreign / "x.wav.png")).shape == data.shape
    (read,) = map(data.read, map(str, foreign.iterdir()))
    assert read.dtype == ours.dtype


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Digits(batch_size=0), "batch_size"),
        (lambda: Digits(num_workers=-1), "num_workers"),
        (lambda: MNIST("nowhere", val_fraction=0.0), "val_fraction"),
        (lambda: MNIST("nowhere", val_fraction=float("nan")), "val_fraction"),
        (lambda: FSDD("nowhere", val_fraction=1.0), "val_fraction"),
        (lambda: Digits(seed=-1), "seed"),
        (lambda: Digits(size=0), "size"),
        (lambda: FSDD("nowhere", seconds=0.0), "seconds"),
        (lambda: FSDD("nowhere", seconds=float("inf")), "seconds"),
        (lambda: Vowels(seconds=0.01), "seconds"),
        (lambda: Vowels(sample_rate_hz=0), "sample_rate_hz"),
        (lambda: Vowels(num_train=100), "num_train"),
        (lambda: Vowels(num_test=0), "num_test"),
    ],
)
def test_a_bad_argument_is_refused_by_name_with_value_and_remedy(make, name):
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got .*; .+") as error:
        make()
    assert "\n" not in str(error.value)


def test_workers_deliver_the_same_batches_as_none():
    def epoch(num_workers: int) -> list[torch.Tensor]:
        data = Digits(num_workers=num_workers)
        data.setup()
        return [tensor for batch in data.train_dataloader() for tensor in batch]

    assert all(torch.equal(a, b) for a, b in zip(epoch(0), epoch(1), strict=True))


class _Counts(pl.LightningModule):
    """Records the batches that it receives and learns nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch):
        self.sampler = self.trainer.train_dataloader.sampler
        self.seen.append(batch)
        return self.weight * 1

    def predict_step(self, batch):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


QUIET = dict(
    accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip


def test_whole_batches_survive_the_distributed_sampler_that_lightning_puts_in():
    model, data = _Counts(), Digits(batch_size=100)
    pl.Trainer(max_epochs=1, strategy="ddp", **QUIET).fit(model, datamodule=data)
    torch.distributed.destroy_process_group()
    assert isinstance(model.sampler, DistributedSampler)
    assert [len(labels) for _, labels in model.seen] == [100] * 12 + [95]
    assert torch.equal(torch.cat([labels for _, labels in model.seen]).sort()[0], data.train_set.labels.sort()[0])


def test_predicting_reads_foreign_files_in_order_and_needs_no_data_of_its_own(tmp_path):
    from PIL import Image

    data = MNIST(str(tmp_path / "absent"), download=True, batch_size=2)
    for grey in (10, 200, 90):
        Image.new("L", (40, 30), grey).save(tmp_path / f"{grey}.png")
        data.predict_parts.append((str(tmp_path / f"{grey}.png"), 0.0, None))
    batches = pl.Trainer(**QUIET).predict(_Counts(), datamodule=data)
    assert [tuple(batch.shape) for batch in batches] == [(2, 1, 28, 28), (1, 1, 28, 28)]
    assert torch.cat(batches)[:, 0, 0, 0].tolist() == [10, 200, 90]


def test_predict_parts_are_not_shared_between_modules():
    one, other = Digits(), Digits()
    one.predict_parts.append(("a.png", 0.0, None))
    assert other.predict_parts == []


def test_hold_out_takes_the_same_share_of_every_class_and_splits_without_overlap():
    labels = torch.tensor([0] * 100 + [1] * 50 + [2] * 10 + [3] * 2 + [4])[torch.randperm(163)]
    kept, held = hold_out(labels, 0.2, seed=0)
    assert labels[held].bincount(minlength=5).tolist() == [20, 10, 2, 1, 0]
    assert sorted(torch.cat([kept, held]).tolist()) == list(range(163))


@pytest.mark.parametrize("num_classes", [4, 30])
def test_hold_out_takes_the_same_share_of_every_class_where_samples_have_several(num_classes: int):
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(400, num_classes, generator=generator) < torch.linspace(0.5, 0.01, num_classes)).long()
    assert (labels.sum(1) > 1).any() and labels.sum(0).min() >= 2
    assert num_classes < 30 or len(labels.unique(dim=0)) > 390  # nearly every sample has a set of its own
    kept, held = hold_out(labels, 0.2, seed=0)
    assert sorted(torch.cat([kept, held]).tolist()) == list(range(400))
    assert 60 <= len(held) <= 100
    of_class, of_held = labels.sum(0), labels[held].sum(0)
    assert (of_held / of_class - 0.2).abs()[of_class >= 30].max() < 0.1
    assert of_held.min() >= 1 and (of_class - of_held).min() >= 1


def test_hold_out_depends_on_the_seed_alone():
    labels = torch.arange(10).repeat(30)
    state = copy.copy(torch.get_rng_state())
    first = hold_out(labels, 0.1, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert all(torch.equal(a, b) for a, b in zip(first, hold_out(labels, 0.1, seed=3), strict=True))
    assert not torch.equal(first[1], hold_out(labels, 0.1, seed=4)[1])


def test_a_data_error_ends_a_command_with_exit_code_3():
    assert DataError("x: y; z").exit_code == 3
