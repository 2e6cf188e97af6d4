"""torchmetrics: what a metric has gathered so far."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def state_of(metric: Metric) -> dict[str, Any]:
    """Copies of everything that a metric has gathered, on the CPU."""
    gathered = {key: _copied(value) for key, value in metric.metric_state.items()}
    return {**gathered, "updates": metric._update_count}


def restore_state(metric: Metric, state: dict[str, Any], device: torch.device) -> None:
    """Give a metric back the state that ``state_of`` returned, so that it goes on from there."""
    for key, value in state.items():
        if key == "updates":
            metric._update_count = value
        else:
            setattr(metric, key, _copied(value, device))


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
