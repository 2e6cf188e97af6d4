"""Two real processes (gloo, CPU) train together, whatever is shared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_ranks.py")
ROOT = Path(__file__).parents[2]


# E and F: a (h, k, n) parameter each in 3 layers; a (k, n) each in 3; one in 3; one
@pytest.mark.parametrize(("sharing", "projections"), [("none", 6), ("headwise", 6), ("key_value", 3), ("layerwise", 1)])
def test_both_ranks_end_with_the_same_weights(sharing: str, projections: int, tmp_path: Path) -> None:
    """With plain ``ddp``, which stops with an error if a parameter got no gradient."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT), sharing, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["projections"] == second["projections"] == projections
    for name, value in first["ends"].items():
        assert torch.equal(value, second["ends"][name]), name
    trained = [name for name in first["ends"] if "project_keys" in name]
    assert trained
    assert all(not torch.equal(first["ends"][name], first["start"][name]) for name in trained)
