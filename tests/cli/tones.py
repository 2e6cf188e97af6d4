"""Low and high tones, a model that tells them apart, and its answers."""

from pathlib import Path

import numpy as np
import soundfile

SMALL = ["--model.encoder.dim", "16", "--model.encoder.depth", "1", "--model.encoder.heads", "1",
         "--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_progress_bar",
         "false"]  # fmt: skip


def tone(hertz: float, seconds: float, rate_hz: int = 8000, seed: int = 0) -> np.ndarray:
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    noise = np.random.default_rng(seed).standard_normal(len(time))
    return 0.4 * np.sin(2 * np.pi * hertz * time) + 0.02 * noise


def trained(folder: Path, *flags: str) -> Path:
    from longseq.cli import main

    for name, hertz in (("high", 2000), ("low", 300)):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(16):
            soundfile.write(folder / "data" / name / f"{number:02}.wav", tone(hertz, 0.2, seed=number), 8000)
    main(["fit", "--data", "AudioFolder", "--data.root", str(folder / "data"), "--data.batch_size", "8",
          "--model.encoder", "SpectrogramEncoder", "--model.encoder.attention", "Verma", "--model.encoder.num_mels",
          "16", "--model.learning_rate", "1e-2", "--trainer.max_epochs", "6", "--trainer.default_root_dir", str(folder),
          "--experiment", "tones", *SMALL, *flags])  # fmt: skip
    return folder / "runs/tones/0/best.ckpt"


def rows(done) -> list[list[str]]:
    assert done.code == 0, done.err
    return [line.split("\t") for line in done.out.strip("\n").split("\n")]
