"""The spectrum: context matrices match their formulas; shares are right where the singular values are known."""

import importlib
from pathlib import Path

import pytest
import torch
import yaml

from longseq import ImageEncoder, Linformer, Mean, Nystromformer, Softmax, SpectrogramEncoder, Verma
from longseq.reports.spectrum import context_matrices, cumulative, ranks, stacked
from longseq.training import Classifier

module = importlib.import_module("longseq.reports.spectrum")  # a plain import gives the function of that name
DIGITS = str(Path(__file__).parents[2] / "configs/image/digits.yaml")


def model_with(mechanism) -> Classifier:
    torch.manual_seed(0)
    return Classifier(ImageEncoder((1, 4, 4), mechanism, dim=8, depth=2, heads=2), 3).eval()


@pytest.mark.parametrize("mechanism", [Softmax(), Linformer(5), Verma(), Verma(5)])
def test_the_context_matrix_takes_values_to_outputs_and_its_rows_sum_to_one(mechanism):
    model = model_with(mechanism)
    found = list(context_matrices(model, torch.randint(0, 256, (1, 1, 4, 4)).byte()))
    k = getattr(mechanism, "k", None) or 16
    assert [tuple(P.shape) for P, _ in found] == [(2, 16, k)] * 2
    for P, logits in found:
        torch.testing.assert_close(P.sum(-1), torch.ones(2, 16, dtype=torch.float64))
        if not isinstance(mechanism, Verma):
            torch.testing.assert_close(P, logits.softmax(-1))
        else:
            assert torch.linalg.matrix_rank(P).max() <= 4  # c, the number of channels of a head
    assert all(layer.attn.formula.__module__.startswith("longseq.attention") for layer in model.encoder.trunk.blocks)


def test_a_formula_with_weights_of_its_own_is_asked_in_float64():
    found = context_matrices(model_with(Nystromformer(5, kernel_size=3)), torch.randint(0, 256, (1, 1, 4, 4)).byte())
    assert [(tuple(P.shape), P.dtype) for P, _ in found] == [((2, 16, 16), torch.float64)] * 2


@pytest.mark.parametrize("mechanism", [Linformer(5), Linformer(5, projection=Mean()), Verma(5)])
def test_a_clip_shorter_than_the_longest_has_matrices_of_its_own_length(mechanism):
    model = Classifier(SpectrogramEncoder(8000, 0.2, mechanism, num_mels=8, dim=8, depth=2, heads=2), 3).eval()
    clip = {"waveforms": torch.randn(1, 700), "lengths": torch.tensor([700])}
    for P, _ in context_matrices(model, clip):
        assert P.shape[:2] == (2, 9)
        torch.testing.assert_close(P.sum(-1), torch.ones(2, 9, dtype=torch.float64))


def test_every_layer_and_head_may_have_its_own_k():
    model = model_with(Linformer([[5, 3], [2, 4]], sharing="none"))
    found = list(context_matrices(model, torch.randint(0, 256, (1, 1, 4, 4)).byte()))
    assert [tuple(P.shape) for P, _ in found] == [(2, 16, 5), (2, 16, 4)]
    ranks = [torch.linalg.matrix_rank(logits).tolist() for _, logits in found]
    assert ranks == [[4, 3], [2, 4]]  # a rank is at most c = 4
    for P, _ in found:
        torch.testing.assert_close(P.sum(-1), torch.ones(2, 16, dtype=torch.float64))
    shares = stacked([cumulative(P) for P, _ in found])
    assert shares.shape == (2, 2, 5) and (shares[0, 1, 2:] > 1 - 1e-12).all() and (shares[1, 0, 1:] > 1 - 1e-12).all()


def test_shares_are_those_of_the_singular_values():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(2, 20, 20, dtype=torch.float64))[0] for _ in range(2))
    values = torch.tensor([8.0, 4, 2, 1, 1] + [0] * 15, dtype=torch.float64)
    shares = cumulative(left @ torch.diag(values) @ right)
    assert shares[0, :5].tolist() == pytest.approx([0.5, 0.75, 0.875, 0.9375, 1.0])


