"""Every script that a page names runs, at a small size, or has a test elsewhere."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from pages import PAGES, ROOT
from small_sets import SMALL, picture

from datamodules import FSDD, MNIST

ACCURACY = ROOT / "docs/results/accuracy"
SMALL_ENCODER = {"dim": 8, "depth": 1, "heads": 1}
# Of each script its arguments, and the constants in it that are smaller here.
SMALLER: dict[str, tuple[list[str], dict[str, Any]]] = {
    "benchmarks/inputs.py": (["DIR", "--steps", "3", "--rounds", "1"], {"WARM_UP": 1, "SMALL": SMALL_ENCODER}),
    "benchmarks/million.py": (["--sides", "16", "--processes", "2", "--steps", "1", "--out", "out"], {}),
    "benchmarks/profile_step.py": (["--out", "profile.png"], {"SIDE": 12, "STEPS": 1}),
    "benchmarks/reversible.py": (["--side", "12", "--depths", "2", "--out", "out"], {}),
    "benchmarks/scale.py": (["--repeats", "1", "--out", "out"], {}),
    "benchmarks/shards.py": (["60"], {"PER_SHARD": 20}),
    "docs/pretrained_accuracy.py": (["vit", "--root", "DIR", "--epochs", "1"], {"WIDTH": 16, "DEPTH": 2}),
    "docs/accuracy.py": ([str(ACCURACY / "table.csv"), "--out", "accuracy.png"], {}),
    "docs/law.py": (
        [
            *(str(ACCURACY / path) for path in ("law/table.csv", "law/tiny/table.csv")),
            "--names",
            "A",
            "B",
            "--sides",
            "32",
            "64",
            "--seconds",
            "200",
            "--out",
            "law.png",
        ],
        {},
    ),
    "docs/picture.py": (["runs/digits/0", "runs/fsdd/0", "--out", "picture.png"], {}),
    "docs/resize.py": (["runs/digits/0", "--out", "resize.png"], {}),
    "docs/starts.py": (["runs/digits/0", "--k", "4", "--epochs", "1", "--seeds", "1"], {}),
    "docs/timm_models.py": ([], {"FILES": ["deit", "convit"]}),
    "docs/whole.py": ([], {}),
}


ELSEWHERE = {
    "benchmarks/calls.py": "tests/reports/test_calls.py",
    "benchmarks/claims.py": "tests/reports/test_claims.py",
    "benchmarks/claims_of_cost.py": "tests/reports/test_claims.py",
    "benchmarks/elpv.py": "tests/reports/test_wheel_sets.py",
    "benchmarks/controlled.py": "tests/reports/test_controlled.py",
    "benchmarks/few_keys.py": "tests/attention/test_triton_kernels.py",
    "benchmarks/front_door.py": "tests/reports/test_front_door.py",
    "benchmarks/gpu.py": "tests/reports/test_gpu.py",
    "benchmarks/local_mixing.py": "tests/reports/test_local_mixing.py",
    "benchmarks/run_table.py": "tests/reports/test_controlled.py",
    "benchmarks/schedule.py": "tests/training/test_schedule.py",
    "benchmarks/uea.py": "tests/reports/test_wheel_sets.py",
    "benchmarks/verdict.py": "tests/reports/test_verdict.py",
    "docs/costs.py": "tests/attention/test_design.py",
}
NOT_RUN = {
    "benchmarks/peers.py": "its sizes are those of its table: ten minutes of layers and classifiers, `make bench`",
    "benchmarks/bags.py": "starts a process for each row, because it measures its memory",
    "benchmarks/busy.py": "trains in processes of their own beside busy ones, because that is what it measures",
    "benchmarks/frozen.py": "its weights are in two packages that longseq does not install",
    "benchmarks/start.py": "starts Python eight times, because that is what it measures",
}


def test_every_script_of_a_page_is_run_or_has_a_reason() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"python ((?:benchmarks|docs)/\w+\.py)", text))
    assert named | {"docs/picture.py"} == SMALLER.keys() | ELSEWHERE.keys() | NOT_RUN.keys()
    for script, test in ELSEWHERE.items():
        assert Path(script).stem in (ROOT / test).read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("script", SMALLER)
def test_every_script_of_a_page_runs(
    script: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, constants = SMALLER[script]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(place / "runs")
    if "DIR" in arguments:
        for kind in (FSDD, MNIST):
            SMALL[kind](tmp_path, monkeypatch)
        for number in range(40):
            picture(tmp_path / f"tiny-imagenet-200/train/{('cats', 'dogs')[number % 2]}/{number}.png")
    monkeypatch.setattr(sys, "argv", [script, *(str(tmp_path) if word == "DIR" else word for word in arguments)])
    spec = importlib.util.spec_from_file_location("script", ROOT / script)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script", module)  # pickle looks for its functions there
    spec.loader.exec_module(module)
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    said: list[str] = []
    if hasattr(module, "subprocess"):  # forked processes have imported everything
        module.subprocess = SimpleNamespace(
            Popen=lambda words: forked.start(*words[1:], cwd=tmp_path),
            run=lambda words, check, env: said.append(forked.run(*words[1:], cwd=tmp_path).stdout),
        )
    module.main()
    said.append(capsys.readouterr().out)
    assert all(said) or any(tmp_path.glob("*.png")), said


def test_the_ways_to_augment_are_compared_without_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = runpy.run_path(str(ROOT / "benchmarks/inputs.py"))
    smaller = {"IMAGES": 12, "SIDE": 8, "BATCH": 4, "SECONDS": 0.01, "WARM_UP": 1}
    module["main"].__globals__.update(smaller)
    module["RandomImages"].shape = (3, 8, 8)
    monkeypatch.setattr(sys, "argv", ["inputs.py", "--device", "cpu", "--rounds", "1"])
    module["main"]()
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 4 and all(float(rate) > 0 for _, rate in rows)
