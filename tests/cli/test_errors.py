"""What a user sees after a mistake: an exit code, and one line that names the mistake, its place and the remedy."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules import Digits
from datamodules.own import scan
from longseq.cli import main
from longseq.cli.errors import UserError
from longseq.cli.errors.parsing import one_line
from longseq.cli.predict.input_files import OF_SYSTEMS, files_of
from longseq.training.data import lacking

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
FSDD = str(ROOT / "configs/audio/fsdd.yaml")

MISTAKES = {
    "a typo in a group": (
        ["--model.encodr", "x"],
        "model.encodr: no such option; did you mean model.encoder?",
    ),
    "a typo in a flag": (
        ["--model.learning_rat", "1"],
        "model.learning_rat: no such option; did you mean model.learning_rate?",
    ),
    "an abbreviation": (
        ["--trainer.max_epoch", "1"],
        "trainer.max_epoch: no such option; did you mean trainer.max_epochs?",
    ),
    "an argument that the class lacks": (
        ["--model.encoder.attention.kk", "3"],
        "model.encoder.attention.kk: no such option; did you mean k?",
    ),
    "an unknown mechanism": (
        ["--model.encoder.attention", "Verna"],
        "model.encoder.attention: no class Verna; did you mean Verma?",
    ),
    "a typo in an option of all data": (
        ["--data", "Digits", "--data.batch_siz", "4"],
        "data.batch_siz: no such option; did you mean batch_size?",
    ),
    "an option that is like no other beside it": (["--model.zz", "1"], "model.zz: no such option; see --help"),
    "another trainer's epochs": (["--epochs", "3"], "epochs: no such option; did you mean trainer.max_epochs?"),
    "another trainer's rate": (["--lr", "1"], "lr: no such option; did you mean model.learning_rate?"),
    "another trainer's rate in a group": (
        ["--model.lr", "1"],
        "model.lr: no such option; did you mean model.learning_rate?",
    ),
    "another trainer's batch": (["--batch-size=8"], "batch-size: no such option; did you mean data.batch_size?"),
    "another trainer's size": (["--size", "40x40"], "size: no such option; did you mean data.size?"),
    "another trainer's workers": (
        ["--data.workers", "2"],
        "data.workers: no such option; did you mean data.num_workers?",
    ),
    "another trainer's GPUs": (["--gpus", "1"], "gpus: no such option; did you mean trainer.devices?"),
    "another trainer's folder": (["--data_dir", "x"], "data_dir: no such option; did you mean data.root?"),
    "two sides in one word": (
        ["--data", "ImageFolder", "--data.size", "40x30"],
        "data.size: got 40x30; give [40, 30]",
    ),
    "one side twice": (["--data.size", "40x40"], "data.size: got 40x40; give 40"),
    "classes that YAML reads as truth values": (
        ["--data", "ImageFolder", "--data.class_names", "[yes, no]"],
        "data.class_names: got True, as YAML reads yes, no, on, off, true and false; quote it, as in 'no'",
    ),
    "classes that YAML reads as numbers": (
        ["--data", "ImageFolder", "--data.class_names", "[7, 8]"],
        "data.class_names: got the number 7; quote it: '7'",
    ),
    "an unknown network": (
        ["--data", "AudioFolder", "--data.network", "Tim"],
        "data.network: no class Tim; did you mean Timm?",
    ),
    "an unknown data set": (["--data", "Digit"], "data: no class Digit; did you mean Digits?"),
    "a word for a number": (
        ["--model.encoder.attention.k", "many"],
        "model.encoder.attention.k: got many; give int or list",
    ),
    "a word that is no choice": (
        ["--model.encoder.attention.sharing", "all"],
        "model.encoder.attention.sharing: got all; give one of ['none', 'headwise', 'key_value', 'layerwise']",
    ),
    "k beyond the sequence": (
        ["--model.encoder.attention.k", "65"],
        "model.encoder.attention.k: must be in 1..64 (the sequence length), got 65; lower k or lengthen the sequence",
    ),
    "k of nothing": (
        ["--model.encoder.attention.k", "0"],
        "model.encoder.attention.k: must be in 1..64 (the sequence length), got 0; lower k or lengthen the sequence",
    ),
    "no value for the data": (
        ["--data.val_fraction", "null"],
        "data.val_fraction: got null; give a value, or leave it out",
    ),
    "no value for the encoder": (
        ["--model.encoder.dim", "null"],
        "model.encoder.dim: got null; give a value, or leave it out",
    ),
    "heads that do not divide the width": (
        ["--model.encoder.heads", "5"],
        "model.encoder.heads: must divide dim, but 5 does not divide 64; change one of them",
    ),
    "a patch that does not divide the image": (
        ["--model.encoder.patch_size", "3"],
        "model.encoder.patch_size: must divide the image, but 3 does not divide 8 x 8 pixels; "
        "give --data.size 6, or 1, which makes every pixel a token",
    ),
    "a negative number for the model": (
        ["--model.learning_rate", "-1"],
        "model.learning_rate: must be positive and at most 1e30, got -1.0; 1e-3 is usual for AdamW",
    ),
    "a negative number for the data": (
        ["--data.batch_size", "-1"],
        "data.batch_size: must be in 1..1048576, got -1; 64 is a good start",
    ),
    "a negative number for the trainer": (["--trainer.max_epochs", "-5"], "trainer.max_epochs: "),
    "more processes than cores": (
        ["--trainer.accelerator", "cpu", "--trainer.devices", "4096"],
        "trainer.devices: 4096 processes on ",
    ),
    "more processes than cores of whatever there is": (
        ["--trainer.devices", "4096", "--trainer.strategy", "ddp"],
        "trainer.devices: 4096 processes on ",
    ),
    "processes that a notebook needs": (
        ["--trainer.strategy", "ddp_spawn"],
        "trainer.strategy: ddp_spawn is for notebooks, and waits here for ever; give ddp",
    ),
    "an accelerator that is not there": (
        ["--trainer.accelerator", "tpu"],
        "trainer.accelerator: no tpu on this machine; give auto, or one of ['cpu']",
    ),
    "an accelerator that there is not": (["--trainer.accelerator", "npu"], "trainer.accelerator: You selected an "),
    "a validation all the time": (
        ["--trainer.val_check_interval", "0.0"],
        "trainer.val_check_interval: must be a share in 0.0..1.0, more than 0, or a number of batches, got 0.0; "
        "--trainer.limit_val_batches 0 leaves validation out",
    ),
    "gradients clipped to less than nothing": (
        ["--trainer.gradient_clip_val", "-1.5"],
        "trainer.gradient_clip_val: must be 0 or more, got -1.5; 1 is usual, and without it nothing is clipped",
    ),
    "a precision in which no optimizer works": (
        ["--trainer.precision", "16-true"],
        "trainer.precision: 16-true has weights of float16, in which AdamW divides by 0; give 16-mixed or bf16-true",
    ),
    "statistics of a stem over processes": (
        ["--trainer.sync_batchnorm", "true", "--model.encoder.stem", "Residual"],
        "trainer.sync_batchnorm: not together with a stem, whose statistics leave out the padding of each process; ",
    ),
    "steps fewer than none": (["--skip_bad_steps", "-1"], "skip_bad_steps: must be 0 or more, got -1; "),
    "sanity below -1": (
        ["--trainer.num_sanity_val_steps", "-5"],
        "trainer.num_sanity_val_steps: must be 0 or more, or -1 for all, got -5; 0 leaves them out",
    ),
    "gradients of no batch": (
        ["--trainer.accumulate_grad_batches", "0"],
        "trainer.accumulate_grad_batches: must be 1 or more, got 0; 1 accumulates nothing",
    ),
    "a training of nothing": (["--trainer.limit_train_batches", "0"], "trainer.limit_train_batches: must be a share "),
    "a batch beyond all data": (
        ["--data.batch_size", "100000000000"],
        "data.batch_size: must be in 1..1048576, got 100000000000; 64 is a good start",
    ),
    "a validation of nothing": (["--data.val_fraction", "1e-9"], "data.val_fraction: must be in 0.0001..0.9999, "),
    "a learning rate beyond 32 bits": (
        ["--model.learning_rate", "1e300"],
        "model.learning_rate: must be positive and at most 1e30, got 1e+300; 1e-3 is usual for AdamW",
    ),
    "a number beyond 64 bits": (
        ["--model.encoder.dim", "100000000000000000000"],
        "model.encoder.dim: 100000000000000000000 is beyond what 64 bits hold; give a smaller number",
    ),
    "a number that is none": (["--checkpoint_minutes", ".nan"], "checkpoint_minutes: got "),
    "words that a callback does not understand": (
        ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration", "nonsense"],
        "trainer.callbacks.duration: Timer: `Timer(duration='nonsense')` is not a valid duration. Expected a string in "
        "the format DD:HH:MM:SS; --debug shows where",
    ),
    "the same words for the trainer": (["--trainer.max_time", "nonsense"], "trainer.max_time: "),
    "a logger whose package is missing": (
        ["--trainer.logger", "CometLogger"],
        "trainer.logger: CometLogger: Requirement 'comet-ml>=3.44.4' not met. ",
    ),
    "a perceptron without a width": (["--model.encoder.mlp_ratio", "1e-9"], "model.encoder.mlp_ratio: must leave "),
    "a precision that there is not": (["--trainer.precision", "bf17"], "trainer.precision: got bf17; give "),
    "what the data decides": (
        ["--model.encoder.shape", "[1,2,3]"],
        "model.encoder.shape: follows from data.shape; leave it out and set the data's arguments instead",
    ),
    "an unknown optimizer": (["--model.optimizer", "adamm"], "model.optimizer: must be one of timm's, got 'adamm'; "),
    "an optimizer that needs second derivatives": (
        ["--model.optimizer", "adahessian"],
        "model.optimizer: must be one of timm's, got 'adahessian'; ",
    ),
    "a seed below zero": (["--seed_everything", "-1"], "seed_everything: got -1; give 0 to 4294967295"),
    "a time of nothing": (
        ["--checkpoint_minutes", "0"],
        "checkpoint_minutes: must be positive, got 0.0; 10 loses ten minutes at worst",
    ),
    "two checkpoints to go on from": (
        ["--resume", "--ckpt_path", "last.ckpt"],
        "ckpt_path: --resume chooses the checkpoint itself; give one of the two flags",
    ),
    "a stray word": (["my digits"], "my digits: no flag; give each flag one value, and of several files their folder"),
    "an augmentation that would be the only one": (
        ["--data.augment", "RandAugment"],
        "data.augment: got RandAugment; give a list, or --data.augment+=RandAugment",
    ),
    "an argument of a task before the task": (
        ["--model.task.metrics", "{auroc: MulticlassAUROC}", "--model.task", "SingleLabel"],
        "model.task.metrics: comes before --model.task; give --model.task first",
    ),
}


def said(capsys: pytest.CaptureFixture[str], arguments: list[str], exit_code: int) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    printed = capsys.readouterr().err
    assert stop.value.code == exit_code
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1, printed
    return printed.removeprefix("error: ").strip()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags, message = MISTAKES[mistake]
    line = said(capsys, ["fit", "--config", DIGITS, "--trainer.default_root_dir", str(tmp_path), *flags], 2)
    assert line == message or (line.startswith(message) and message.endswith(" "))
    assert not list(tmp_path.glob("runs/*")), "nothing is written before the flags are known to be right"


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["fit", "--config", DIGITS, "--allow_class"], "allow_class"),
        (["fit", "--config", DIGITS, "--experiment"], "experiment"),
        (["fit", "--resume", "--experiment"], "experiment"),
        (["test", "--ckpt_path"], "ckpt_path"),
        (["board", "--logdir"], "logdir"),
    ],
)
def test_a_flag_without_its_value_is_one_line(arguments: list[str], flag: str, command: Callable) -> None:
    done = command(*arguments)
    assert (done.code, done.err) == (2, f"error: {flag}: has no value; give one after --{flag}\n")


@pytest.mark.parametrize("flag", ["dim", "depth", "mlp_ratio"])
def test_a_model_beyond_the_machines_memory_is_one_line_and_exit_code_6(flag: str, command: Callable) -> None:
    done = command("fit", "--config", DIGITS, f"--model.encoder.{flag}", "1000000000000")
    assert (done.code, list(Path().glob("runs/*"))) == (6, [])
    assert re.match(r"error: memory: the weights of \d+ blocks of dim \d+ take [\d.e+]+ GiB, and this ", done.error)
    assert done.error.endswith("lower model.encoder.dim, model.encoder.depth or k")


def test_a_data_module_that_does_not_keep_an_argument_is_named_at_the_start(
    command: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "from datamodules import Digits\nclass Mine(Digits):\n    def __init__(self, level: int = 3, **common):\n"
    (tmp_path / "foreign.py").write_text(text + "        super().__init__(**common)\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = command("fit", "--config", DIGITS, "--data", "foreign.Mine", "--allow_class", "foreign")
    assert (done.code, list(Path().glob("runs/*"))) == (2, [])
    assert done.error == (
        "error: data: Mine must keep its argument level as an attribute; a checkpoint names the data by its arguments"
    )


def test_a_data_module_that_lacks_a_part_of_the_contract_is_told_which(
    command: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "import pytorch_lightning as pl\nclass Bare(pl.LightningDataModule):\n"
    text += "    num_classes, class_names, shape = 2, ['a', 'b'], (1, 8, 8)\n    def read_part(self, part): ...\n"
    (tmp_path / "bare.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    lacks = "bad_files, identity, inputs, longest_batch, on_error, parts, predict_parts, predict_suffixes, remarks, "
    lacks += "remember, save_splits, splits, statistics, true_events"
    said = f"error: data: Bare lacks {lacks}; derive it from datamodules.DataModule (docs/design.md)"
    for name in ("fit", "stats", "check"):
        config = ["--config", DIGITS] if name == "fit" else []
        done = command(name, *config, "--data", "bare.Bare", "--allow_class", "bare")
        assert (done.code, done.error, list(Path().glob("runs/*"))) == (2, said, [])
    assert lacking(Digits()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--trainer.max_epochs", "-1", "--trainer.max_time", "00:00:01:00"],
            "trainer.max_epochs: the learning rate schedule needs an end; give it, or trainer.max_steps",
        ),
        (["--trainer.val_check_interval", "100"], "trainer.val_check_interval: "),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/acuracy"],
            "trainer.callbacks: EarlyStopping: Early stopping conditioned on metric `val/acuracy` ",
        ),
        (
            ["--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.attr_name", "rate"],
            "trainer.callbacks: LearningRateFinder: The attribute name for the learning rate was set to rate",
        ),
        (
            ["--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps", "0"],
            "trainer.callbacks: LearningRateFinder: division by zero; --debug shows where",
        ),
        (
            ["--trainer.callbacks+=GradientAccumulationScheduler", "--trainer.callbacks.scheduling", "{0: 2, 1: 4}"],
            "trainer.callbacks: GradientAccumulationScheduler changes the number of steps",
        ),
    ],
)
def test_what_only_the_training_shows_is_one_line_too(
    flags: list[str], message: str, command: Callable, tmp_path: Path
) -> None:
    small = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.limit_train_batches", "2"]
    done = command("fit", "--config", DIGITS, *small, "--trainer.max_epochs", "1", *flags)
    assert done.code == 2
    assert done.error.startswith(f"error: {message}")


def test_cutmix_is_refused_for_sounds_and_a_patch_needs_two_sides(command: Callable) -> None:
    vowels = ["fit", "--config", str(ROOT / "configs/audio/vowels.yaml")]
    assert (
        command(*vowels, "--model.mix", "CutMix").error == "error: model.mix: must suit sounds, got CutMix; use MixUp"
    )
    done = command(*vowels, "--model.encoder.tokens", "[16]")
    assert done.error.startswith("error: model.encoder.tokens: must be 'frames' or a patch (mels, frames)")


def test_a_configuration_that_is_no_text_is_one_line(command: Callable, tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    done = command("fit", "--config", tmp_path / "binary.yaml")
    assert (done.code, done.error) == (2, "error: config: not a text file; give a YAML file")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (
            [],
            2,
            "command: missing; choose one of fit, validate, test, predict, preview, stats, check, shard, embed, "
            "benchmark, spectrum, approximation, sweep, needle, contract, explain, review, board, export",
        ),
        (["ft"], 2, "ft: no such command; did you mean fit?"),
        (["fit"], 2, "model.encoder, data: missing; give --config, one of configs/, or these flags"),
        (
            ["fit", "--config", "/nowhere.yaml"],
            2,
            "/nowhere.yaml: no such file; longseq has configurations such as image/digits",
        ),
        (["check", "--data.root", "x"], 2, "data: missing; give --config, one of configs/, or --data, "),
        (["benchmark", "digits"], 2, "digits: no flag; give each flag one value, and of several files their folder"),
        (["spectrum", "/nowhere.ckpt", "--out", "x"], 2, "/nowhere.ckpt: no flag; "),
        (["test"], 2, "ckpt_path: missing; give a checkpoint of fit, such as runs/digits/0/best.ckpt"),
        (
            ["test", "--ckpt_path", "/nowhere.ckpt"],
            4,
            "/nowhere.ckpt: no such file; give a checkpoint of fit, such as runs/digits/0/best.ckpt",
        ),
        (["test", "--ckpt_path", DIGITS], 4, f"{DIGITS}: not a readable checkpoint (BadZipFile); give another"),
    ],
)
def test_a_command_without_what_it_needs_is_one_line(
    arguments: list[str], exit_code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, arguments, exit_code)
    assert line == message or (line.startswith(message) and message.endswith(" "))


@pytest.mark.parametrize("name", ["", "/nowhere"])
def test_inputs_of_predict_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^input: empty, .*; give a file or a folder$|^/nowhere: no such file or f"):
        files_of(name, frozenset({".png"}))


def test_of_links_that_lead_nowhere_a_line_says_that_they_are_left_out(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.wav").touch()
    (tmp_path / "b.wav").symlink_to(tmp_path / "on a disk that is not here.wav")
    (tmp_path / "c.txt").symlink_to("nothing")
    assert files_of(str(tmp_path), frozenset({".wav"})) == [str(tmp_path / "a.wav")]
    assert capsys.readouterr().err == f"left out: 1 link leads nowhere, such as {tmp_path / 'b.wav'}\n"


def test_linked_folders_are_entered_once_and_never_up(tmp_path: Path) -> None:
    (tmp_path / "disk/deep").mkdir(parents=True)
    for name in ("disk/a.wav", "disk/deep/b.WAV", "disk/deep/.hidden.wav", "disk/notes.txt"):
        (tmp_path / name).touch()
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/deep/again").symlink_to(tmp_path / "disk")
    (inputs / "up").symlink_to(tmp_path)
    found = [str(Path(name).relative_to(inputs)) for name in files_of(str(inputs), frozenset({".wav"}))]
    assert found == ["linked/a.wav", "linked/deep/b.WAV"]


def test_folders_that_a_system_makes_are_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.wav", "@eaDir/a.wav/thumb.wav", "deep/@eaDir/b.wav", "#recycle/c.wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert files_of(str(tmp_path), frozenset({".wav"})) == [str(tmp_path / "a.wav")]
    said = "left out folders that a system has made: 2 @eaDir, 1 #recycle"
    assert capsys.readouterr().err == f"{tmp_path}: {said}\n"
    assert OF_SYSTEMS == scan.OF_SYSTEMS


def test_a_folder_that_a_report_cannot_make_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = said(capsys, ["approximation", "--out", str(tmp_path / "file")], 6)
    assert line == f"{tmp_path}/file: File exists; give another --out"


def test_missing_data_is_one_line_and_exit_code_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = said(
        capsys,
        ["fit", "--config", FSDD, "--data.root", "/nowhere", "--trainer.default_root_dir", str(tmp_path)],
        3,
    )
    assert line.startswith("/nowhere: ")


def test_broken_yaml_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("model: [\n")
    assert said(capsys, ["fit", "--config", str(tmp_path / "broken.yaml")], 2).startswith("config: not YAML: ")


def test_a_misspelt_key_in_yaml_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = Path(DIGITS).read_text().replace("learning_rate", "learning_rte")
    (tmp_path / "typo.yaml").write_text(text)
    assert said(capsys, ["fit", "--config", str(tmp_path / "typo.yaml")], 2) == (
        "model.learning_rte: no such option; did you mean model.learning_rate?"
    )


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"must be in 1\.\.64"):
        main(["fit", "--config", DIGITS, "--model.encoder.attention.k", "65", "--debug"])


def test_a_mistake_in_a_process_of_its_own_leaves_no_traceback(train_py) -> None:
    result = train_py("fit", "--config", DIGITS, "--model.encoder.attention.k", "65", expect=2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: model.encoder.attention.k: ")


def test_an_unforeseen_report_still_becomes_one_line() -> None:
    assert one_line('Parser key "a":\n  something\n   went wrong.\n', []) == "a: something went wrong; see --help"
