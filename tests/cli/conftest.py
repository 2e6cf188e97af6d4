"""Models of tones that the tests of this folder share, a recording for them, and a browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")  # its event loop must not outlive the tests that know of it
def browser() -> Iterator[Any]:
    """Chromium without a window, for tests that need it."""
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=quiet)
        yield browser
        browser.close()
