"""What a compiled training step asks of an H100, by TorchInductor's own plan: kernels, bytes, and graph breaks."""

import csv
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/schedule.py"
# the plan is read from classes inside TorchInductor, which change from release to release
REASON = "benchmarks/schedule.py reads TorchInductor's plan as of torch 2.14"
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(torch.__version__ < "2.14", reason=REASON)]


def plans(out: Path, *flags: Any) -> list[dict[str, str]]:
    """The rows of the script's table. It replaces functions of torch.cuda, so it runs in a process of its own."""
    done = forked.run(SCRIPT, *flags, "--out", out, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(csv.DictReader((out / "table.csv").open()))


def test_a_block_is_one_graph_of_few_kernels_and_little_traffic(tmp_path: Path) -> None:
    n, d, k = 16384, 768, 128
    size = ["--n", n, "--width", d, "--local", "no"]
    (block,) = plans(tmp_path, "--parts", "block", "--attention", "Linformer", *size)
    assert (block["graphs"], block["breaks"]) == ("1", "0")
    # forward: queries, output and MLP; E X; keys and values. The backward pass has two products for each
    products = 3 * (20 * n * d * d + 2 * n * k * d + 4 * k * d * d)
    assert float(block["products, GFLOP"]) == pytest.approx(products / 1e9, rel=5e-3)
    assert int(block["kernels"]) <= 54
    assert int(block["elementwise, MB"]) <= 1755


def test_local_mixing_adds_few_kernels(tmp_path: Path) -> None:
    size = ["--n", 16384, "--width", 768, "--local", "yes"]
    (block,) = plans(tmp_path, "--parts", "block", "--attention", "Linformer", *size)
    assert block["graphs"] == "1"
    assert int(block["kernels"]) <= 67
    assert int(block["elementwise, MB"]) <= 1730
    # the kernel reads and writes the grid: twice forward, and twice for the tokens' and the weights' gradients
    assert int(block["attention and others"]) == 2 + 2 * 3


@pytest.mark.parametrize(("precision", "kernels", "megabytes"), [("bf16-residual", 52, 1352), ("bf16-true", 39, 1248)])
def test_tokens_in_bfloat16_save_a_quarter_of_the_traffic(
    precision: str, kernels: int, megabytes: int, tmp_path: Path
) -> None:
    """The weights too in bf16-true, where nothing is cast."""
    size = ["--n", 16384, "--width", 768, "--local", "no", "--precision", precision]
    (block,) = plans(tmp_path, "--parts", "block", "--attention", "Linformer", *size)
    assert (block["casts"] == "0") is (precision == "bf16-true")
    assert int(block["kernels"]) <= kernels
    assert int(block["elementwise, MB"]) <= megabytes


@pytest.mark.parametrize(
    ("part", "attention", "kernels", "graphs"),
    [
        ("block", "Verma", 67, 1),
        ("image", "Linformer", 100, 1),
        ("image", "Verma", 110, 1),
        ("sound", "Linformer", 110, 1),
    ],
)
def test_a_step_has_few_kernels(tmp_path: Path, part: str, attention: str, kernels: int, graphs: int) -> None:
    size = ["--n", 4096, "--width", 768, "--depth", 1, "--local", "no"]
    (step,) = plans(tmp_path, "--parts", part, "--attention", attention, *size)
    assert int(step["kernels"]) <= kernels
    assert int(step["graphs"]) <= graphs
