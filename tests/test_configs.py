"""Every YAML file loads against the real signatures, and a short fit of each experiment runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_networks
import small_sets
import yaml

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted((ROOT / "configs").glob("[aifs]*/*.yaml"))  # audio/, image/, feature/ and signal/
OVERLAYS = sorted((ROOT / "configs/trainer").glob("*.yaml"))
CONTROLS = sorted((ROOT / "configs/controls").glob("*.yaml"))
ON_CPU = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.strategy", "auto"]


# Every experiment's data: the fixture that has it, and the place there.
ROOTS = {
    "image/mnist": ("real_data", ""),
    "audio/fsdd": ("real_data", ""),
    "image/tiny_imagenet": ("few_of_tiny_imagenet", ""),
    "audio/speech_commands": ("real_data", ""),
    "audio/esc50": ("real_data", ""),
    "audio/needles": ("real_data", ""),
    "image/folder": ("few_of_tiny_imagenet", "tiny-imagenet-200/train"),
    "audio/folder": ("real_data", "SpeechCommands/speech_commands_v0.02"),
    "audio/events": ("real_data", "SpeechCommands/speech_commands_v0.02"),
}


def name_of(experiment: Path) -> str:
    return str(experiment.relative_to(ROOT / "configs").with_suffix(""))


def kind_of(experiment: Path) -> str:
    """What decides how an experiment's model is traced; sizes do not."""
    encoder = yaml.safe_load(experiment.read_text())["model"]["encoder"]
    settings = encoder["init_args"]
    parts = (settings.get(name) for name in ("attention", "local"))
    classes = [part["class_path"] if isinstance(part, dict) else part for part in (encoder, *parts)]
    return str((classes, settings.get("any_length"), "patch_size" in settings))


# one experiment of each kind of model, one whose data is always at hand if there is one
BY_DATA = sorted(EXPERIMENTS, key=lambda experiment: name_of(experiment) not in ROOTS)
EXPORTED = list({kind_of(experiment): experiment for experiment in BY_DATA}.values())

# The model has one block, because an export takes its time for each.
SHORT = ["--trainer.max_steps", "3", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1",
         "--model.encoder.depth", "1"]  # fmt: skip


Trained = Callable[[Path], str]


