"""Checkpoints and configurations that name unexpected classes or functions: none is called, and one line says so."""

import copy
import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torchvision.transforms import v2

from datamodules import Digits
from datamodules.augment import SoundTransform
from longseq.attention import Mechanism, Projection
from longseq.encoders import Encoder
from longseq.files.checkpoint import CheckpointError
from longseq.files.description import build, describe
from longseq.training import Classifier
from longseq.training.mix import Mix

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
FIT = [
    "fit", "--config", DIGITS, "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
    "--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1",
    "--model.encoder.dim", "8", "--model.encoder.depth", "1",
]  # fmt: skip
LIBRARIES = ("torch", "torchvision", "torchaudio", "timm", "torchmetrics", "pytorch_lightning", "numpy")
EXPECTED = (Encoder, Mechanism, Projection, Mix, v2.Transform, SoundTransform, pl.LightningDataModule)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a checkpoint of a short run."""
    from longseq.cli import main

    folder = tmp_path_factory.mktemp("trained")
    main([*FIT, "--trainer.default_root_dir", str(folder)])
    return torch.load(folder / "runs/digits/0/last.ckpt", weights_only=True)


@pytest.fixture
def written(checkpoint: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a changed copy of the checkpoint."""

    def write(change: Callable[[dict[str, Any]], Any] = lambda _: None) -> Path:
        changed = copy.deepcopy(checkpoint)
        change(changed)
        torch.save(changed, tmp_path / "changed.ckpt")
        return tmp_path / "changed.ckpt"

    return write


# Which classes a file may name


def every_class() -> Iterator[str]:
    """The path of every class in the source of a library, and of every class that its imported modules hold."""
    packages = Path(sysconfig.get_paths()["purelib"])
    for library in LIBRARIES:
        for file in (packages / library).rglob("*.py"):
            parts = file.relative_to(packages).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for name in re.findall(r"^class (\w+)", file.read_text(errors="ignore"), re.MULTILINE):
                yield f"{module}.{name}"
    for module, content in list(sys.modules.items()):
        if module.partition(".")[0] in LIBRARIES:
            for name, value in list(vars(content).items()):
                if isinstance(value, type):
                    yield f"{module}.{name}"


