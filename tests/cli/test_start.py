"""How the command line starts: at once if it trains nothing, and from any folder."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

import longseq
from longseq.cli.before_torch import configuration, main, with_configurations
from longseq.cli.command_list import COMMANDS
from longseq.cli.data_commands import Trainer
from longseq.cli.errors import UserError

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from longseq.cli import main
try:
    main(sys.argv[1:])
finally:
    assert not {"torch", "pytorch_lightning", "jsonargparse", "numpy"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--help"], 0, "longseq trains classifiers of images and sound", ""),
        (["-h"], 0, "  sweep          Train a grid of settings with several seeds, and tabulate their accuracies.", ""),
        (["fit", "--help"], 0, "  --data.root DIR                 the folder of the data", ""),
        (["--version"], 0, f"longseq {longseq.__version__}", ""),
        ([], 2, "", "error: command: missing; choose one of fit, validate, "),
        (["--trainer.max_epochs", "1"], 2, "", "error: command: missing; choose one of fit, validate, "),
        (["ft", "--help"], 2, "", "error: ft: no such command; did you mean fit?"),
        (["fit", "--config", "no/such"], 2, "", "error: no/such: no such file; longseq has configurations such"),
        (["test", "-c=x\x1b.yaml"], 2, "", r"error: x\x1b.yaml: no such file; "),
        (["sweep", "--config", "image/digits", "image/dogits"], 2, "", "error: image/dogits: no such file; "),
    ],
)
def test_what_needs_no_torch_does_not_wait_for_it(
    arguments: list[str], code: int, out: str, err: str, tmp_path: Path
) -> None:
    done = forked.run("-c", WITHOUT_TORCH, *arguments, cwd=tmp_path, fresh=True)
    assert (done.returncode, out in done.stdout, done.stderr.startswith(err)) == (code, True, True), done
    assert done.stderr.count("\n") == bool(err)


def test_help_has_a_whole_sentence_for_every_command() -> None:
    sentences = [command.sentence for command in COMMANDS.values()]
    assert all(sentence[0].isupper() and sentence.endswith(".") and " " in sentence for sentence in sentences)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_record_of_a_command_leads_to_what_runs_it(name: str) -> None:
    package = COMMANDS[name].package
    assert callable(getattr(importlib.import_module(f"{package}.{name}") if package else Trainer, name))


def test_a_configuration_is_found_in_the_working_folder_and_then_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = (ROOT / "configs/image/digits.yaml").read_text()
    for name in ("image/digits", "image/digits.yaml", "configs/image/digits.yaml"):
        assert Path(configuration(name)).read_text() == ours
    (tmp_path / "image").mkdir()
    (tmp_path / "image/digits.yaml").write_text("own: true")
    assert configuration("image/digits") == "image/digits.yaml"
    text = '{"data": "Digits"}'
    arguments = ["fit", f"--config={text}", "-c", "image/digits", "--config", "audio/vowels", "--experiment", "image"]
    found = with_configurations(arguments)
    assert found[:4] == ["fit", f"--config={text}", "-c", "image/digits.yaml"]
    assert found[5].endswith("configs/audio/vowels.yaml") and found[6:] == ["--experiment", "image"]
    with pytest.raises(UserError, match=r"^image: no such file"):
        configuration("image")


@pytest.mark.parametrize(
    ("raised", "code", "err"),
    [
        (KeyboardInterrupt(), 130, "SIGINT: stopped; start it again"),
        (ModuleNotFoundError("", name="torch"), 2, f"error: torch: not installed for {sys.executable}; activate "),
    ],
)
def test_what_ends_the_import_of_torch_is_one_line(
    raised: BaseException, code: int, err: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ends:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "longseq.cli.run_command":
                raise raised

    monkeypatch.delitem(sys.modules, "longseq.cli.run_command", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Ends(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main(["stats", "--data", "Digits"])
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(err)


@pytest.mark.thorough
def test_a_reader_that_goes_away_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT}/train.py stats --data Digits | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (141, "")


# The installed package


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment where only our wheel is installed; it uses the libraries of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheel", folder / "source"]
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    packed = [name for name in files if name and not name.startswith(("docs/", "tests/"))]
    listed = "\n".join(packed)
    (folder / "source").mkdir()
    subprocess.run(
        ["tar", "-cf", folder / "source.tar", "-T", "-"], cwd=ROOT, input=listed, text=True, check=True
    )  # a build in the repository would leave folders behind there
    subprocess.run(["tar", "-xf", folder / "source.tar", "-C", folder / "source"], check=True)
    subprocess.run(wheel, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    libraries = Path(pytest.__file__).parents[1]
    (packages / "libraries.pth").write_text(f"{libraries}\n")
    built = next((folder / "wheel").glob("longseq-*.whl"))
    python = folder / "env/bin/python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", built], check=True)
    return folder / "env/bin/longseq"


def run_installed(script: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([script, *arguments], cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.thorough
def test_the_wheel_trains_by_a_name_beside_a_folder_called_datamodules(installed: Path, tmp_path: Path) -> None:
    for name in ("datamodules", "longseq"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    (tmp_path / "mine.py").write_text(
        "from datamodules import Digits\n\nclass Mine(Digits):\n    def __init__(self, **common):\n"
        "        super().__init__(**common)\n"
    )
    short = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.max_steps", "1"]
    short += ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    own = ["--data", "mine.Mine", "--allow_class", "mine"]
    done = run_installed(installed, tmp_path, "fit", "--config", "image/digits", *own, *short, "--experiment", "own")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/own/0/metrics.json").is_file()


@pytest.mark.thorough
def test_the_wheel_knows_its_version_its_types_and_its_configurations(installed: Path, tmp_path: Path) -> None:
    assert run_installed(installed, tmp_path, "--version").stdout == f"longseq {longseq.__version__}\n"
    (package,) = installed.parents[1].glob("lib/python*/site-packages/longseq")
    assert (package / "py.typed").is_file() and (package.parent / "datamodules/py.typed").is_file()
    names = {str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {str(path.relative_to(package / "configs")) for path in (package / "configs").rglob("*.yaml")} == names