@pytest.fixture
def trained(
    train_py, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Trained:
    """Train an experiment for a few steps, and return the path of its checkpoint."""

    def printed(*arguments: str) -> str:
        done = command(*arguments)
        assert done.code == 0, done.err
        return done.out

    def train(experiment: Path) -> str:
        name = name_of(experiment)
        made = name in ("image/pathfinder", "audio/needles")
        flags = ["--data.num_train", "60", "--data.num_test", "20"] if made else []
        if name in ROOTS:
            fixture, place = ROOTS[name]
            flags += ["--data.root", str(request.getfixturevalue(fixture) / place)]
        if name == "feature/bags":
            flags += ["--data.root", small_sets.feature_folder(tmp_path / "bags", monkeypatch).root]
        if name == "signal/folder":
            flags += ["--data.root", small_sets.signal_folder(tmp_path / "signals", monkeypatch).root]
        if name == "feature/birdnet":  # BirdNET is installed nowhere by itself
            network = tmp_path / "network.onnx"
            small_networks.onnx_of_sounds(network, rate_hz=8000)
            flags += ["--data.root", small_sets.audio_folder(tmp_path / "sounds", monkeypatch).root]
            flags += [
                "--data.network",
                "Onnx",
                "--data.network.file",
                str(network),
                "--data.network.hop_seconds",
                "null",
            ]
            flags += ["--data.network.output", "scores"]
        if name == "image/cifar10":
            flags += ["--data.root", small_sets.cifar10(tmp_path, monkeypatch).root]
        # the checksums of CIFAR-10's small archive are replaced in this process alone
        fit = printed if name == "image/cifar10" else lambda *arguments: train_py(*arguments).stdout
        done = fit("fit", "--config", str(experiment), *SHORT, *flags, "--data.batch_size", "4")
        return done.split("checkpoint:")[1].split()[0]

    return train


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_a_short_fit_of_every_experiment_runs(experiment: Path, trained: Trained) -> None:
    assert Path(trained(experiment)).exists()


@pytest.mark.thorough
@pytest.mark.usefixtures("exports")
@pytest.mark.parametrize("experiment", EXPORTED, ids=lambda path: path.stem)
def test_every_kind_of_model_is_exported(experiment: Path, trained: Trained, command) -> None:
    checkpoint = trained(experiment)
    # in this process, because another one needs two seconds before it can export
    done = command("export", "--ckpt_path", checkpoint, "--tolerance", "1e-5", "--out", f"{checkpoint}.onnx")
    assert done.code == 0 and "on a batch of the test split" in done.out, done.err


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_every_trainer_config_lies_over_an_experiment(overlay: Path, train_py) -> None:
    small = ["--model.encoder.dim", "16"]
    train_py(
        "fit", "--config", str(ROOT / "configs/image/digits.yaml"), "--config", str(overlay), *SHORT, *ON_CPU, *small
    )


# the attention, local mixing, the encoder's pool and the model's: of two experiments, and with each control over them
EXAMPLES = {"image/digits": ("Linformer", None, "avg", None), "audio/needles": ("Verma", "Conv1d", "avg", "max")}
CHANGED = {
    "none": [("NoAttention", None, "avg", None), ("NoAttention", "Conv1d", "avg", "max")],
    "long_kernel": [("NoAttention", "Conv1d", "avg", None), ("NoAttention", "Conv1d", "avg", "max")],
    "static": [("StaticMixing", None, "avg", None), ("StaticMixing", "Conv1d", "avg", "max")],
    "one_key": [("Linformer", None, "avg", None), ("Linformer", "Conv1d", "avg", "max")],
    "features": [("NoAttention", None, "statistics", None), ("NoAttention", "Conv1d", "statistics", None)],
    "softmax": [("Softmax", None, "avg", None), ("Softmax", "Conv1d", "avg", "max")],
}


def parts_of(config: Any) -> tuple[str | None, ...]:
    settings = config["model"]["encoder"]["init_args"]
    parts = (settings.get(name) for name in ("attention", "local"))
    classes = [part and part["class_path"].rpartition(".")[2] for part in parts]
    return (*classes, settings.get("pool", "avg"), config["model"].get("pool"))


@pytest.mark.parametrize("control", CONTROLS, ids=lambda path: path.stem)
def test_every_control_changes_what_its_name_says_and_trains(control: Path, command) -> None:
    for (experiment, before), after in zip(EXAMPLES.items(), CHANGED[control.stem], strict=True):
        assert parts_of(yaml.safe_load((ROOT / f"configs/{experiment}.yaml").read_text())) == before
        printed = command("fit", "--config", experiment, "--config", f"controls/{control.stem}", "--print_config")
        assert parts_of(yaml.safe_load(printed.out)) == after, printed.err
    small = ["--model.encoder.dim", "16", "--baseline", "false", *SHORT]
    done = command("fit", "--config", "image/digits", "--config", f"controls/{control.stem}", *small)
    assert done.code == 0, done.err


@pytest.mark.parametrize("config", EXPERIMENTS + OVERLAYS + CONTROLS, ids=lambda path: path.stem)
def test_every_config_says_what_it_is(config: Path) -> None:
    header = [line for line in config.read_text().split("\n") if line.startswith("# ")]
    assert len(header) >= 2 or (config in OVERLAYS + CONTROLS and header)
    assert config not in CONTROLS or f"--config {config.relative_to(ROOT)}" in header[0]
    assert config in OVERLAYS + CONTROLS or any(f"fit --config {config.relative_to(ROOT)}" in line for line in header)


def test_no_experiment_differs_from_another_by_one_flag_only() -> None:
    def flat(value: object, key: str = "") -> dict[str, object]:
        if not isinstance(value, dict):
            return {key: value}
        return {name: item for part in value for name, item in flat(value[part], f"{key}.{part}").items()}

    loaded = {path: flat(yaml.safe_load(path.read_text())) for path in EXPERIMENTS}
    for path, first in loaded.items():
        for other, second in loaded.items():
            differing = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
            assert path == other or len(differing) > 1 or differing == {".data.class_path"}, (path, other)
