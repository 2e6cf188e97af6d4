"""The commands as a user types them; every command runs in its own process."""

import csv
import json
import re
import warnings
from pathlib import Path

import forked
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import longseq
from datamodules import ImageFolder
from longseq.attention import Linformer, Mechanism, NoAttention, Softmax, Verma
from longseq.attention.examples import exported
from longseq.training import Classifier

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
VOWELS = str(ROOT / "configs/audio/vowels.yaml")
SMALL = ["--model.encoder.dim", "16", "--model.encoder.depth", "2"]
TINY = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.enable_progress_bar", "false"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one short run on the digits."""
    folder = tmp_path_factory.mktemp("digits")
    command = [ROOT / "train.py", "fit", "--config", DIGITS, *SMALL, "--trainer.max_epochs", "2"]
    forked.run(*command, cwd=folder).check_returncode()
    return folder / "runs/digits/0"


def figures(stdout: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w+ \w+): +([\d.]+)$", stdout, re.MULTILINE)}


def test_fit_ends_with_the_test_of_the_best_checkpoint(train_py, tmp_path: Path) -> None:
    stdout = train_py("fit", "--config", DIGITS, *SMALL, "--trainer.max_epochs", "3").stdout
    run = tmp_path / "runs/digits/0"
    assert "\ncheckpoint:    runs/digits/0/best.ckpt\nlogs:          runs/digits/0\n" in stdout
    metrics = json.loads((run / "metrics.json").read_text())
    assert figures(stdout)["test accuracy"] == pytest.approx(metrics["test/accuracy"], abs=1e-4)

    again = train_py("test", "--ckpt_path", str(run / "best.ckpt")).stdout  # test needs only the checkpoint
    assert figures(again)["test accuracy"] == pytest.approx(metrics["test/accuracy"], abs=1e-4)
    assert figures(again)["test f1"] == pytest.approx(metrics["test/f1"], abs=1e-4)
    validated = train_py("validate", "--ckpt_path", str(run / "best.ckpt")).stdout
    assert figures(validated)["val accuracy"] == pytest.approx(metrics["val/accuracy"], abs=1e-4)


def test_the_same_command_twice_makes_two_runs(command, tmp_path: Path) -> None:
    for _ in range(2):
        command("fit", "--config", DIGITS, *TINY, "--trainer.max_steps", "2", "--trainer.limit_val_batches", "1")
    assert {folder.name for folder in (tmp_path / "runs/digits").iterdir()} == {"0", "1"}


def test_a_checkpoint_of_the_command_line_holds_plain_types(run: Path) -> None:
    checkpoint = torch.load(run / "best.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["encoder"]["init_args"]["attention"]["init_args"]["k"] == 16
    assert checkpoint["data"]["class_path"].endswith("Digits")


def test_another_mechanism_keeps_the_k_of_the_config(command, tmp_path: Path) -> None:
    command(
        "fit", "--config", DIGITS, "--model.encoder.attention", "Verma", "--trainer.max_steps", "1",
        "--trainer.limit_val_batches", "1", *TINY,
    )  # fmt: skip
    checkpoint = torch.load(tmp_path / "runs/digits/0/last.ckpt", weights_only=True)
    attention = checkpoint["hyper_parameters"]["encoder"]["init_args"]["attention"]
    assert attention["class_path"].endswith("Verma")
    assert attention["init_args"]["k"] == 16


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in exported(Mechanism) if kind not in (Softmax, Linformer, Verma)])
def test_every_mechanism_is_trained_and_tested_by_its_name(kind: type[Mechanism], command, tmp_path: Path) -> None:
    """Those left out are trained, and tested with a command of their own, in other tests."""
    few = ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1", "--trainer.max_steps", "1"]
    done = command("fit", "--config", DIGITS, *TINY, *few, "--model.encoder.attention", kind.__name__)
    assert done.code == 0, done.err
    assert "test accuracy" in figures(done.out)
    checkpoint = tmp_path / "runs/digits/0/last.ckpt"
    assert type(Classifier.load_from_checkpoint(checkpoint).encoder.attention) is kind