def loaded(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def test_no_class_of_a_library_is_called_or_imported_where_another_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = sorted(set(every_class()))
    assert len(paths) > 10_000
    for library in LIBRARIES:
        assert any(path.startswith(f"{library}.") for path in paths)
    modules = set(sys.modules)
    called = []
    for number, path in enumerate(paths):
        kind, expected = loaded(path), EXPECTED[number % len(EXPECTED)]  # one in turn, to save time
        if isinstance(kind, type) and issubclass(kind, expected):
            continue
        try:
            build({"class_path": path, "init_args": {}}, expected)
            called.append((path, expected.__name__))
        except CheckpointError as error:
            if error.__cause__ is not None:  # the class was called and raised this
                called.append((path, expected.__name__))
    assert (called, list(tmp_path.iterdir())) == ([], [])
    assert {name for name in set(sys.modules) - modules if name.partition(".")[0] in LIBRARIES} == set()


@pytest.mark.parametrize("path", ["torchvision.transforms.v2.Lambda", "torchvision.transforms.v2.Compose"])
@pytest.mark.parametrize(
    "inner",
    [
        {"class_path": "torch.utils.tensorboard.SummaryWriter", "init_args": {}},
        {"class_path": "torchvision.transforms.v2.functional.resize", "init_args": {}},
        {"class_path": "datamodules.Digits", "init_args": {}},
        {"class_path": "longseq.training.classifier.Classifier", "init_args": {}},
    ],
)
def test_a_transform_is_made_of_transforms_alone(path: str, inner: dict) -> None:
    name = "lambd" if "Lambda" in path else "transforms"
    outer = {"class_path": path, "init_args": {name: [inner] if name == "transforms" else inner}}
    data = {"class_path": "datamodules.Digits", "init_args": {"augment": [outer]}}
    with pytest.raises(
        CheckpointError, match=rf"^augment.{name}: .*{inner['class_path']} (may not be named|is no Tra)"
    ):
        build(data, pl.LightningDataModule)


@pytest.mark.parametrize("kind", [v2.RandomApply, v2.RandomChoice, v2.RandomOrder, v2.Compose])
def test_transforms_of_transforms_survive_a_checkpoint(kind: type) -> None:
    again = build(describe(Digits(augment=[kind([v2.RandomRotation(9), v2.RandomCrop(8, padding=1)])])), Digits)
    assert [type(each) for each in again.augment[0].transforms] == [v2.RandomRotation, v2.RandomCrop]


@pytest.mark.parametrize("place", ["num_classes", "optimizer", "class_names", "encoder.dim"])
def test_where_a_plain_value_is_expected_no_object_is_made(place: str, checkpoint: dict[str, Any]) -> None:
    settings = copy.deepcopy(checkpoint["hyper_parameters"])
    inner = settings if place.count(".") == 0 else settings["encoder"]["init_args"]
    inner[place.rpartition(".")[2]] = {"class_path": "longseq.Softmax", "init_args": {}}
    with pytest.raises(CheckpointError, match=rf"^{place}: no object is expected here, got one of longseq.Softmax"):
        build({"class_path": "longseq.training.Classifier", "init_args": settings}, Classifier)


# Programs that a checkpoint or a configuration would run


def exploits(song: Path) -> dict[str, dict[str, Any]]:
    shell = {
        "entrypoint": "sh", "args": ["-c", f"touch {song}"], "env": {}, "stdout": "/dev/null", "stderr": "/dev/null",
        "local_rank_id": 0, "numa_options": None,
    }  # fmt: skip
    return {
        "program": {
            "class_path": "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
            "init_args": shell,
        },
        "folder": {"class_path": "torch.utils.tensorboard.SummaryWriter", "init_args": {"log_dir": str(song)}},
    }


PLACES = {
    "encoder": lambda c, e: c["hyper_parameters"].update(encoder=e),
    "attention": lambda c, e: c["hyper_parameters"]["encoder"]["init_args"].update(attention=e),
    "projection": lambda c, e: c["hyper_parameters"]["encoder"]["init_args"]["attention"]["init_args"].update(
        projection=e
    ),
    "mix": lambda c, e: c["hyper_parameters"].update(mix=e),
    "number": lambda c, e: c["hyper_parameters"].update(num_classes=e),
    "data": lambda c, e: c.update(data=e),
    "augment": lambda c, e: c["data"]["init_args"].update(augment=[e]),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that this process has started, which may write their file only after the test."""
    started: list[str] = []
    start = subprocess.Popen.__init__

    def noted(self: Any, args: Any, *others: Any, **options: Any) -> None:
        started.append(str(args))
        start(self, args, *others, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    return started


@pytest.mark.parametrize("which", ["program", "folder"])
@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_runs_no_program(place: str, which: str, written, programs, command, tmp_path: Path) -> None:
    song = tmp_path / "song"
    path = written(lambda content: PLACES[place](content, exploits(song)[which]))
    assert importlib.util.find_spec("torch.distributed.elastic.multiprocessing.subprocess_handler")
    for arguments in (
        [*FIT, "--model.init_from", path],
        ["spectrum", "--ckpt_path", path, "--num_inputs", "1"],
        ["test", "--ckpt_path", path],
    ):
        if place in ("data", "augment") and arguments[0] == "fit":
            continue  # a training from these weights ignores the checkpoint's data
        done = command(*arguments)
        assert done.code == 4 and done.error.startswith(f"error: {path}: ")
        assert not list(tmp_path.glob("runs/*"))
    if place not in ("data", "augment"):
        with pytest.raises(CheckpointError, match="may not be named|no object is expected"):
            Classifier.load_from_checkpoint(path)
    assert not song.exists() and not any(str(song) in program for program in programs)


@pytest.mark.parametrize("which", ["program", "folder"])
@pytest.mark.parametrize(
    ("name", "place"),
    # stats takes no model from a configuration, so one place of a model is enough
    [*(("fit", place) for place in PLACES), ("stats", "data"), ("stats", "augment"), ("stats", "encoder")],
)
def test_a_configuration_runs_no_program(
    name: str, place: str, which: str, checkpoint, programs, command, tmp_path
) -> None:
    song = tmp_path / "song"
    config = copy.deepcopy({"hyper_parameters": checkpoint["hyper_parameters"], "data": checkpoint["data"]})
    PLACES[place](config, exploits(song)[which])
    config["model"] = config.pop("hyper_parameters")
    (tmp_path / "hostile.yaml").write_text(yaml.safe_dump(config))
    done = command(name, "--config", tmp_path / "hostile.yaml")
    if name == "fit" or place in ("data", "augment"):
        assert done.code == 2 and done.error.startswith("error: ")
    assert not song.exists() and not any(str(song) in program for program in programs)
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--data.augment+=torchvision.transforms.v2.Lambda", "--data.augment.lambd=datamodules.samples.mix"],
            "data.augment",
        ),
        (
            ["--data.augment+=torchvision.transforms.v2.Lambda", "--data.augment.lambd=datamodules.cache.cache_folder"],
            "data.augment.lambd: datamodules.cache.cache_folder may not be named",
        ),
        (
            ["--trainer.callbacks+=LambdaCallback", "--trainer.callbacks.on_fit_start=longseq.cli.main"],
            "trainer.callbacks.on_fit_start: longseq.cli.before_torch.main may not be named",
        ),
        (["--model.encoder", "longseq.ImageEncoder.from_timm"], "model.encoder: "),
        (["--trainer.callbacks+=longseq.training.Classifier"], "trainer.callbacks"),
        (["--model.mix", "torch.nn.Linear"], "model.mix: torch.nn.Linear may not be named; --allow_class torch if "),
        (["--model.encoder", "my.Encoder"], "model.encoder: my.Encoder may not be named; --allow_class my if you tr"),
        (["--allow_class", "nope.x y"], "allow_class: must be the name of a package, got 'nope.x y'; such as "),
        (["--allow_class", "jsonargparse"], "allow_class: must be the name of a package, got 'jsonargparse'; such as "),
    ],
)
def test_a_function_or_a_class_out_of_place_is_one_line(flags: list[str], said: str, command, tmp_path: Path) -> None:
    done = command(*FIT, *flags)
    assert done.code == 2
    assert done.error.startswith(f"error: {said}") and ";" in done.error
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=train/loss"],
        ["--trainer.callbacks+=pytorch_lightning.callbacks.ModelSummary"],
        ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"],
        ["--trainer.profiler=SimpleProfiler"],
        ["--trainer.strategy=SingleDeviceStrategy", "--trainer.strategy.device=cpu"],
        ["--trainer.plugins=pytorch_lightning.plugins.MixedPrecision", "--trainer.plugins.precision=bf16-mixed",
         "--trainer.plugins.device=cpu"],
        ["--data.augment+=torchvision.transforms.v2.RandomCrop", "--data.augment.size=8", "--data.augment.padding=1"],
    ],
)  # fmt: skip
def test_what_belongs_to_a_training_stays_nameable(flags: list[str], command) -> None:
    done = command(*FIT, *flags)
    assert done.code == 0, done.err


# Checkpoints that hold something else

LAYOUTS = {
    "settings as a string": lambda c: c.update(hyper_parameters="encoder"),
    "settings as a list": lambda c: c.update(hyper_parameters=["encoder"]),
    "settings of another program": lambda c: c.update(hyper_parameters={"encoder": "resnet18", "lr": 0.1}),
    "settings of tensors": lambda c: c["hyper_parameters"].update(learning_rate=torch.tensor(1.0)),
    "settings within themselves": lambda c: c["hyper_parameters"].update(mix=c["hyper_parameters"]),
    "a string as encoder": lambda c: c["hyper_parameters"].update(encoder="ImageEncoder"),
    "a dictionary as encoder": lambda c: c["hyper_parameters"].update(encoder={"layers": 3}),
    "a number as class path": lambda c: c["hyper_parameters"]["encoder"].update(class_path=3),
    "a wrong class path": lambda c: c["hyper_parameters"]["encoder"].update(class_path="longseq..x"),
    "no arguments": lambda c: c["hyper_parameters"]["encoder"].pop("init_args"),
    "no weights": lambda c: c.pop("state_dict"),
    "weights that are none": lambda c: c.update(state_dict={"head.weight": "heavy"}),
    "a string as step": lambda c: c.update(global_step="three"),
}
OF_TRAINING = {
    "no optimizer's state": lambda c: c.pop("optimizer_states"),
    "another optimizer's state": lambda c: c.update(optimizer_states=["x"]),
    "no loops": lambda c: c.update(loops={"fit_loop": 3}),
    "other callbacks": lambda c: c.update(callbacks=dict.fromkeys(c["callbacks"], 3)),
    "other generators": lambda c: c.update(ranks=["x"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_another_layout_is_one_line(layout: str, written, command, tmp_path: Path) -> None:
    path = written(LAYOUTS[layout])
    for arguments in (
        ["test", "--ckpt_path", path],
        ["spectrum", "--ckpt_path", path],
        [*FIT, "--model.init_from", path],
        [*FIT, "--ckpt_path", path],
    ):
        done = command(*arguments)
        assert (done.code, done.err.count("\n")) == (4, 1), done.err[-2000:]
        assert done.error.startswith(f"error: {path}: ") and ";" in done.error
        assert not re.search(r"[{}]|<class|Error", done.error), "a Python repr says nothing to a user"
        assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("layout", OF_TRAINING)
def test_a_checkpoint_that_no_training_can_go_on_from_is_one_line(layout, written, command, tmp_path: Path) -> None:
    path = written(OF_TRAINING[layout])
    done = command(*FIT, "--trainer.max_steps", "4", "--ckpt_path", path)
    assert (done.code, done.err.count("\n")) == (4, 1), done.err[-2000:]
    assert done.error.startswith("error: ")
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["state_dict"]["head.bias"].fill_(float("nan")), "holds weights that are not finite; give another"),
        (lambda c: c.pop("data"), "names no data module; "),
        (lambda c: c.update(data="Digits"), "names no data module; "),
    ],
)
def test_a_spectrum_needs_finite_weights_and_data(change, said: str, written, command) -> None:
    path = written(change)
    done = command("spectrum", "--ckpt_path", path)
    assert (done.code, done.err.count("\n")) == (4, 1), done.err[-2000:]
    assert done.error.startswith(f"error: {path}: {said}")


@pytest.mark.parametrize("sums", [b"", b"\n \n", b"\xff\xfe\x00\x80", None])
def test_a_file_of_sums_that_holds_none_does_not_switch_the_check_off(sums: bytes | None, written, command) -> None:
    path = written()
    beside = path.with_name(f"{path.name}.sha256")
    beside.mkdir() if sums is None else beside.write_bytes(sums)
    done = command("test", "--ckpt_path", path)
    assert (done.code, done.error) == (
        4,
        f"error: {path}: damaged, because its SHA-256 differs from its .sha256 file; give another",
    )


@pytest.mark.parametrize("flags", [["--model.init_from", "no.ckpt"], ["--model.init_from", DIGITS],
                                   ["--model.init_from", "OURS", "--model.encoder.dim", "16"],
                                   ["--trainer.val_check_interval", "1000000"]])  # fmt: skip
def test_a_training_that_did_no_step_leaves_no_run(flags: list[str], written, command, tmp_path: Path) -> None:
    flags = [str(written()) if flag == "OURS" else flag for flag in flags]
    done = command(*FIT, *flags)
    assert done.code in (2, 4) and done.error.startswith("error: ")
    assert not list(tmp_path.glob("runs/*"))
