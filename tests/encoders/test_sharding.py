"""Tokens on two and three real processes (gloo, CPU) give the features and gradients of one process."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from shared_by_processes import MECHANISMS, SMALL, cases, loss_of, mixed_features, of_many_tokens

from longseq.arguments import ArgumentError
from longseq.attention import Linformer, Softmax
from longseq.attention.examples import every_mechanism
from longseq.encoders import ImageEncoder
from longseq.encoders.sharding import refuse_unsharded

SCRIPT = Path(__file__).with_name("shared_by_processes.py")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.thorough)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process has computed."""
    folder = tmp_path_factory.mktemp(f"shards{request.param}")
    done = forked.run(SCRIPT, request.param, folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Any, torch.Tensor]]:
    """What one process computes: each encoder with its gradients, and its features."""
    computed = {}
    for name, (encoder, inputs) in cases().items():
        features = encoder(inputs)
        loss_of(features).backward()
        computed[name] = encoder, features.detach()
    return computed


def test_features_and_all_gradients_are_those_of_one_process(
    results: list[dict[str, Any]], alone: dict[str, tuple[Any, torch.Tensor]]
) -> None:
    for name, (encoder, features) in alone.items():
        for of_process in results:
            result = of_process[name]
            assert (result["features"] - features).abs().max() < 1e-10 * features.abs().max(), name
            for weight, parameter in encoder.named_parameters(remove_duplicate=False):
                assert parameter.grad is not None
                difference = (result["gradients"][weight] - parameter.grad).abs().max()
                assert difference < 1e-10 * max(parameter.grad.abs().max(), 1), (name, weight)


def test_bf16_mixed_with_checkpointing_is_that_of_one_process_to_the_rounding_of_bfloat16(
    results: list[dict[str, Any]],
) -> None:
    for name, expected in mixed_features(None).items():
        for of_process in results:
            difference = float((of_process["mixed"][name] - expected).norm() / expected.norm())
            assert 0 < difference < 2**-6, (name, difference)


def test_in_16_mixed_sums_over_more_tokens_than_float16_can_count_stay_finite(results: list[dict[str, Any]]) -> None:
    for name, expected in of_many_tokens(None).items():
        for of_process in results:
            assert (of_process["many"][name] - expected).norm() < 0.01 * expected.norm(), name


def test_a_process_holds_its_own_columns_and_gathers_them_to_the_state_of_one_process(
    results: list[dict[str, Any]], alone: dict[str, tuple[Any, torch.Tensor]]
) -> None:
    encoder, _ = alone["linformer image"]
    assert sum(of_process["linformer image"]["held"] for of_process in results) == 2 * 6 * (7 * 5 + 1)
    assert len({of_process["linformer image"]["held"] for of_process in results}) > 1  # seven rows are dealt unequally
    for of_process in results:
        for name, weight in encoder.state_dict().items():
            assert torch.equal(of_process["linformer image"]["state"][name], weight), name


def test_the_bytes_of_a_step_do_not_grow_with_the_tokens(results: list[dict[str, Any]]) -> None:
    for rank, of_process in enumerate(results):
        few, many = of_process["bytes"]
        assert few == many
        d, k, neighbours = 8, 6, 1 if rank in (0, len(results) - 1) else 2
        of_layers = 2 * 4 * k * (d + 1)  # two layers; E X with the ones of the bias, in float32
        of_halos = 4 * 4 * d * 4 * neighbours  # four convolutions; a row of four tokens
        of_pooling = 4 * (d + 1)
        # a backward pass sends as much as the forward pass
        assert many == 2 * (of_layers + of_halos + of_pooling)


def test_scores_of_a_share_of_the_tokens_are_refused_also_for_events(results: list[dict[str, Any]]) -> None:
    for of_process in results:
        assert len(of_process["refused"]) == 2
        assert all(message.startswith("trainer.strategy: SequenceParallel gives") for message in of_process["refused"])


@pytest.mark.parametrize(
    ("attention", "options", "what"),
    [
        (Softmax(), {}, "attention must meet all tokens in a sum .*context_parallel"),
        (Linformer(4), {"dropout": 0.1}, "dropout must be 0"),
    ],
)
def test_what_needs_all_tokens_at_once_is_refused_by_name(attention: Any, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        refuse_unsharded(ImageEncoder((1, 8, 8), attention, **SMALL, **options))


def test_every_mechanism_that_can_is_compared() -> None:
    def kind(mechanism: Any) -> list[Any]:
        projection = getattr(mechanism, "projection", None) if isinstance(mechanism, Linformer) else None
        options = [getattr(mechanism, name, None) for name in ("sharing", "normalize")]
        return [type(mechanism), type(getattr(mechanism, "k", None)), type(projection), *options]

    compared = [kind(mechanism) for mechanism in MECHANISMS.values()]
    can = []
    for mechanism in every_mechanism():
        with suppress(ArgumentError):
            refuse_unsharded(ImageEncoder((1, 8, 8), mechanism, dim=16, depth=2, heads=4))
            can.append(kind(mechanism))
    assert len(can) > 20 and all(candidate in compared for candidate in can)