@pytest.mark.parametrize("place", ["flag", "configuration"])
def test_no_attention_is_none_in_flags_and_configurations(command, place: str, tmp_path: Path) -> None:
    """It is a class in the checkpoint, which resumes; leaving the attention out is still a mistake."""
    few = ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1", "--trainer.max_steps", "1"]
    config = Path(DIGITS).read_text().split("      attention:")
    for attention in ("", "      attention: None\n"):
        (tmp_path / "digits.yaml").write_text(config[0] + attention + config[1].partition("k: 16\n")[2])
        given = ["--config", tmp_path / "digits.yaml"]
        if attention and place == "flag":
            given = ["--config", DIGITS, "--model.encoder.attention", "None"]
        done = command("fit", *given, *TINY, *few)
        if not attention:
            assert done.error.startswith("error: model.encoder.attention: missing"), done.err
    assert done.code == 0, done.err
    checkpoint = tmp_path / "runs/digits/0/last.ckpt"
    assert type(Classifier.load_from_checkpoint(checkpoint).encoder.attention) is NoAttention
    done = command("test", "--ckpt_path", checkpoint, "--trainer.limit_test_batches", "1")
    assert done.code == 0, done.err


def test_a_flag_that_a_resumed_optimizer_overrides_is_warned_of(command, run: Path) -> None:
    with pytest.warns(UserWarning, match="learning_rate: 0.5 has no effect, the checkpoint's optimizer has 0.002"):
        command("fit", "--ckpt_path", run / "last.ckpt", "--trainer.max_epochs", "3", "--model.learning_rate", "0.5")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.freeze", "encoder"], "model.freeze: encoder cannot use the state of the checkpoint's None; "),
        (["--model.layer_decay", "0.5"], "model.layer_decay: 0.5 cannot use the state of the checkpoint's "),
        (["--model.schedule", "{scheduler: StepLR, step_size: 1}"], "model.schedule: {'scheduler': 'StepLR', 'step_"),
        (["--trainer.max_epochs", "1"], "trainer.max_epochs: must be 2 or more to resume after 2 epochs, got 1; "),
    ],
)
def test_what_a_resumed_training_cannot_change_is_refused_by_its_name(command, run: Path, flags, said: str) -> None:
    done = command("fit", "--ckpt_path", run / "last.ckpt", "--trainer.max_epochs", "3", *flags)
    assert done.code == 2 and done.error.startswith(f"error: {said}"), done.err


def test_a_training_without_a_validation_says_what_is_tested(command, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = ["--trainer.limit_test_batches", "1", "--trainer.max_steps", "1", "--data.batch_size", "16"]
        done = command("fit", "--config", DIGITS, *TINY, *few)
    assert done.code == 0, done.err
    assert "ended before its first validation, so its last weights are tested" in done.out
    assert (tmp_path / "runs/digits/0/last.ckpt").exists()


def test_bfloat16_on_a_processor_without_it_is_warned_of(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longseq.cli.trainer_flags.has_bfloat16", lambda: False)
    fit = ["fit", "--config", DIGITS, *TINY, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "1"]
    slow = "trainer.precision: bf16-mixed: this processor has no instructions for bfloat16"
    with pytest.warns(UserWarning, match=slow):
        command(*fit, "--trainer.precision", "bf16-mixed")
    monkeypatch.setattr("longseq.cli.trainer_flags.has_bfloat16", lambda: True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        command(*fit, "--trainer.precision", "bf16-mixed")
    assert not [each for each in said if "no instructions" in str(each.message)]


def test_flags_that_do_not_fit_the_checkpoint_are_refused_on_one_line(command, run: Path) -> None:
    done = command("test", "--ckpt_path", run / "best.ckpt", "--model.encoder.attention.k", "8")
    said = "error: ckpt_path: does not fit the model: model.encoder.attention.k is 16 in the checkpoint and 8 here; "
    assert done.code == 4 and done.error.startswith(said)
    done = command("fit", "--ckpt_path", run / "last.ckpt", "--model.encoder.attention.k", "8")
    assert done.code == 4 and done.error.startswith(said)
    assert not list(Path("runs").glob("*/*")), "no run has begun"
    with pytest.warns(UserWarning, match="model.pool is None in the checkpoint and max here: the weights were"):
        command("test", "--ckpt_path", run / "best.ckpt", "--model.pool", "max", "--trainer.limit_test_batches", "1")


def test_predict_prints_class_and_probability_of_images_of_any_size(train_py, run: Path, tmp_path: Path) -> None:
    digits = load_digits()
    (tmp_path / "images").mkdir()
    for i in range(40):
        image = Image.fromarray((digits.images[i] * 255 / 16).astype("uint8"))
        image.resize((20 + i, 60)).convert("RGB" if i % 2 else "L").save(tmp_path / f"images/{i:02}.png")
    (tmp_path / "images/.hidden.png").write_bytes(b"")
    (tmp_path / "images/notes.txt").write_text("no image")
    stdout = train_py("predict", "--ckpt_path", str(run / "best.ckpt"), "--input", str(tmp_path / "images")).stdout
    rows = [line.split("\t") for line in stdout.strip().split("\n")]
    assert [Path(path).name for path, _, _ in rows] == [f"{i:02}.png" for i in range(40)]
    assert all(0.1 <= float(probability) <= 1 for _, _, probability in rows)
    one = train_py("predict", "--ckpt_path", str(run / "best.ckpt"), "--input", rows[0][0]).stdout
    path, label, probability = one.strip().split("\t")
    assert [path, label] == rows[0][:2]
    assert float(probability) == pytest.approx(float(rows[0][2]), abs=2e-4)  # a batch of one sums in another order


def test_a_model_of_any_length_predicts_images_at_another_size(command, tmp_path: Path) -> None:
    free = ["--model.encoder.any_length", "true", "--model.encoder.positions", "none", "--model.encoder.attention"]
    fit = ["fit", "--config", DIGITS, *SMALL, *free, "Verma", "--model.encoder.attention.k", "null"]
    few = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "5"]
    assert command(*fit, *few).code == 0
    image = (255 * (np.indices((24, 24)).sum(0) % 2)).astype(np.uint8)  # at 8 x 8 it would be grey
    Image.fromarray(image).save(tmp_path / "a.png")
    checkpoint = tmp_path / "runs/digits/0/best.ckpt"
    done = command("predict", "--ckpt_path", checkpoint, "--data.size", "24", "--input", tmp_path / "a.png")
    assert done.code == 0, done.err
    model = longseq.load(checkpoint)
    assert model.model.encoder.picture_shape == (1, 8, 8)
    (found,) = model.predict(torch.from_numpy(image)[None])
    assert done.out.split("\t")[1:] == [found.answers[0].class_name, f"{found.answers[0].probability:.4f}\n"]
    assert model.model.encoder.count_tokens(torch.zeros(1, 1, 24, 24)) == 24 * 24
    (of_grey,) = model.predict(torch.full((1, 8, 8), 127, dtype=torch.uint8))
    assert f"{of_grey.answers[0].probability:.6f}" != f"{found.answers[0].probability:.6f}"


def test_predict_reads_sounds_of_any_rate_and_length(train_py, tmp_path: Path) -> None:
    short = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    train_py("fit", "--config", VOWELS, *short)
    tone = np.sin(2 * np.pi * 440 * np.arange(44100) / 44100)
    soundfile.write(tmp_path / "tone.flac", np.stack([tone, tone], 1), 44100)
    checkpoint = tmp_path / "runs/vowels/0/last.ckpt"
    stdout = train_py("predict", "--ckpt_path", str(checkpoint), "--input", str(tmp_path / "tone.flac")).stdout
    path, word, probability = stdout.strip().split("\t")
    assert path.endswith("tone.flac") and word in (
        "heed",
        "hid",
        "head",
        "had",
        "hod",
        "hawed",
        "hood",
        "who'd",
        "hud",
        "heard",
    )
    assert 0.1 <= float(probability) <= 1


@pytest.mark.parametrize(
    ("path", "content"), [("nothing", None), ("empty", {}), ("broken", {"a.png": b"\x89PNG broken"})]
)
def test_predict_on_missing_or_broken_files_is_one_line(
    path: str, content: dict | None, train_py, run: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / path).mkdir()
        for name, data in content.items():
            (tmp_path / path / name).write_bytes(data)
    result = train_py("predict", "--ckpt_path", str(run / "best.ckpt"), "--input", str(tmp_path / path), expect=3)
    assert result.stderr.strip().split("\n")[-1].startswith(f"error: {tmp_path / path}")
    assert "Traceback" not in result.stderr


def test_tensorboard_has_every_curve_and_picture(run: Path) -> None:
    events = EventAccumulator(*map(str, run.glob("*-seed*")), size_guidance={"images": 0, "scalars": 0}).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {f"{stage}/{name}" for stage in ("train", "val", "test") for name in ("loss", "accuracy", "f1")} <= scalars
    throughput = {"samples_per_second", "tokens_per_second", "step_ms", "data_wait_ms", "peak_memory_gib"}
    assert {f"throughput/{name}" for name in throughput} <= scalars
    assert {"learning_rate", "gradient_norm", "hp/test"} <= set(scalars)
    assert len(events.Tags()["images"]) >= 2  # the confusion matrix, and a few inputs


def test_two_processes_train_from_the_command_line(train_py, tmp_path: Path) -> None:
    """Also when one process has one validation batch more than the other: 143 samples in batches of one."""
    result = train_py(
        "fit", "--config", DIGITS, *SMALL, "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu",
        "--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.precision", "bf16-mixed",
        "--data.batch_size", "1", "--trainer.limit_train_batches", "3", "--trainer.limit_test_batches", "2",
    )  # fmt: skip
    assert result.stdout.count("test accuracy:") == 1  # only one rank prints it
    assert [folder.name for folder in (tmp_path / "runs/digits").iterdir()] == ["0"]
    assert (tmp_path / "runs/digits/0/best.ckpt").is_file()


def test_limits_of_batches_leave_something_or_say_so(command, run: Path, tmp_path: Path) -> None:
    done = command("test", "--ckpt_path", run / "best.ckpt", "--trainer.limit_test_batches", "0")
    assert done.error == "error: trainer: no batch of the split was evaluated; remove the limit on its batches"
    done = command("fit", "--config", DIGITS, *TINY, "--trainer.max_steps", "1", "--trainer.limit_test_batches", "0")
    assert done.code == 0, done.err
    assert "test accuracy" not in done.out and "checkpoint:" in done.out


def test_samples_of_the_training_in_another_split_are_said(command, tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / f"pictures/{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 5 * number + 20 * (number % 2)).save(path)
    flags = ["--data.root", tmp_path / "pictures", *TINY, "--trainer.max_steps", "1", "--experiment", "first"]
    fitting = ["--model.encoder.heads", "2"]
    done = command("fit", "--config", "image/folder", *flags, *fitting)
    assert done.code == 0, done.err
    run = Path("runs/first/0")
    done = command("test", "--ckpt_path", run / "best.ckpt")
    assert (done.code, "samples of" in done.err) == (0, False)
    earlier = splits_of(run / "splits.csv")
    for name, stage, others in (("test", "test", {"train", "val"}), ("validate", "val", {"train"})):
        done = command(name, "--ckpt_path", run / "best.ckpt", "--data.seed", "7")
        found = re.search(rf"(\d+) of (\d+) samples of {stage} are in (.*) in {run}/splits.csv: the figures", done.err)
        assert done.code == 0 and found and found[3] == " or ".join(sorted(others)), done.err
        data = ImageFolder(str(tmp_path / "pictures"), seed=7)
        data.setup()
        names = data.splits()[stage].names
        assert (int(found[1]), int(found[2])) == (sum(earlier[each] in others for each in names), len(names))


def test_a_set_of_its_own_is_tested_whole(command, tmp_path: Path) -> None:
    """Its classes are the model's, also where it lacks one of them; of class folders only the drawn share is tested."""
    for folder, classes in (("pictures", "abc"), ("others/test", "ab"), ("drawn", "abc")):
        for number in range(30):
            path = tmp_path / f"{folder}/{classes[number % len(classes)]}/{folder[0]}{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 5 * number + 20 * (number % 2)).save(path)
    flags = [*TINY, "--model.encoder.heads", "2", "--trainer.max_steps", "1"]
    done = command(
        "fit", "--config", "image/folder", "--data.root", tmp_path / "pictures", "--experiment", "first", *flags
    )
    assert done.code == 0, done.err
    test = ["test", "--ckpt_path", "runs/first/0/best.ckpt", "--data.root"]
    whole, drawn = command(*test, tmp_path / "others"), command(*test, tmp_path / "drawn")
    assert (whole.code, whole.err, drawn.code) == (0, "", 0), (whole.err, drawn.err)
    assert "are other data than in training, and 6 of their 30 samples are the test split; to measure all" in drawn.err
    data = ImageFolder(str(tmp_path / "others"))
    data.setup("test")
    assert len(data.test_set) == 30
    done = command("fit", "--config", "image/folder", "--data.root", tmp_path / "others", *flags)
    assert done.code == 3 and "holds samples to test on alone, which only the command test takes" in done.err


def splits_of(path: Path) -> dict[str, str]:
    with open(path, newline="") as file:
        return {row["path"]: row["split"] for row in csv.DictReader(file)}


def test_averaged_weights_are_what_fit_tests_and_keeps(command, tmp_path: Path) -> None:
    averaging = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.max_epochs", "1"]
    fitted = command("fit", "--config", DIGITS, *TINY, *averaging, "--model.learning_rate", "0.01")
    assert fitted.code == 0, fitted.err
    tested = command("test", "--ckpt_path", "runs/digits/0/best.ckpt")
    figure = re.search(r"test accuracy: +([\d.]+)", fitted.out)
    assert figure and f"test accuracy:  {figure[1]}" in tested.out, (fitted.out, tested.out)


def test_a_part_of_a_part_can_be_set_to_null(command, tmp_path: Path) -> None:
    flags = ["--model.encoder.attention", "Verma", "--model.encoder.attention.k", "null", "--trainer.max_steps", "1"]
    done = command("fit", "--config", "image/digits", *flags, "--trainer.default_root_dir", tmp_path)
    assert done.code == 0 and "attention   Verma(k=None" in done.out
