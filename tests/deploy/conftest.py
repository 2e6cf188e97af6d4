"""A trained model that the tests of this folder share."""

from pathlib import Path

import forked
import pytest


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training on digits."""
    from longseq.cli import main

    folder = tmp_path_factory.mktemp("digits")
    small = ["--model.encoder.dim", "16", "--model.encoder.depth", "2", "--trainer.accelerator", "cpu"]
    root = ["--trainer.max_epochs", "2", "--trainer.default_root_dir", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(forked.DRAWS, "1")  # the card's picture is looked at
        main(["fit", "--config", "image/digits", *small, *root])
    return folder / "runs/digits/0"
