"""Two real processes (gloo, CPU) train together, with any sharing of projections."""

from pathlib import Path
from typing import Any

import forked
import pytest
import pytorch_lightning as pl
import torch
from two_ranks import model_and_data

SCRIPT = Path(__file__).with_name("two_ranks.py")
ROOT = Path(__file__).parents[2]


def train(*arguments: Any) -> str:
    result = forked.run(SCRIPT, *arguments, cwd=arguments[1])
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def figures_of_one_process(sharing: str, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Loss, accuracy and F1 of validation and test."""
    model, data = model_and_data(sharing)
    model.load_state_dict(state)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (validated,) = trainer.validate(model, datamodule=data, verbose=False)
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    return validated | tested


# "none": E and F are two (h, k, n) parameters in each of 3 layers. "layerwise": one parameter in all.
@pytest.mark.parametrize(("sharing", "projections"), [("none", 6), ("layerwise", 1)], ids=["images", "padded clips"])
def test_both_ranks_end_with_the_same_weights_and_with_the_figures_of_one_process(
    sharing: str, projections: int, tmp_path: Path
) -> None:
    """Plain ``ddp`` stops with an error if a parameter got no gradient. 33 samples are evaluated."""
    train(sharing, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = figures_of_one_process(sharing, first["state"])
    assert first["figures"] == second["figures"] == pytest.approx(alone, abs=1e-6)
    assert first["projections"] == second["projections"] == projections
    for name, value in first["ends"].items():
        assert torch.equal(value, second["ends"][name]), name
    trained = [name for name in first["ends"] if "project_keys" in name]
    assert trained
    assert all(not torch.equal(first["ends"][name], first["start"][name]) for name in trained)


def test_a_bad_step_of_one_rank_is_left_out_on_both(tmp_path: Path) -> None:
    said = train("key_value", tmp_path, 3)
    assert said.count("step 3 left out: its loss is not finite") == 1
    ends = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)["ends"] for rank in (0, 1)]
    for name, value in ends[0].items():
        assert value.isfinite().all() and torch.equal(value, ends[1][name]), name
