"""The approximation of softmax attention, in cases where its error is known."""

import math

import numpy as np
import pytest
import torch

from longseq.reports.approximation import (
    _ways,
    attend,
    attend_by_verma,
    epsilon,
    errors_by_rank,
    random_inputs,
    relative_error,
)


def test_without_shortening_there_is_no_error():
    identity = torch.eye(32, dtype=torch.float64)
    assert relative_error((identity, identity), 32, 8, 4.0, draws=2) < 1e-12
    assert relative_error(_ways(8, 4.0, 1)["mean"](32, 32), 32, 8, 4.0, draws=2) < 1e-12


def test_the_theorems_delta_makes_every_weight_the_same():
    E, F = _ways(8, 4.0, 1)["theorem"](256, 64)
    queries, keys, values = random_inputs(256, 8, 4.0, torch.Generator().manual_seed(0))
    weights = (queries @ (E @ keys).mT).softmax(-1)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 64))
    out = attend(queries, E @ keys, F @ values)
    assert (out - out[0]).abs().max() < 1e-12  # every query gets the same output


def test_means_beat_uniform_weights_on_smooth_sequences_and_training_beats_means():
    errors = {name: relative_error(make(128, 16), 128, 8, 16.0, 4) for name, make in _ways(8, 16.0, 100).items()}
    assert errors["learned"] < errors["mean"] < errors["uniform"]
    assert errors["gaussian"] > errors["mean"]


def test_the_cut_of_rank_k_is_numpys_and_at_k_n_nothing_is_lost():
    found = errors_by_rank(40, [1, 5, 40], 8, 4.0, draws=1)
    queries, keys, values = (t.numpy() for t in random_inputs(40, 8, 4.0, torch.Generator().manual_seed(1)))
    P = np.exp(queries @ keys.T / 8**0.5)
    P /= P.sum(1, keepdims=True)
    U, sigma, Vh = np.linalg.svd(P)
    for k in (1, 5):
        low = (U[:, :k] * sigma[:k]) @ Vh[:k]
        assert found[k][0] == pytest.approx(np.linalg.norm((P - low) @ values) / np.linalg.norm(P @ values))
    assert max(found[40]) < 1e-12


def test_no_shortened_attention_has_a_smaller_error_than_the_best_matrix_of_rank_k():
    """On independent tokens P_low is that best matrix; on smooth ones it is not."""
    ways = {name: make(64, 8) for name, make in _ways(8, 8.0, 60).items() if name != "uniform"}
    low, best = errors_by_rank(64, [8], 8, 8.0, draws=8)[8]
    assert best < low
    assert all(relative_error(pair, 64, 8, 8.0, draws=8) > best for pair in ways.values())
    low, best = errors_by_rank(64, [8], 8, 0.0, draws=8)[8]
    assert low == pytest.approx(best, rel=0.05)


def test_vermas_theorem_leaves_the_queries_alone_and_forgets_the_keys():
    E, F = _ways(8, 4.0, 1)["theorem"](256, 64)
    queries, keys, values = random_inputs(256, 8, 4.0, torch.Generator().manual_seed(0))
    out = attend_by_verma(queries, E @ keys, F @ values)
    mean = (F @ values).mean(0)  # rows of H sum to one
    torch.testing.assert_close(out, mean.expand(256, -1))


def test_the_theorems_k_for_half_an_error_at_512_tokens_is_250():
    assert epsilon(5 * math.log(512), 250) == pytest.approx(0.5, abs=1e-3)
    assert epsilon(9 * math.log(16), 200) == pytest.approx(0.5, abs=2e-3)  # 9 log 16 / (1/8) is 199.6
    assert epsilon(5 * math.log(512), 210) is None  # 27/4 of 5 log 512 is 210.5


def test_inputs_have_variance_one_and_are_smooth_as_asked():
    _, keys, values = random_inputs(2000, 16, 20.0, torch.Generator().manual_seed(0))
    for tokens in (keys, values):
        assert tokens.var().item() == pytest.approx(1, abs=0.2)
        near = (tokens[1:] * tokens[:-1]).mean() / tokens.square().mean()
        assert near.item() == pytest.approx(math.exp(-0.25 / 20**2), abs=0.02)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--k", "[]"], "error: k: must hold one number or more, got []; the defaults are a start"),
        (
            ["--n", "16", "64", "--k", "32"],
            "error: k: must hold a number of at most 16, the shortest n, got [32]; add ",
        ),
    ],
)
def test_a_list_that_cannot_be_is_one_line(flags, said, command):
    done = command("approximation", *flags)
    assert done.code == 2 and done.error.startswith(said)


def test_a_smoothness_below_zero_is_one_line(command):
    done = command("approximation", "--smoothness", "-1")
    assert (done.code, done.error[:44]) == (2, "error: smoothness: must be 0 or more, got -1")


def test_the_report_writes_its_files(command, tmp_path):
    done = command("approximation", "--n", "32", "--k", "4", "8", "--steps", "3", "--draws", "2", "--out", "a")
    assert done.code == 0, done.err
    table = (tmp_path / "a/table.md").read_text()
    header = "| n | k | mean | learned | gaussian | theorem | uniform | P_low | rank k | Verma's theorem |"
    assert f"{header} theorem's epsilon | Verma's epsilon | Verma's without n |" in table
    assert "| none | none |" in table  # 5 log 32 and 9 log 16 are too large for a k of 8
    assert f"{math.sqrt(5 * math.log(32) / 8):.3f}" in table
    assert (tmp_path / "a/approximation.png").stat().st_size > 10_000
