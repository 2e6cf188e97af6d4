"""Poolings make an input's scores of its tokens' scores, by their formulas and without padding."""

import inspect
import math
from typing import Any

import pytest
import torch

from longseq import Linformer, SpectrogramEncoder, Verma
from longseq.arguments import ArgumentError
from longseq.tasks import Masked, MultiLabel
from longseq.tasks.pooling import make_pooling
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample

POOLS = ["avg", "max", "linear_softmax", "attention"]


def expected(pool: str, pooling, tokens, scores):
    """By the formula, for the scores (n, classes) of one input."""
    if pool == "avg":
        return scores.sum(0) / len(scores)
    if pool == "max":
        return torch.stack([max(column) for column in scores.T])
    if pool == "linear_softmax":
        p = 1 / (1 + torch.exp(-scores))
        pooled = (p * p).sum(0) / p.sum(0)
        return torch.log(pooled / (1 - pooled))
    V, U = pooling.hidden.weight.chunk(2)
    v, u = pooling.hidden.bias.chunk(2)
    logits = torch.stack(
        [pooling.weight.weight[0] @ (torch.tanh(V @ x + v) * torch.sigmoid(U @ x + u)) for x in tokens]
    )
    logits = logits * math.log(len(tokens)) / math.log(1000)
    weights = torch.exp(logits) / torch.exp(logits).sum()
    return weights @ scores


@pytest.mark.parametrize("pool", POOLS)
def test_pooling_is_its_formula_and_passes_over_padding(pool: str) -> None:
    torch.manual_seed(0)
    pooling = make_pooling(pool, 5).double()
    tokens, scores = torch.randn(3, 9, 5, dtype=torch.float64), torch.randn(3, 9, 4, dtype=torch.float64)
    counts = torch.tensor([9, 4, 1])
    outcomes = pooling(tokens, scores, torch.arange(9) < counts[:, None])
    for row, count, its_tokens, its_scores in zip(outcomes, counts, tokens, scores, strict=True):
        torch.testing.assert_close(row, expected(pool, pooling, its_tokens[:count], its_scores[:count]))
    torch.testing.assert_close(pooling(tokens[:1], scores[:1]), outcomes[:1])


def test_linear_softmax_is_finite_where_probabilities_are_far_from_a_half() -> None:
    pooling = make_pooling("linear_softmax", 5)
    for value in (-90.0, 90.0):
        scores = torch.full((1, 7, 2), value, requires_grad=True)
        logits = pooling(torch.zeros(1, 7, 5), scores)
        logits.sum().backward()
        assert logits.isfinite().all() and scores.grad.isfinite().all()
        assert (logits < -80).all() if value < 0 else (logits > 10).all()


def classifier(pool: str | None, task=None) -> Classifier:
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(8000, 0.3, Verma(), num_mels=16, dim=16, depth=1, heads=2)
    model = Classifier(encoder, 4, pool=pool, task=task).double().eval()
    torch.nn.init.normal_(model.head.weight) if task is None else None
    return model


@pytest.mark.parametrize("pool", POOLS)
def test_the_scores_of_a_clip_follow_from_those_of_its_frames(pool: str) -> None:
    model = classifier(pool)
    lengths = torch.tensor([2400, 900])
    inputs = {"waveforms": torch.randn(2, 2400) * (torch.arange(2400) < lengths[:, None]), "lengths": lengths}
    scores, present = model.scores(inputs)
    assert scores.shape == (2, 31, 4) and present.sum(1).tolist() == [31, 12]
    tokens, _ = model.encoder.token_features(inputs)
    torch.testing.assert_close(model(inputs), model.pooling(tokens, scores, present))
    torch.testing.assert_close(model(inputs)[1:], model(inputs["waveforms"][1:, :900]))
    model(inputs).square().sum().backward()
    # at zero gradient of its own: a class's maximum is one token's, and a perceptron of one layer sees every token
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_without_a_pooling_scores_are_those_of_each_frame_as_if_it_were_the_mean() -> None:
    model = classifier(None)
    inputs = torch.randn(2, 2400)
    scores, present = model.scores(inputs)
    features, _ = model.encoder.token_features(inputs)
    assert present is None and torch.equal(scores, model.head(features))


def test_a_pooling_is_kept_in_a_checkpoint_counted_and_carried() -> None:
    model = classifier("attention")
    assert model.hparams["pool"] == "attention"
    assert {"pooling.hidden.weight", "pooling.weight.weight"} <= set(model.state_dict())
    plain = flops_per_sample(classifier(None))
    pooled = flops_per_sample(model)
    # 31 frames in place of one pass the head; each passes the gate too
    assert pooled.forward - plain.forward == 2 * 30 * 16 * 4 + 31 * (2 * 16 * 32 + 2 * 16) + 2 * 31 * 4


def test_an_unknown_pooling_is_refused_and_masked_pretraining_pools_nothing() -> None:
    unchecked: Any = inspect.unwrap(make_pooling)  # under the tests' type checker another error would come first
    with pytest.raises(ArgumentError, match=r"pool.*must be avg, max, linear_softmax or attention, got 'median'"):
        unchecked("median", 16)
    assert classifier("attention", Masked()).pooling is None


def test_several_labels_pool_too() -> None:
    model = classifier("linear_softmax", MultiLabel())
    labels = torch.tensor([[1, 0, 0, 1]])
    loss = model.task.loss(model(torch.randn(1, 2400)), labels, model.loss_weights, 0.0)
    assert loss.isfinite()


def test_a_pooled_model_is_carried_with_its_projections() -> None:
    from longseq import resize

    encoder = SpectrogramEncoder(8000, 0.3, Linformer(5), num_mels=16, dim=16, depth=1, heads=2)
    model = Classifier(encoder, 4, pool="attention")
    torch.nn.init.normal_(model.pooling.weight.weight)
    larger = resize(model, seconds=0.6)
    assert torch.equal(larger.pooling.weight.weight, model.pooling.weight.weight)


def test_masked_pretraining_goes_on_from_masked_pretraining_whatever_the_pooling(command, tmp_path) -> None:
    fit = ["fit", "--config", "image/digits", "--model.task", "Masked", "--model.pool", "attention",
           "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1",
           "--trainer.default_root_dir", tmp_path]  # fmt: skip
    assert command(*fit).code == 0
    done = command(*fit, "--model.init_from", tmp_path / "runs/digits/0/best.ckpt")
    assert done.code == 0, done.err


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_more_tokens_than_float16_can_count_are_pooled(pool: str) -> None:
    scores = torch.full((1, 70_000, 2), 0.5, dtype=torch.float16)
    present = torch.ones(1, 70_000, dtype=torch.bool)
    pooling = make_pooling(pool, 8)
    assert pooling is not None and pooling(scores, scores, present).tolist() == [[0.5, 0.5]]
