"""Commands on bags of features: from files to a trained model and its predictions."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from small_sets import bag

from datamodules import FeatureFolder
from longseq.attention import Verma
from longseq.encoders import FeatureEncoder
from longseq.training import Classifier
from longseq.training.generators import GeneratorStates

FIT = ["fit", "--data", "FeatureFolder", "--model.encoder", "FeatureEncoder", "--model.encoder.dim", "8",
       "--model.encoder.depth", "1", "--model.encoder.heads", "1", "--model.encoder.attention", "Verma",
       "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]  # fmt: skip


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    """Two classes of twelve bags of 3 to 26 tiles."""
    for number in range(24):
        bag(tmp_path / "data" / ("normal", "tumor")[number % 2] / f"{number:02}.h5", 3 + number)
    return tmp_path / "data"


@pytest.fixture
def model(slides: Path, command: Callable) -> str:
    done = command(*FIT, "--experiment", "slides", "--data.root", slides, "--trainer.max_epochs", "1")
    assert done.code == 0, done.err
    return "runs/slides/0/best.ckpt"


def _answers(text: str) -> dict[str, str]:
    return {Path(line.split("\t")[0]).name: line for line in text.strip().split("\n")}


def test_check_prints_how_many_bags_have_how_many_labels(slides: Path, command: Callable) -> None:
    paths = sorted(path.relative_to(slides).as_posix() for path in slides.glob("*/*.h5"))
    rows = [f"{path},{('a', 'b', 'a;b')[number % 3]}" for number, path in enumerate(paths)]
    (slides / "t.csv").write_text("\n".join(["path,label", *rows]))
    flags = ["--data.root", slides, "--data.table", "t.csv", "--data.labels_separator", ";"]
    done = command("check", "--data", "FeatureFolder", *flags)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "labels per bag: 1: 16, 2: 8"


def test_a_model_of_bags_predicts_when_the_folder_of_its_training_is_gone(model, slides, command, tmp_path) -> None:
    slides.rename(tmp_path / "elsewhere")
    done = command("predict", "--ckpt_path", model, "--input", tmp_path / "elsewhere/normal")
    assert done.code == 0, done.err
    assert [*_answers(done.out)] == [f"{number:02}.h5" for number in range(0, 24, 2)]
    bag(tmp_path / "large.h5", 500)  # larger than any bag of the training
    assert command("predict", "--ckpt_path", model, "--input", tmp_path / "large.h5").code == 0


@pytest.mark.parametrize(
    ("features", "coordinates", "said"),
    [(5, True, "5 features of a token, not 6; take"), (6, False, "no coordinates of its tokens; add them as coords")],
)
def test_a_bag_that_does_not_fit_the_model_is_refused(model, features, coordinates, said, command, tmp_path) -> None:
    bag(tmp_path / "x.h5", 7, features, coordinates)
    done = command("predict", "--ckpt_path", model, "--input", tmp_path / "x.h5")
    assert done.code == 3 and done.err.startswith(f"error: {tmp_path}/x.h5: {said}") and done.err.count("\n") == 1


def test_a_model_of_tokens_in_time_answers_for_windows(command, tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / "data" / ("day", "night")[number % 2] / f"{number}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, features=np.random.default_rng(number).normal(size=(9, 4)), times=3.0 * np.arange(9))
    done = command(*FIT, "--experiment", "nights", "--data.root", tmp_path / "data", "--trainer.max_epochs", "1")
    assert done.code == 0, done.err
    predict = ["predict", "--ckpt_path", "runs/nights/0/best.ckpt", "--input", tmp_path / "data/day/0.npz"]
    rows = [line.split("\t") for line in command(*predict, "--window", "9").out.strip().split("\n")]
    assert len(rows) == 3


def test_check_lists_broken_bags_and_shard_refuses(slides, command, tmp_path) -> None:
    check = ["--data", "FeatureFolder", "--data.root", slides]
    assert "all files can be read: 18 train, 2 val, 4 test" in command("check", *check).out
    done = command("shard", *check, "--out", tmp_path / "shards")
    assert done.code == 3 and "not written as shards" in done.err
    bag(slides / "tumor/01.h5", 0)
    done = command("check", *check)
    assert done.code == 3 and "tumor/01.h5: an empty bag" in done.out


def _trained(slides: Path, folder: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
    """The weights after 25 steps in batches of at most 40 tokens; a checkpoint of each step is in the folder."""
    pl.seed_everything(0 if resume is None else 1)
    encoder = FeatureEncoder(6, 26, Verma(k=None), num_coordinates=2, dim=8, depth=1, heads=1, dropout=0.1)
    model = Classifier(encoder, 2)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=25, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=1, callbacks=[saving, GeneratorStates()],
    )  # fmt: skip
    data = FeatureFolder(str(slides), max_tokens=40, batch_size=4)
    trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    assert 8 < trainer.num_training_batches < 16  # bags of up to 26 tiles in batches of up to 40
    return model.state_dict()


@pytest.mark.parametrize("how", ["within an epoch", "at its end"])
def test_a_training_in_batches_of_few_tokens_is_resumed_bit_for_bit(slides: Path, how: str, tmp_path: Path) -> None:
    whole = _trained(slides, tmp_path / "whole")
    data = FeatureFolder(str(slides), max_tokens=40, batch_size=4)
    data.setup()
    stop = 6 if how == "within an epoch" else len(data.train_dataloader())
    resumed = _trained(slides, tmp_path / "resumed", tmp_path / f"whole/step={stop}.ckpt")
    assert all(torch.equal(weight, whole[name]) for name, weight in resumed.items())


def test_the_classes_of_bags_are_not_balanced_in_batches_of_few_tokens(slides, command) -> None:
    done = command(*FIT, "--data.root", slides, "--data.balanced", "true")
    assert done.code == 2 and "data.max_tokens: must be null with balanced" in done.err
    done = command(*FIT, "--data.root", slides, "--data.balanced", "true", "--data.max_tokens", "null",
                   "--trainer.max_steps", "2")  # fmt: skip
    assert done.code == 0, done.err


def test_splits_are_written_with_the_patient_of_each_slide(slides, command, tmp_path) -> None:
    table = tmp_path / "slides.csv"
    paths = sorted(slides.glob("*/*.h5"))
    rows = [(path.relative_to(slides), path.parent.name, int(path.stem) // 4) for path in paths]
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "patient"), *rows])
    done = command(*FIT, "--experiment", "folds", "--data.root", slides, "--data.table", table, "--data.groups",
                   "patient", "--folds", "3", "--trainer.max_steps", "1")  # fmt: skip
    assert done.code == 0, done.err
    written = sorted(Path("runs/folds").glob("*/splits.csv"))
    assert len(written) == 3
    for path in written:
        with open(path, newline="") as file:
            splits = {(row["patient"], row["split"]) for row in csv.DictReader(file)}
        assert len(splits) == 6
