"""The confidence interval of a proportion."""

import math


def wilson(right: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval (1927) of a proportion; z = 1.96 gives 95 %."""
    share, spread = right / trials, z * z / trials
    centre = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max((centre - half) / (1 + spread), 0.0), min((centre + half) / (1 + spread), 1.0)
