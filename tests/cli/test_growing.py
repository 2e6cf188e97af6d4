"""Trainings that grow from small images to large ones, in one command."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import forked
import pytest
import yaml
from several_runs import killed_in, same, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.files.storage import read_whole

ROOT = Path(__file__).parents[2]
SMALL = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.limit_train_batches", "3"]
SMALL += ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1", "--experiment", "x"]
FIT = ["fit", "--config", str(ROOT / "configs/image/digits.yaml"), *SMALL, "--trainer.logger", "false"]
THOROUGH = pytest.mark.thorough
GROWING = [*FIT, "--grow", "4x4:2,8:1,12:2"]


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The runs of a growth that was never stopped, and what it printed."""
    from longseq.cli import main

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.chdir(tmp_path_factory.mktemp("growth"))
        main(GROWING)
        return Path.cwd() / "runs", printed.getvalue()


@pytest.fixture(scope="module")
def whole(growth: tuple[Path, str]) -> Path:
    """The runs of a growth that was never stopped."""
    return growth[0]


def test_every_stage_is_a_run_that_starts_from_the_one_before(growth: tuple[Path, str], command) -> None:
    runs, out = growth
    shutil.copytree(runs, "runs")
    assert out.count("test accuracy:") == 3
    assert "runs/x/0/best.ckpt; tokens 4 x 4 before, 8 x 8 now: " in out
    assert "runs/x/1/best.ckpt; tokens 8 x 8 before, 12 x 12 now: " in out
    for number, (size, epochs) in enumerate([(4, 2), (8, 1), (12, 2)]):
        config = yaml.safe_load(Path(f"runs/x/{number}/config.yaml").read_text())
        assert (config["data"]["init_args"]["size"], config["trainer"]["max_epochs"]) == (size, epochs)
        assert "test/accuracy" in json.loads(Path(f"runs/x/{number}/metrics.json").read_text())
        assert read_whole(Path(f"runs/x/{number}/last.ckpt"))["global_step"] == 3 * epochs
    assert command("fit", "--config", "runs/x/2/config.yaml", "--experiment", "z").code == 0  # this stage alone
    assert same(weights("z/0"), weights("x/2")) and not Path("runs/z/1").exists()
    # the same as the three commands of which it consists
    for size, epochs, start in (("4", "2", []), ("8", "1", ["runs/y/0"]), ("12", "2", ["runs/y/1"])):
        flags = ["--data.size", size, "--trainer.max_epochs", epochs, "--experiment", "y"]
        assert command(*FIT, *flags, *(f"--model.init_from={run}/best.ckpt" for run in start)).code == 0
    assert same(weights("x/2"), weights("y/2"))


def test_one_tensorboard_shows_all_stages_each_with_the_tokens_of_its_own_size(command) -> None:
    flags = ["--trainer.logger", "true", "--trainer.log_every_n_steps", "1", "--grow", "4x4:1,8:1"]
    assert command(*FIT, *flags).code == 0
    for number, tokens in enumerate([16, 64]):
        (curves,) = Path(f"runs/x/{number}").glob("*-seed*")  # `board` shows all that lies in runs
        events = EventAccumulator(str(curves)).Reload()
        both = zip(*(events.Scalars(f"throughput/{what}_per_second") for what in ("tokens", "samples")), strict=True)
        ratios = [token.value / sample.value for token, sample in both]
        assert ratios and ratios == pytest.approx([tokens] * len(ratios))


