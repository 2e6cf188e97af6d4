"""Which runs a command resumes: their names and their data; two processes never train the same run."""

import errno
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import forked
import numpy as np
import pytest
import soundfile
import torch
import yaml
from jsonargparse import Namespace
from PIL import Image

import datamodules  # noqa: F401  (--data finds classes by the names in this module)
from longseq.cli.errors import UserError
from longseq.cli.model_commands import Commands
from longseq.cli.runs.callbacks import RunRecord
from longseq.cli.runs.folders import experiment_of, new_run, sole_use_of
from longseq.files.storage import write_checkpoint
from longseq.training import Classifier

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
IMAGES = str(ROOT / "configs/image/folder.yaml")
SOUNDS = str(ROOT / "configs/audio/folder.yaml")
ANY_MODEL = [
    "--model.encoder.dim", "8", "--model.encoder.depth", "1", "--model.encoder.heads", "1", "--data.batch_size", "4",
    "--trainer.enable_progress_bar", "false", "--trainer.max_steps", "2",
]  # fmt: skip
TINY = [*ANY_MODEL]


def images(root: Path, classes: str = "ab", each: int = 12, seed: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    for name in classes:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    return root


def sounds(root: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(12):
            soundfile.write(root / name / f"{number}.wav", generator.normal(0, 0.1, 1600), 8000)
    return root


def unfinish(run: Path) -> Path:
    """Make the run look like one that was killed before its end."""
    (run / "metrics.json").unlink()
    return run


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a folder of images, pets, and an unfinished run on these images."""
    folder = tmp_path_factory.mktemp("own")
    images(folder / "pets")
    command = [ROOT / "train.py", "fit", "--config", IMAGES, "--data.root", "pets", *TINY]
    forked.run(*command, cwd=folder).check_returncode()
    unfinish(folder / "runs/pets/0")
    return folder


@pytest.fixture
def pets(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


# Data


def more_files(folder: Path) -> list[str]:
    images(folder / "pets", each=20)
    return []


def other_pixels(folder: Path) -> list[str]:
    images(folder / "pets", seed=1)
    return []


def other_root(folder: Path) -> list[str]:
    images(folder / "others", "ac")
    return ["--data.root", "others"]


def a_class_more(folder: Path) -> list[str]:
    images(folder / "pets", "c")
    return []


def other_names(folder: Path) -> list[str]:
    for path in (folder / "pets").glob("*/*.png"):
        path.rename(path.with_stem(f"x{path.stem}"))
    return ["--data.test_fraction", "0.2"]


OTHER = {
    "more files": (more_files, r"data: not what .*\.ckpt was trained on: \d+ train samples before, \d+ now; "),
    "other pixels": (other_pixels, r"data: not what .* was trained on: other contents of samples; "),
    "another root with another class": (other_root, r"data: not what .* trained on: class 1 was 'b' and is 'c'; "),
    "a class more": (a_class_more, r".*class 2 was absent and is 'c' \(2 classes before, 3 now\); "),
    "another seed of the splits": (lambda _: ["--data.seed", "5"], r".* trained on: other names of samples; "),
}


@pytest.mark.parametrize("other", OTHER)
def test_a_run_does_not_go_on_with_other_data(other: str, command: Callable, pets: Path) -> None:
    change, said = OTHER[other]
    before = contents(pets)
    flags = change(pets)
    written = contents(pets / "runs")
    done = command("fit", "--resume", "runs/pets/0", *flags, "--trainer.max_steps", "4")
    assert done.code == 2, done.err
    assert re.match(f"error: {said}", done.error), done.error
    assert done.error.endswith("--model.init_from runs/pets/0/last.ckpt")
    assert contents(pets / "runs") == written, "nothing of the run is written over"
    assert before != contents(pets) or flags


def test_a_test_has_the_classes_of_the_training_in_their_order(command: Callable, pets: Path) -> None:
    test = ["test", "--ckpt_path", "runs/pets/0/last.ckpt"]
    done = command(*test, "--data.class_names", "[b, a]")
    said = "error: data: not of the classes of runs/pets/0/last.ckpt: class 0 was 'a' and is 'b'; give data of its "
    assert (done.code, done.error) == (2, f"""{said}classes, in its order: --data.class_names '["a", "b"]'""")
    assert command(*test, *shlex.split(done.error.partition("order: ")[2])).code == 0
    done = command(*test, "--data", "Digits")
    assert done.code == 2 and done.error.endswith("give data of its classes")


def test_a_new_run_goes_on_from_a_checkpoint_with_its_data_only(command: Callable, pets: Path) -> None:
    more_files(pets)
    flags = ["--ckpt_path", "runs/pets/0/last.ckpt", "--trainer.max_steps", "4"]
    done = command("fit", *flags)
    assert re.match(f"error: {OTHER['more files'][1]}", done.error), done.error
    assert {folder.name for folder in (pets / "runs/pets").iterdir()} == {"0"}
    # but a new training on the changed data may start from the run's weights
    started = command("fit", "--config", IMAGES, "--data.root", "pets", *TINY, "--model.init_from", flags[1])
    assert (started.code, "started from runs/pets/0/last.ckpt" in started.out) == (0, True), started.err


def test_a_run_goes_on_when_its_data_was_moved(command: Callable, pets: Path) -> None:
    (pets / "pets").rename(pets / "elsewhere")
    done = command("fit", "--resume", "runs/pets/0", "--data.root", pets / "elsewhere", "--trainer.max_steps", "4")
    assert done.code == 0, done.err
    assert torch.load("runs/pets/0/last.ckpt", weights_only=True)["global_step"] == 4


def test_a_checkpoint_of_before_there_was_an_identity_goes_on(command: Callable, pets: Path) -> None:
    run = pets / "runs/pets/0"
    for path in run.glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["identity"]
        write_checkpoint(checkpoint, path)
    done = command("fit", "--resume", run, "--trainer.max_steps", "4")
    assert done.code == 0, done.err


# What a run records when it is resumed


def test_a_run_may_go_on_again_and_again_with_another_batch_size(command: Callable, pets: Path) -> None:
    """The run keeps its first configuration, and a new run with that configuration does not resume the old one."""
    before = yaml.safe_load((pets / "runs/pets/0/config.yaml").read_text())
    assert (before["ckpt_path"], before["resume"]) == (None, False)
    for steps, size in ((4, 3), (6, 2)):
        done = command(
            "fit", "--resume", "runs/pets/0", "--data.batch_size", size, "--trainer.max_steps", steps
        )  # fmt: skip
        assert done.code == 0, done.err
        written = yaml.safe_load((pets / "runs/pets/0/config.yaml").read_text())
        assert (written["ckpt_path"], written["resume"]) == (None, False)
    assert torch.load("runs/pets/0/last.ckpt", weights_only=True)["global_step"] == 6
    assert command("fit", "--config", "runs/pets/0/config.yaml", "--trainer.max_steps", "1").code == 0
    assert torch.load("runs/pets/1/last.ckpt", weights_only=True)["global_step"] == 1


def test_a_refused_resume_leaves_the_run_as_it_was(command: Callable, pets: Path) -> None:
    written = contents(pets / "runs")
    for flags in (["--model.encoder.dim", "16"], ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration", "x"]):
        assert command("fit", "--resume", "runs/pets/0", *flags, "--trainer.max_steps", "4").code in (2, 4)
        assert contents(pets / "runs") == written


def test_a_run_that_ended_and_was_extended_is_unfinished_again(
    command: Callable, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped before its new end."""
    (pets / "runs/pets/0/metrics.json").write_text("{}")
    flags = ["fit", "--config", IMAGES, "--data.root", "pets", *TINY[:-1]]
    assert "starting a new one" in command(*flags, "1", "--resume").out
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "test_step", lambda *_: Stop.now())
        with pytest.raises(Stop):
            command("fit", "--resume", "runs/pets/0", "--trainer.max_steps", "4")
    shutil.rmtree(pets / "runs/pets/1")
    assert "continuing from runs/pets/0/last.ckpt" in command(*flags, "4", "--resume").out


def test_a_run_that_was_killed_before_its_card_is_whole_gets_one(
    command: Callable, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flags = pets / "runs/pets/1", ["fit", "--config", IMAGES, "--data.root", "pets", *TINY]
    with monkeypatch.context() as patch:
        patch.setattr("longseq.cli.model_commands.write_card", lambda *_: Stop.now())
        with pytest.raises(Stop):
            command(*flags)
    assert not (run / "README.md").exists()
    done = command(*flags, "--resume")
    assert (done.code, "continuing from runs/pets/1/last.ckpt" in done.out) == (0, True), done.err
    assert (run / "README.md").exists() and (run / "metrics.json").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("ckpt_path", "runs/pets/0/last.ckpt"), ("resume", True), ("resume", "runs/pets/0")]
)
def test_what_goes_on_with_a_run_is_a_flag(key: str, value: object, command: Callable, pets: Path) -> None:
    (pets / "on.yaml").write_text(yaml.safe_dump({key: value}))
    done = command("fit", "--config", IMAGES, "--config", "on.yaml", "--data.root", "pets", *TINY)
    assert (done.code, done.error.startswith(f"error: {key}: is in a configuration, ")) == (2, True), done.err
    assert done.error.endswith("; give it as a flag")


