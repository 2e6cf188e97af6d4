"""Fixtures that the tests of several data sets use."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of twelve 8x8 images."""
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(12):
            pixels = generator.integers(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number:02}.png")
    return tmp_path / "data"
