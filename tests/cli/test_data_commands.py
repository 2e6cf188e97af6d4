"""The commands stats, check and preview, and data flags that reach a training."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from longseq.cli.runs.resuming import without_appended

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
VOWELS = str(ROOT / "configs/audio/vowels.yaml")
FEW = ["--data.num_train", "120", "--data.num_test", "60"]


def test_stats_prints_what_there_is_to_know(command):
    out = command("stats", "--config", DIGITS).out
    assert "train samples: 1295\nval samples: 143\ntest samples: 359\nclasses: 10\n" in out
    assert "shape: [1, 8, 8]" in out
    out = command("stats", "--data", "Vowels", *FEW).out
    assert "sample rate (Hz): 8000" in out
    assert "seconds, shortest / median / longest: [0.4, 0.4, 0.4]" in out


@pytest.mark.parametrize("name", ["stats", "check", "preview"])
def test_a_command_of_data_reads_no_other_part_of_a_configuration(name, command, tmp_path):
    for number in range(40):
        place = tmp_path / "d" / ("cats" if number % 2 else "dogs")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(place / f"{number}.png")
    done = command(name, "--config", str(ROOT / "configs/image/folder.yaml"), "--data.root", tmp_path / "d")
    assert done.code == 0, done.err
    nothing = command(name, "--config", DIGITS, "--data.seed", "null")
    assert (nothing.code, nothing.error) == (2, "error: data.seed: got null; give a value, or leave it out")


def test_stats_of_mnist_are_the_known_ones(command, real_data):
    out = command("stats", "--data", "MNIST", "--data.root", real_data).out
    assert "mean of each channel: [0.1307]" in out
    assert "deviation of each channel: [0.3081]" in out


def test_check_says_that_all_is_well(command):
    done = command("check", "--data", "Digits")
    assert (done.code, done.out) == (0, "all files can be read: 1295 train, 143 val, 359 test samples of 10 classes\n")


@pytest.mark.parametrize("arguments", [["stats"], ["check", "--data.root", "x"], ["preview"]])
def test_a_command_of_data_without_data_is_one_line(arguments, command):
    done = command(*arguments)
    assert done.code == 2
    assert done.error.startswith("error: ")


def test_preview_draws_what_training_sees(command, tmp_path):
    assert command("preview", "--config", DIGITS, "--num_samples", "3").out == "inputs drawn: 3, in preview.png\n"
    plain = np.array(Image.open(tmp_path / "preview.png").convert("L"))
    assert plain.std() > 20  # the preview holds both white and black
    command("preview", "--config", DIGITS, "--num_samples", "3", "--data.augment+=RandomErasing", "--out", "erased.png")
    command("preview", "--config", DIGITS, "--num_samples", "1", "--out", "again.png")
    command("preview", "--config", DIGITS, "--num_samples", "3", "--out", "again.png")
    again, erased = (np.array(Image.open(tmp_path / name).convert("L")) for name in ("again.png", "erased.png"))
    assert np.array_equal(again, plain) and not np.array_equal(erased, plain)
    sound = ["--model.encoder.spec_augment", "SpecAugment", "--data.augment+=TimeShift", "--model.mix", "MixUp"]
    assert command("preview", "--config", VOWELS, *FEW, *sound, "--out", "sound.png").code == 0
    assert Image.open(tmp_path / "sound.png").size[0] > 500
    Image.new("L", (8, 8), 130).save(tmp_path / "mine.png")
    mine = (tmp_path / "mine.png").read_bytes()
    for name, said in (
        ("mine.png", "must be a new file, or one that longseq"),
        ("a.jpg", "a.jpg: not a known format; "),
    ):
        done = command("preview", "--config", DIGITS, "--out", name)
        assert (done.code, done.error.startswith(f"error: out: {said}")) == (2, True), done.err
    assert (tmp_path / "mine.png").read_bytes() == mine
    assert (
        "out: no/such/folder.png cannot be written"
        in command("preview", "--config", DIGITS, "--out", "no/such/folder.png").err
    )


def test_a_preview_prints_the_names_that_no_font_can_write(command, tmp_path):
    for name in ("cat", "\U0010fff0"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng([number, len(name)]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number}.png")
    data = ["--data.root", tmp_path / "pictures", "--model.encoder.dim", "8", "--model.encoder.depth", "1"]
    done = command("preview", "--config", "image/folder", *data, "--num_samples", "12")
    assert done.code == 0 and "class 1: \U0010fff0\n" in done.out and "class 0" not in done.out, done.err
    assert "Glyph" not in done.err


def test_augmentation_mixtures_and_weights_are_kept_by_the_checkpoint(command, tmp_path):
    mixed = ["--data.augment+=RandomErasing", "--model.mix", "CutMix", "--model.mix.alpha", "0.7"]
    flags = [*mixed, "--data.balanced", "true", "--model.class_weights", "balanced"]
    short = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    done = command("fit", "--config", DIGITS, *flags, *short)
    assert done.code == 0, done.err
    checkpoint = torch.load(tmp_path / "runs/digits/0/last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["mix"]["init_args"] == {"alpha": 0.7}
    assert checkpoint["hyper_parameters"]["class_weights"] == "balanced"
    assert checkpoint["data"]["init_args"]["augment"][0]["class_path"].endswith("RandomErasing")
    assert command("test", "--ckpt_path", tmp_path / "runs/digits/0/last.ckpt").code == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.augment+=RandomFlip"], "data.augment"),
        (["--model.mix", "MixUp", "--model.mix.alpha", "0"], "model.mix.alpha: must be in 0.001..1000, got 0.0"),
        (["--model.class_weights", "[1, 2]"], "model.class_weights: must be 10 positive numbers or balanced"),
        (
            ["--data.augment+=RandomCrop", "--data.augment.size", "4"],
            "data.augment: makes [1, 4, 4] of an input of [1, 8, 8]",
        ),
    ],
)
def test_a_flag_that_cannot_be_is_one_line(flags, said, command):
    done = command("fit", "--config", DIGITS, *flags)
    assert done.code == (3 if "makes" in said else 2)
    assert said in done.error


def test_what_a_run_appended_is_not_appended_again_when_it_goes_on(tmp_path):
    (tmp_path / "lists.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"augment": []}}}))
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump({"data": {"class_path": "Digits"}}))
    appended = ["--data.augment+=A", "--model.learning_rate", "0.1", "--data.augment+", "B"]
    plain = ["--config", str(tmp_path / "plain.yaml"), *appended]
    assert without_appended(plain) == [*plain[:2], "--model.learning_rate", "0.1"]
    lists = ["--config", str(tmp_path / "lists.yaml"), *appended]
    assert without_appended(lists) == lists