@pytest.mark.parametrize("stop", [pytest.param(4, marks=THOROUGH), 7, pytest.param(13, marks=THOROUGH)])
def test_a_stopped_growth_goes_on_as_if_it_had_never_stopped(
    stop: int, whole: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 to 6 are of the first stage, 7 to 9 of the second, 10 to 15 of the third."""
    steps = killed_in(stop, monkeypatch)
    assert command(*GROWING).code == 143
    done = command(*GROWING, "--resume")
    assert done.code == 0, done.err
    assert len(steps) == 15
    assert same(weights("x/2"), weights("x/2", whole))


@pytest.mark.thorough
def test_a_growth_goes_on_where_a_stage_has_ended_and_a_new_one_starts_anew(whole: Path, command) -> None:
    shutil.copytree(whole, "runs")
    shutil.rmtree("runs/x/2")
    assert command(*GROWING, "--resume").code == 0
    assert same(weights("x/2"), weights("x/2", whole))
    assert command(*FIT, "--grow", "4:1,8:1", "--resume").code == 0  # all stages of the newest run have ended
    assert sorted(path.name for path in Path("runs/x").iterdir()) == ["0", "1", "2", "3", "4"]
    done = command(*FIT, "--grow", "4:1,5:1", "--resume", "runs/x/4")
    assert (done.code, done.error) == (2, "error: grow: 4:1,5:1 has no stage of this run's size; give the stages of "
                                          "its start")  # fmt: skip


def test_a_growth_goes_on_from_a_stage_without_a_validation(command) -> None:
    flags = [*FIT, "--trainer.limit_val_batches", "0"]
    assert command(*flags, "--grow", "4x4:1").code == 0
    done = command(*flags, "--grow", "4x4:1,8:1", "--resume")
    assert done.code == 0, done.err
    assert "runs/x/0/last.ckpt; tokens 4 x 4 before, 8 x 8 now: " in done.out


@THOROUGH
def test_a_later_stage_may_be_corrected_after_those_before_it_have_ended(
    whole: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, "runs")
    shutil.rmtree("runs/x/2")
    shutil.copytree("runs/x/1", "runs/x/2")  # a third stage that was killed before its first checkpoint
    for path in ("best.ckpt", "last.ckpt", "metrics.json", "config.yaml"):
        Path("runs/x/2", path).unlink()
    steps = killed_in(5, monkeypatch)
    done = command(*FIT, "--grow", "4:2,8:1,10:1,12:2", "--resume")
    assert done.code == 143 and "runs/x/1/best.ckpt; tokens 8 x 8 before, 10 x 10 now: " in done.out
    # the fourth stage, of 12 x 12, was stopped in its second step; the next command has another one in its place
    done = command(*FIT, "--grow", "4x4:2,8:1,10:1,6:1", "--resume")
    assert done.code == 0, done.err
    assert "resume: runs/x/4 belongs to no stage of 4x4:2,8:1,10:1,6:1: starting a new run" in done.out
    assert "runs/x/3/best.ckpt; tokens 10 x 10 before, 6 x 6 now: " in done.out
    assert len(steps) == 8 and not Path("runs/x/6").exists()
    # stages at the end of the list may be new, and may be gone
    assert command(*FIT, "--grow", "4:2,8:1,10:1,6:1,9:1", "--resume").code == 0
    assert command(*FIT, "--grow", "4:2,8:1,5:1", "--resume").code == 0
    assert len(steps) == 14 and not Path("runs/x/8").exists()
    # a stage that has ended and is another one now is trained again
    shutil.rmtree("runs/x/4")
    assert command(*FIT, "--grow", "4:2,8:2", "--resume").code == 0
    assert len(steps) == 20 and not Path("runs/x/9").exists()
    assert command(*FIT, "--grow", "4:1,8:2", "--resume").code == 0
    assert len(steps) == 29 and not Path("runs/x/11").exists()


def test_a_growth_that_goes_on_after_other_stages_than_it_began_with_is_refused(
    whole: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, "runs")
    Path("runs/x/2/metrics.json").unlink()
    done = command(*FIT, "--grow", "4:3,8:1,12:2", "--resume")
    said = "this run began after 4x4:2,8:1, and not after 4:3,8:1; give the stages of its start, or leave out --resume"
    assert (done.code, done.error) == (2, f"error: grow: {said}")


def test_a_growth_that_is_resumed_by_the_folder_of_its_run_goes_on_to_its_last_stage(whole: Path, command) -> None:
    shutil.copytree(whole, "runs")
    shutil.rmtree("runs/x/2")
    Path("runs/x/1/metrics.json").unlink()
    done = command("fit", "--resume", "runs/x/1")
    assert done.code == 0, done.err
    assert same(weights("x/2"), weights("x/2", whole))


@THOROUGH
def test_a_learning_rate_of_a_stage_holds_from_there_on_after_a_stop_too(
    command, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--grow", "4:1,8:1@1e-5,12:1"]
    assert command(*FIT, *flags).code == 0
    for number, rate in enumerate([2e-3, 1e-5, 1e-5]):  # the first one is that of the configuration
        assert yaml.safe_load(Path(f"runs/x/{number}/config.yaml").read_text())["model"]["learning_rate"] == rate
        assert set(read_whole(Path(f"runs/x/{number}/last.ckpt"))["lr_schedulers"][0]["base_lrs"]) == {rate}
    for experiment, again in {"y": [*FIT, *flags, "--experiment", "y", "--resume"],
                              "z": ["fit", "--resume", "runs/z/1"]}.items():  # fmt: skip
        steps = killed_in(5, monkeypatch)  # in the second stage
        assert command(*FIT, *flags, "--experiment", experiment).code == 143
        done = command(*again)
        assert done.code == 0 and "no effect" not in done.err, done.err
        assert len(steps) == 9 and same(weights("x/2"), weights(f"{experiment}/2"))


@pytest.mark.thorough
def test_two_processes_grow_together(tmp_path: Path) -> None:
    two = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    done = forked.run(ROOT / "train.py", *FIT, "--grow", "4:1,8:1", *two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "runs/x/0/best.ckpt; tokens 4 x 4 before, 8 x 8 now: " in done.stdout
    assert sorted(path.name for path in (tmp_path / "runs/x").iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--grow", "16x16"], "error: grow: got '16x16'; give sizes and epochs such as 16x16:40,32x32:8"),
        (["--grow", "8:3,4:1@fast"], "error: grow: got '8:3,4:1@fast'; give sizes and epochs such as 16x16:40,32x32:8, "
                                     "and learning rates such as 32x32:8@1e-3"),
        (["--grow", "0:3,8:1"], "error: grow: got '0:3,8:1'; give sizes and epochs such as 16x16:40,32x32:8"),
        (["--grow", "8:3,8x8:1"], "error: grow: got '8:3,8x8:1', where a size comes twice; "),
        (["--grow", "8:3", "--data", "Vowels"], "error: grow: datamodules.Vowels has no size; "),
        # every stage is built before the first one is trained
        (["--grow", "8:1,10:1", "--model.encoder.patch_size", "4", "--model.encoder.attention.k", "1"],
         "error: grow: 10:1: model.encoder.patch_size: must divide the image, but 4 does not divide 10 x 10 pixels; "),
        (["--grow", "8:1,3x3:1"], "error: grow: 3x3:1: model.encoder.attention.k: must be in 1..9 (the sequence "),
        (["--grow", "8:1,8x12:1"], "error: grow: 8x12:1: data.size: got [8, 12]; give int"),
        (["--grow", "8:1,2000:1"], "error: grow: 2000:1: data.size: must be in 1..1024, got 2000; "),
        (["--grow", "8:1,12:1@0"], "error: grow: 12:1@0: model.learning_rate: must be positive and at most 1e30, "),
        (["--grow", "8:1,12:1@1e999"], "error: grow: 12:1@1e999: model.learning_rate: got inf; give float"),
        (["--grow", f"8:1,12:{2**63}"], f"error: grow: 12:{2**63}: trainer.max_epochs: {2**63} is beyond what 64 bits"),
    ],
)  # fmt: skip
def test_a_growth_that_cannot_be_is_one_line(flags: list[str], said: str, command) -> None:
    done = command(*FIT, *flags)
    assert (done.code, done.error[: len(said)]) == (2, said)
    assert not Path("runs").exists()


def test_a_teacher_that_does_not_fit_a_later_stage_is_refused_before_the_first(whole: Path, command) -> None:
    done = command(*FIT, "--grow", "4:1,8:1", "--model.teacher", whole / "x/0/best.ckpt")
    said = f"error: grow: 8:1: model.teacher: {whole}/x/0/best.ckpt takes inputs with shape [1, 4, 4], "
    assert (done.code, done.error[: len(said)]) == (4, said)
    assert not Path("runs").exists()
