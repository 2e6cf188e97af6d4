"""Where the pages' commands and snippets find what they speak of: small trained models, and a few sounds."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from pages import ROOT, SMALL_MODEL, TINY
from small_sets import SMALL, picture


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run of each experiment whose checkpoint a page names, sounds, and inputs in DIR."""
    from datamodules import FSDD, Needles
    from longseq.cli import main

    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        for name, data in {"image/digits": None, "audio/fsdd": FSDD, "audio/needles": Needles}.items():
            root = []
            if data is not None:
                SMALL[data](folder, patch)
                root = ["--data.root", str(folder)]
            small = ["--data.num_train", "16", "--data.num_test", "10"] if data is Needles else []
            where = ["--trainer.default_root_dir", str(folder)]
            main(["fit", "--config", name, *root, *small, *SMALL_MODEL, *TINY, *where])
    noise = np.random.default_rng(0)
    picture(folder / "DIR/rose.png")
    for name in ("call.wav", "rain.flac", "rec.flac", "day.flac", "DIR/dog.wav"):
        soundfile.write(folder / name, noise.normal(0, 0.1, 6000), 8000)
    for name in ("configs", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder
