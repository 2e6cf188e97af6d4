"""Models of tones that the tests of this folder share, and a recording for them."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from tones import tone, trained


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that tells low tones from high ones, in clips of 0.2 s."""
    return trained(tmp_path_factory.mktemp("tones"))


@pytest.fixture(scope="session")
def free_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for recordings of any length."""
    flags = ["--model.encoder.any_length", "true", "--model.encoder.positions", "none", "--model.pool", "max"]
    return trained(tmp_path_factory.mktemp("tones_of_any_length"), *flags)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Half a second of a low tone, then half a second of a high one, and a tenth more; at another rate."""
    sound = np.concatenate([tone(300, 0.5, 16000), tone(2000, 0.6, 16000)])
    soundfile.write(tmp_path / "long.wav", sound, 16000)
    return tmp_path / "long.wav"