def test_a_broken_configuration_beside_resume_is_named(command: Callable, pets: Path) -> None:
    (pets / "broken.yaml").write_text("a: [1")
    done = command("fit", "--resume", "runs/pets/0", "--config", "broken.yaml", "--data.augment+=RandomFlip")
    assert (done.code, done.error.startswith("error: config: not YAML: ")) == (2, True), done.err


# A run folder that somebody else made


def test_no_file_outside_of_the_run_is_deleted_or_written(command: Callable, pets: Path) -> None:
    """This holds for any path in the run's checkpoints and for any target of its symbolic links."""
    run, mine = pets / "runs/pets/0", pets / "mine"
    mine.write_text("precious")
    for path in run.glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        for name, state in checkpoint["callbacks"].items():
            if name.startswith("BestCheckpoint"):
                named = {"best_model_path": str(mine), "kth_best_model_path": str(mine), "last_model_path": str(mine)}
                state |= named | {"best_k_models": {str(mine): torch.tensor(-1.0)}, "dirpath": str(pets)}
        write_checkpoint(checkpoint, path)
    for name in (".last.ckpt.part", ".last.ckpt.sha256.part", ".best.ckpt.part"):
        (run / name).symlink_to(mine)
    done = command("fit", "--resume", run, "--trainer.max_steps", "4", "--trainer.val_check_interval", "1")
    assert done.code == 0, done.err
    assert mine.read_text() == "precious"
    unfinish(run)
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(mine)
    done = command("fit", "--resume", run, "--trainer.max_steps", "6")
    assert (done.code, ".lock: cannot be written" in done.error) == (6, True), done.err
    assert mine.read_text() == "precious"


def test_a_setting_that_keeps_all_shapes_does_not_change_silently(command: Callable, pets: Path) -> None:
    """The flags ask for two heads, but the weights were trained with one."""
    resume = ["fit", "--resume", "runs/pets/0", "--model.encoder.dropout", "0.1"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*in the checkpoint and")
        assert command(*resume, "--trainer.max_steps", "4").code == 0
    with pytest.warns(UserWarning, match="model.encoder.heads is 1 in the checkpoint and 2 here: the weights were"):
        command(*resume, "--model.encoder.heads", "2", "--trainer.max_steps", "6")


# Names


def test_runs_on_ones_own_data_are_called_after_its_folder(command: Callable, pets: Path) -> None:
    """--resume finds a run by its data folder, because image and sound runs share the configuration's name."""
    sounds(pets / "calls")
    sound = [
        "fit",
        "--config",
        SOUNDS,
        "--data.root",
        "calls",
        *ANY_MODEL,
        "--model.encoder.num_mels",
        "16",
        "--model.encoder.tokens",
        "[16,8]",
    ]
    assert "no unfinished run of calls in .: starting a new one" in command(*sound, "--resume").out
    assert {folder.name for folder in (pets / "runs").iterdir()} == {"pets", "calls"}
    done = command("fit", "--config", IMAGES, *TINY[:-1], "4", "--data.root", "pets", "--resume")
    assert "resume: continuing from runs/pets/0/last.ckpt" in done.out, done.err


class Stop(Exception):  # noqa: N818 (it is not an error)
    @classmethod
    def now(cls) -> NoReturn:
        raise cls


PLAIN = ["--model.encoder", "ImageEncoder", "--model.encoder.attention", "Softmax"]


def new_run_of(started: Commands) -> Path:
    return new_run(Path(started.settings.trainer.default_root_dir or "."), experiment_of(started.settings))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--config", IMAGES, "--data.init_args.root=data/x/../my pets/"], "my_pets"),
        (["--data", "ImageFolder", "--data.root", "data/my pets/.", *PLAIN], "my_pets"),
        (["-c", IMAGES, "--data.root", "."], "here"),
        (["--config", IMAGES, "--config", "own.yaml"], "\u043f\u0438\u0442\u043e\u043c\u0446\u044b"),
        (["--config", IMAGES, "--data.root", "\x1b[31m\n.."], "_31m_.."),
        (["--config", IMAGES, "--data.root", "/"], "folder"),
        (["--config", IMAGES, "--config", "named.yaml", "--data.root", "x"], "by_yaml"),
        (["--config", IMAGES, "--data", "TinyImageNet", "--data.root", "x"], "folder"),  # root does not name it
        (["--data", "Digits", *PLAIN], "digits"),
    ],
)
def test_fit_and_resume_agree_on_the_name(
    flags: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree wherever the data root, the name and the folder of the runs are given."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    data = {"class_path": "ImageFolder", "init_args": {"root": "\u043f\u0438\u0442\u043e\u043c\u0446\u044b"}}
    Path("own.yaml").write_text(yaml.safe_dump({"data": data, "trainer": {"default_root_dir": "elsewhere"}}))
    Path("named.yaml").write_text(yaml.safe_dump({"experiment": "by_yaml"}))
    made: list[Path] = []
    monkeypatch.setattr(Commands, "instantiate_classes", lambda self: made.append(new_run_of(self)))
    with ExitStack() as held:
        Commands(["fit", *flags], held)
    (run,) = made
    assert run.parent.name == name
    (run / "last.ckpt").touch()
    looked_for: list[Path] = []
    monkeypatch.setattr("longseq.cli.settings.newest_checkpoint", lambda run: looked_for.append(run) or Stop.now())
    with pytest.raises(Stop), ExitStack() as held:
        Commands(["fit", *flags, "--resume"], held)
    assert looked_for == made


# Only one process trains a run


def test_a_run_is_gone_on_with_by_one_process_at_a_time(command: Callable, pets: Path) -> None:
    """The error names the process that holds the run. A killed process releases it, even if its forked loader lives."""
    run = pets / "runs/pets/0"
    ready, is_ready = os.pipe()
    holder = os.fork()
    if not holder:
        with sole_use_of(run):
            loader = os.fork()
            if loader:
                os.write(is_ready, loader.to_bytes(4, "big"))
            signal.pause()
    loader = int.from_bytes(os.read(ready, 4), "big")
    try:
        before = contents(run)
        done = command("fit", "--resume", "runs/pets/0")
        said = f"error: resume: runs/pets/0 is being trained by process {holder} on {socket.gethostname()}; wait for "
        assert (done.code, done.error.startswith(said)) == (2, True), done.err
        assert contents(run) == before
        by_name = command("fit", "--config", IMAGES, "--data.root", "pets", *TINY, "--resume")
        assert by_name.error == done.error
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert Path(f"/proc/{loader}").exists()
        assert command("fit", "--resume", "runs/pets/0").code == 0
    finally:
        os.kill(loader, signal.SIGKILL)


def test_a_fit_holds_its_run_from_its_start_to_its_end(
    command: Callable, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def is_held(run: Path) -> bool:
        tried = subprocess.run([sys.executable, "-c", take, run / ".lock"], capture_output=True, text=True)
        assert tried.returncode == 0 or "BlockingIOError" in tried.stderr
        return tried.returncode != 0

    held: list[bool] = []
    monkeypatch.setattr(RunRecord, "on_fit_start", lambda self, *_: held.append(is_held(self.run)))
    monkeypatch.setattr(Classifier, "on_test_start", lambda self: held.append(is_held(Path("runs/pets/1"))))
    done = command("fit", "--config", IMAGES, "--data.root", "pets", *TINY)
    assert done.code == 0, done.err
    assert held == [True, True]
    assert not is_held(Path("runs/pets/1"))


def test_a_file_system_without_locks_is_said_and_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", without)
    with sole_use_of(tmp_path):
        said = f"{tmp_path}: cannot be locked (No locks available); go on with it in one process only\n"
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "", ".", "..", "a\nb", "\x1b[31m", "x" * 256])
def test_an_experiment_is_one_folder(name: str) -> None:
    with pytest.raises(UserError, match=r"^experiment: got '.*'; give the name of one folder, without a slash$"):
        experiment_of(Namespace(experiment=name))
    assert experiment_of(Namespace(experiment="k=8,\u00e9t\u00e9 1")) == "k=8,\u00e9t\u00e9 1"


def test_runs_below_the_home_folder_are_found_there(command: Callable, pets: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(pets / "home"))
    flags = ["--config", IMAGES, "--data.root", "pets", *TINY, "--trainer.default_root_dir=~/x"]
    assert command("fit", *flags).code == 0
    unfinish(pets / "home/x/runs/pets/0")
    assert command("fit", *flags, "--resume").code == 0
    assert {path.name for path in (pets / "home/x").iterdir()} == {"runs"}
    assert {path.name for path in (pets / "home/x/runs/pets").iterdir()} == {"0"}
    assert not (pets / "~").exists()


@pytest.mark.parametrize("where", ["flag", "YAML", "resume", "resume without a configuration"])
def test_no_experiment_is_outside_of_the_runs(where: str, command: Callable, tmp_path: Path) -> None:
    (tmp_path / "named.yaml").write_text(yaml.safe_dump({"experiment": "../../x"}))
    flags = {
        "flag": ["--config", DIGITS, "--experiment", "../../x"],
        "YAML": ["--config", DIGITS, "--config", "named.yaml"],
        "resume": ["--config", DIGITS, "--experiment", "../../x", "--resume"],
        "resume without a configuration": ["--experiment", "../../x", "--resume"],
    }[where]
    done = command("fit", *flags)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert done.error == "error: experiment: got '../../x'; give the name of one folder, without a slash"
    assert [path.name for path in tmp_path.rglob("*")] == ["named.yaml"]


def test_a_run_without_a_logger_has_its_configuration_and_goes_on(command: Callable, pets: Path) -> None:
    fit = ["fit", "--config", IMAGES, "--data.root", "pets", *TINY, "--experiment", "x", "--trainer.logger", "false"]
    assert command(*fit).code == 0
    assert Path("runs/x/0/config.yaml").is_file() and not Path("config.yaml").exists()
    assert command("fit", "--resume", "runs/x/0").code == 0
