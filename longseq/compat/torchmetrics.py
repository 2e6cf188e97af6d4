"""torchmetrics: what a metric has gathered so far."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def state_of(metric: Metric) -> dict[str, Any]:
    """Copies of everything that a metric has gathered, on the CPU."""
    gathered = {key: _copied(value) for key, value in metric.metric_state.items()}
    return {**gathered, "updates": metric._update_count}


def restore_states(metric: Metric, states: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Give a metric, which has gathered nothing yet, what metrics had gathered together when ``state_of`` returned the
    states, so that it goes on from there."""
    for state in states:
        gathered = {key: _copied(value, device) for key, value in state.items() if key != "updates"}
        metric._update_count += state["updates"]
        if metric._update_count == state["updates"]:
            for key, value in gathered.items():
                setattr(metric, key, value)
        else:
            metric._reduce_states(gathered)


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
