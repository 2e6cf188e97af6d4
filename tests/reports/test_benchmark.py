"""The efficiency tables: values computed from cells that follow a known law, and real cells."""

import csv
import importlib
from dataclasses import replace

import pytest
import torch

from longseq.reports.benchmark import (
    Measured,
    _crossover,
    _crossovers,
    _extrapolated,
    _fits,
    _largest_batches,
    _tables,
)
from longseq.reports.cell import MECHANISMS, WITH_K, Cell, Result, benchmark_cell, benchmark_cell_apart, largest

module = importlib.import_module("longseq.reports.benchmark")  # a plain import gives the function of that name
CELL = Cell("linformer", 80, 16, 1, 16, 2, 2, "train", "cpu", "32", 2)


def measured(name: str, n: int, seconds: float, peak: float, k: int | None = None, predicted: bool = False) -> Measured:
    return Measured(replace(CELL, mechanism=name, n=n, k=k), seconds, 0.0, float(peak), predicted)


LENGTHS = [256, 512, 1024, 2048]
# softmax takes n^2 microseconds and n^2 bytes; Linformer takes 1000 n of both
LAW = [row for n in LENGTHS for row in (
    measured("softmax", n, 1e-6 * n**2, n**2), measured("linformer", n, 1e-3 * n, 1e3 * n, k=16)
)]  # fmt: skip
COLUMNS = [("softmax", None), ("linformer", 16)]


def test_a_power_law_is_carried_on():
    softmax = [row for row in LAW if row.cell.k is None]
    assert _extrapolated(softmax, "seconds", 8192) == pytest.approx(1e-6 * 8192**2)
    assert _extrapolated(softmax[:1], "seconds", 8192) is None
    # a predicted value must not be the basis of another prediction
    assert _extrapolated([*softmax[:1], replace(softmax[1], is_predicted=True)], "seconds", 8192) is None


def test_exponents_and_crossover_are_those_of_the_law():
    assert "| softmax | 1024..2048 | 2.00 | 2.00 |" in _fits(LAW, COLUMNS)
    assert "| linformer k=16 | 1024..2048 | 1.00 | 1.00 |" in _fits(LAW, COLUMNS)
    assert "| linformer k=16 |  | 1000 |" in _crossovers(LAW, COLUMNS)
    later = [replace(row, is_predicted=row.cell.n > 512) for row in LAW]
    assert "| linformer k=16 |  | 1000* |" in _crossovers(later, COLUMNS)
    assert "| linformer k=16 |  | beyond 512 |" in _crossovers([row for row in LAW if row.cell.n < 1024], COLUMNS)
    assert _crossover([(256, -1.0), (512, -0.1)], {512}) == "beyond 512*"
    assert _crossover([(256, 0.1), (512, 1.0)]) == "256 or less"


def test_the_table_says_what_is_saved_and_what_is_predicted():
    rows = [
        *LAW,
        measured("softmax", 4096, 16.8, 4096**2, predicted=True),
        measured("linformer", 4096, 4.1, 4.1e6, 16),
    ]
    table = _tables(rows, COLUMNS)
    assert "| n | softmax, ms | linformer k=16 |" in table
    assert "| 2048 | 4.19e+03 | 2.0x |" in table
    assert "| 4096 | 1.68e+04* | 4.1x* |" in table


@pytest.mark.parametrize(("limit", "found"), [(1, 1), (3, 3), (100, 96), (1000, 960), (1023, 960)])
def test_the_largest_batch_is_found_within_an_eighth(limit, found):
    assert largest(lambda batch: batch <= limit, 1) == found
    assert limit * 7 / 8 <= found <= limit


def test_the_table_has_the_largest_batches_where_a_gpu_told_them():
    assert _largest_batches(LAW, COLUMNS) == ""
    rows = [replace(row, largest_batch=batch) for row, batch in zip(LAW[:2], (3, 40), strict=True)]
    assert "| 256 | 3 | 40 |" in _largest_batches(rows, COLUMNS)


# to train, each runs forward too
@pytest.mark.parametrize(("name", "direction"), [("softmax", "forward"), *((name, "train") for name in MECHANISMS)])
def test_a_cell_of_every_mechanism_is_measured(name, direction):
    k = 16 if name in WITH_K else None
    result = benchmark_cell(replace(CELL, mechanism=name, k=k, direction=direction))
    assert len(result.seconds) == 2 and min(result.seconds) > 0


