"""Fixtures for tests in several folders: real data, and the command line as a user runs it."""

import gc
import importlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import forked
import jaxtyping
import pytest
from needs import skip_without_needs

ROOT = Path(__file__).parents[1]
WHOLE = {"cli", "deploy", "docs", "faults", "reports", "test_accuracy.py", "test_configs.py"}  # commands: train, export

TrainPy = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:  # this process does not only hand tests to workers
        # import these before longseq: its type-checking hook recompiles every module imported while it is active
        for name in forked.LIBRARIES:
            importlib.import_module(name)
        import torch

        absent_devices = () if os.environ.get("TESTS_GPU") else (torch.cuda, torch.xpu, torch.mtia)
        for absent in absent_devices:  # each would keep every seed for later, with a stack trace
            absent.manual_seed_all = lambda seed: None
    forked.sync_nothing()
    if not os.environ.get("TESTS_GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # only a CPU gives the same results bit for bit
    os.environ["LONGSEQ_CACHE"] = tempfile.mkdtemp(prefix="longseq-cache-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files of few tests first, because their tests take longest: the last tests are short ones, so no process
    waits long for another's last test."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path])
    gc.freeze()  # a collection would need half a second to scan what is imported, which stays anyway
    gc.set_threshold(20_000, 20)  # models are made and dropped by the thousand: Python's 700 take a tenth of the time


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_without_needs(item)


def pytest_unconfigure() -> None:
    forked.stop()
    shutil.rmtree(os.environ["LONGSEQ_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """Restore the environment, which Lightning's strategies change: a leftover LOCAL_RANK would make the processes
    of a later test wait for ranks that never come."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def blank_pictures() -> None:
    """Let the pictures of trainings be blank, those of shared fixtures too."""
    forked.draw_nothing()


@pytest.fixture(autouse=True)
def pictures_where_they_are_looked_at(request: pytest.FixtureRequest, environment_of_its_own: None) -> None:
    """Draw the pictures of trainings only in tests that are marked with ``draws``."""
    if request.node.get_closest_marker("draws"):
        os.environ[forked.DRAWS] = "1"


@pytest.fixture
def train_py(tmp_path: Path) -> TrainPy:
    """Run ``python train.py ...`` in its own process, with its runs under tmp_path."""

    def run(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        result = forked.run(ROOT / "train.py", *arguments, cwd=tmp_path, timeout=1000)
        assert result.returncode == expect, result.stdout[-2000:] + result.stderr[-4000:]
        return result

    return run


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The last line of the errors: the one line that tells the user of a mistake."""
        assert "Traceback" not in self.err
        return self.err.strip().split("\n")[-1]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run ``python train.py ...`` in this process, which saves the seconds that Python takes to start."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        from longseq.cli import main

        code = 0
        with warnings.catch_warnings():
            try:
                main([str(argument) for argument in arguments])
            except SystemExit as exit:
                code = int(exit.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture(autouse=True)
def shapes_are_checked_where_parts_are_tested(request: pytest.FixtureRequest) -> None:
    """Leave whole commands unchecked, as a user runs them: the checks of `make thorough` take a tenth of their time for
    calls that the tests of the parts make as well. A traced model must be unchecked: beartype does not take a traced
    length, a torch.SymInt, for int, and checks are traced slowly."""
    place = request.path.relative_to(ROOT / "tests").parts[0]
    jaxtyping.config.update("jaxtyping_disable", place in WHOLE)


@pytest.fixture
def exports() -> Iterator[None]:
    """Collect what traces leave: one that fails leaves copies of the encoders' classes until they are collected, and a
    later command line would find two classes of one name."""
    yield
    gc.collect()


@pytest.fixture
def forked_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes in which reports measure and train, which saves the seconds that Python takes to start."""

    def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
        option, module, *others = arguments
        assert option == "-m"
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        return forked.run("-c", code, *others, cwd=Path.cwd())

    for user in ("processes", "sweep"):
        monkeypatch.setattr(f"longseq.reports.{user}.run_python", run_python)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets that LONGSEQ_DATA names."""
    folder = os.environ.get("LONGSEQ_DATA")
    if not folder:
        sets = "free-spoken-digit-dataset/, MNIST/, tiny-imagenet-200/, SpeechCommands/ and ESC-50-master/"
        pytest.skip(f"set LONGSEQ_DATA to a folder that holds {sets}")
    return Path(folder)


@pytest.fixture(scope="session")
def few_of_tiny_imagenet(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten training images of every class of Tiny ImageNet, and all others: thousands would take seconds to open."""
    whole, few = real_data / "tiny-imagenet-200", tmp_path_factory.mktemp("few") / "tiny-imagenet-200"
    for path in sorted((whole / "train").rglob("*_1?.JPEG")):
        link = few / path.relative_to(whole)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    for name in ("val", "wnids.txt", "words.txt"):
        (few / name).symlink_to(whole / name)
    return few.parent