def test_softmax_raises_the_rank_of_the_logits_from_the_channels_to_the_tokens():
    """512 tokens and 64 channels, as Bakouch and Leconte have it; 16 tokens and 4 channels in a model."""
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 1, 512, 64, dtype=torch.float64)
    logits = queries @ keys.mT / 8
    curves = [cumulative(matrix) for matrix in (logits, logits.softmax(-1))]
    assert [ranks(curve).item() for curve in curves] == [64, 512]
    assert [int((curve < 0.9).sum()) + 1 for curve in curves] == [55, pytest.approx(300, abs=15)]
    for P, logits in context_matrices(model_with(Softmax()), torch.randint(0, 256, (1, 1, 4, 4)).byte()):
        assert ranks(cumulative(logits)).tolist() == torch.linalg.matrix_rank(logits).tolist() == [4, 4]
        assert ranks(cumulative(P)).tolist() == torch.linalg.matrix_rank(P).tolist()


def test_the_randomised_shares_are_lower_bounds_and_close(monkeypatch):
    torch.manual_seed(0)
    matrix = torch.randn(1, 200, 5, dtype=torch.float64) @ torch.randn(1, 5, 200, dtype=torch.float64)
    matrix = matrix + 1e-3 * torch.randn(1, 200, 200, dtype=torch.float64)
    exact = cumulative(matrix)
    monkeypatch.setattr(module, "EXACT", 100)
    monkeypatch.setattr(module, "_LEADING", 20)
    bound = cumulative(matrix)
    assert (bound <= exact[:, :20] + 1e-9).all()
    assert (exact[:, :20] - bound).max() < 0.02


def train(command, attention, *flags):
    small = ["--model.encoder.attention", attention, "--model.encoder.dim", "16", "--model.encoder.depth", "2"]
    short = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    assert command("fit", "--config", DIGITS, *small, *short, *flags).code == 0


def test_a_trained_model_gets_a_table_a_figure_and_a_linformer(command, tmp_path):
    train(command, "Softmax")
    done = command("spectrum", "--ckpt_path", "runs/digits/0/last.ckpt", "--num_inputs", "2")
    assert done.code == 0, done.err
    assert "Softmax, 64 tokens, mean over 2 inputs of the test split of Digits" in done.out
    assert "| rank of P | rank of the logits |" in done.out and "| 4 |\n" in done.out  # channels of a head
    suggested = yaml.safe_load((tmp_path / "spectrum/linformer.yaml").read_text())
    assert suggested["class_path"] == "Linformer" and len(suggested["init_args"]["k"]) == 2
    assert all(1 <= k <= 64 for k in suggested["init_args"]["k"])
    assert (tmp_path / "spectrum/spectrum.png").stat().st_size > 10_000
    train(command, "Linformer", f"--model.encoder.attention.k={suggested['init_args']['k']}")
    done = command("spectrum", "--ckpt_path", "runs/digits/1/last.ckpt", "--num_inputs", "2")
    assert done.code == 0, done.err
    assert command("spectrum", "--ckpt_path", "no.ckpt").code == 4


def test_it_needs_no_more_of_the_data_than_the_contract_names(command, monkeypatch):
    class Contract:
        def __init__(self, data):
            self.setup, self.splits = data.setup, data.splits

    train(command, "Softmax")
    read = module.model_and_data
    monkeypatch.setattr(module, "model_and_data", lambda *given: (read(*given)[0], Contract(read(*given)[1])))
    done = command("spectrum", "--ckpt_path", "runs/digits/0/last.ckpt", "--num_inputs", "1")
    assert done.code == 0, done.err


def test_what_too_few_singular_values_are_known_of_is_said_to_need_more(command, tmp_path, monkeypatch):
    train(command, "Softmax")
    monkeypatch.setattr(module, "EXACT", 32)
    monkeypatch.setattr(module, "_LEADING", 4)
    flags = ["--num_inputs", "2", "--energy", "0.999"]
    done = command("spectrum", "--ckpt_path", "runs/digits/0/last.ckpt", *flags)
    assert done.code == 0, done.err
    assert "| > 4 |" in done.out and "Linformer" not in done.out
    assert not (tmp_path / "spectrum/linformer.yaml").exists()


def test_vermas_rank_is_no_advice_on_k(command, tmp_path):
    train(command, "Verma", "--model.encoder.attention.k", "12")
    (tmp_path / "spectrum").mkdir()
    (tmp_path / "spectrum/linformer.yaml").write_text("of another model")
    done = command("spectrum", "--ckpt_path", "runs/digits/0/last.ckpt", "--num_inputs", "2")
    assert done.code == 0, done.err
    assert "Verma, 64 tokens, mean over 2 inputs" in done.out and "Linformer" not in done.out
    assert not (tmp_path / "spectrum/linformer.yaml").exists()
