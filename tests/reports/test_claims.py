"""benchmarks/claims.py and claims_of_cost.py, at small sizes, in cases where the answer is known."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from longseq.attention import LSTM, Linformer, NoAttention, Verma

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("claims")


@pytest.fixture
def costs(script: ModuleType) -> ModuleType:
    return importlib.import_module("claims_of_cost")


def numbers(cell: str) -> float:
    return float(cell.split(" ")[0])


def test_random_projections_keep_what_the_lemma_says_and_not_what_the_theorem_needs(script):
    """At n = 512 the theorem's own k is 250; the error of u R' R w is |u| |w| / sqrt(k), so sqrt(n / k) of u w'."""
    _, ((n, k, kept, needed, error, expected, _, zeros),), _ = script.lemma([512], draws=2, rows=16)
    assert (n, k) == (512, 250)
    assert numbers(kept) > 0.99 and numbers(needed) < 0.5
    assert numbers(zeros) > 0.99  # |u w'| is about |u| |w| / sqrt(n)
    assert numbers(error) == pytest.approx(float(expected), rel=0.2) and float(expected) == pytest.approx(
        1.43, abs=0.01
    )


def test_the_rank_of_random_logits_is_the_channels_and_that_of_their_softmax_the_tokens(script):
    _, rows, _ = script.rank(64, 8, draws=2)
    assert [row[1].split(" ")[0] for row in rows] == ["8", "64"]


def test_pieces_keep_their_mean_when_they_are_reduced_and_windows_lose_nothing_at_k_n(script):
    large, small = script.photographs(32), script.photographs(8)
    assert large.shape == (30, 3, 32, 32)
    torch.testing.assert_close(large.mean((2, 3)), small.mean((2, 3)))
    assert script.error_of_means(small, 64, seed=0) < 1e-6 < script.error_of_means(small, 16, seed=0)


def test_an_lstm_takes_its_steps_one_after_another_and_shortened_attention_all_at_once(costs):
    short, long = (costs.chain(LSTM(), n) for n in (16, 32))
    assert 16 <= short < long == pytest.approx(2 * short, rel=0.1)
    for mechanism in (Linformer(4), Verma(4), NoAttention()):
        assert costs.chain(mechanism, 16) == costs.chain(mechanism, 32) < 16


def test_matrix_products_are_nearly_all_flops_of_a_block(costs):
    """By hand: 24 n d^2 + 4 n^2 d forward in products, and three times that in training."""
    _, rows, _ = costs.products(n=64, dim=64, heads=2, repeats=1)
    share = float(rows[0][1].rstrip("%")) / 100
    of_products = 3 * (24 * 64 * 64**2 + 4 * 64**2 * 64)
    others = of_products * (1 / share - 1)
    assert 64 * 64 * 30 < others < 64 * 64 * 600  # FLOPs of a few dozen to a few hundred passes over n d numbers


def test_times_against_k_are_those_of_softmax_for_softmax(costs):
    _, rows, _ = costs.time_by_k([1, 16], n=16, dim=8, rounds=3)
    assert [row[0] for row in rows] == ["softmax", "Linformer, k = 1", "Linformer, k = 16"]
    assert rows[0][2] == "1.00 (1.00 to 1.00)" and all(float(row[1]) > 0 for row in rows)


def test_times_of_blockwise_attention_stand_beside_both_forms_of_softmax(costs):
    _, rows, _ = costs.blockwise([16], dim=8, heads=2, rounds=3)
    assert [row[1] for row in rows] == ["softmax", "softmax, written out", "blockwise, 2 blocks", "blockwise, 3 blocks"]
    assert rows[0][3] == rows[1][4] == "1.00 (1.00 to 1.00)" and all(float(row[2]) >= 0 for row in rows)


def test_blocks_of_a_cell_get_the_attention_that_is_timed(costs):
    cell = costs.Cell("softmax", 16, None, 1, 8, 2, 2, "train", "cpu", "32", 1)
    shifts = [block.attn.formula.heads_of_shifts for block in costs.plugged(cell, costs.Blockwise(2))]
    assert shifts == [[1, 1], [1, 1]]