def test_softmax_written_out_is_softmax_and_keeps_its_n_by_n_weights():
    torch.manual_seed(0)
    written = replace(CELL, mechanism="softmax-written", k=None).blocks().double()
    fused = replace(CELL, mechanism="softmax", k=None).blocks().double()
    fused.load_state_dict(written.state_dict())
    tokens = torch.randn(1, 64, 16, dtype=torch.float64)
    torch.testing.assert_close(written(tokens), fused(tokens))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        written(tokens)
    assert any(shape[-2:] == (64, 64) for shape in kept)


def test_linformer_written_out_is_linformer_and_at_k_n_keeps_what_softmax_keeps():
    def kept(cell: Cell) -> set[int]:
        """Numbers of the n x k matrices of weights that a layer keeps for its backward pass."""
        sizes: set[int] = set()

        def keep(t: torch.Tensor) -> torch.Tensor:
            if t.ndim > 2 and t.shape[-2:] == (64, cell.k or 64):
                sizes.add(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            cell.blocks()[0].attn(torch.randn(1, 64, 16, requires_grad=True))
        return sizes

    torch.manual_seed(0)
    written = replace(CELL, mechanism="linformer-written", n=64, k=20)
    ours, plain = written.blocks().double(), replace(written, mechanism="linformer").blocks().double()
    plain.load_state_dict(ours.state_dict())
    tokens = torch.randn(1, 64, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(tokens), plain(tokens))
    assert kept(written) == {2 * 64 * 20}
    assert {2 * 64 * 64} <= kept(replace(written, k=64)) and kept(replace(written, mechanism="linformer")) == set()
    assert kept(replace(CELL, mechanism="softmax-written", n=64, k=None)) == {2 * 64 * 64}


def test_a_report_measures_predicts_and_writes_its_files(tmp_path, monkeypatch, capsys):
    def told(cell: Cell) -> Result:
        return Result([1e-6 * cell.n**2 if cell.k is None else 1e-3 * cell.n] * 3, 1000 * cell.n)

    monkeypatch.setattr(module, "benchmark_cell_apart", told)
    module.benchmark(
        n=[256, 512, 1024, 4096], k=[64], mechanisms=["softmax", "linformer"], dim=16, seconds_per_step=1.1,
        out=str(tmp_path / "report"),
    )  # fmt: skip
    with open(tmp_path / "report/table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["n"], row["mechanism"], row["predicted"]) for row in rows][-2:] == [
        ("4096", "softmax", "1"), ("4096", "linformer", "1")
    ]  # fmt: skip
    assert float(rows[-2]["seconds"]) == pytest.approx(1e-6 * 4096**2)
    assert (tmp_path / "report/benchmark.png").stat().st_size > 10_000
    assert "Time saved against softmax" in (tmp_path / "report/table.md").read_text()
    assert "Faster from n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mechanisms", "lineformer"], "mechanisms: must be some of softmax-written, "),
        (["--heads", "3"], "heads: must divide dim, but 3 does not divide 256"),
        (["--n", "0", "512"], "n: must be positive, got 0"),
        (["--n", "[]"], "n: must hold one number or more, got []; the defaults are a start"),
        (["--n", "[64,64,128]"], "n: must hold each number once, got [64, 64, 128]; leave out the second one"),
        (["--direction", "sideways"], "direction: got sideways; give"),
        (["--deph", "3"], "deph: no such option; did you mean depth?"),
    ],
)
def test_a_flag_that_cannot_be_is_one_line(flags, said, command):
    done = command("benchmark", *flags)
    assert done.code == 2
    assert said in done.error


def test_a_cell_that_does_not_fit_has_no_figures(forked_reports):
    assert benchmark_cell_apart(replace(CELL, mechanism="softmax-written", n=1_000_000, direction="forward")) is None


def test_a_cell_that_fails_says_why(forked_reports):
    with pytest.raises(RuntimeError, match="a cell failed: KeyError: 'softmax-writen'"):
        benchmark_cell_apart(replace(CELL, mechanism="softmax-writen"))
