"""Inputs that are neither images nor sounds: one file, the data module's, says what they are, and every command takes
them."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import longseq
from datamodules.errors import ArgumentError
from datamodules.inputs import InputSpec

ECG = '''
import hashlib
from pathlib import Path

import numpy as np
import torch
from datamodules import DataModule
from datamodules.base import DataError, Samples
from datamodules.hold_out import hold_out
from datamodules.inputs import InputSpec


class Signals(DataModule):
    """Three leads of 40 samples, .npy files in class folders.

    Args:
        root: The folder.
        common: Arguments of DataModule.
    """

    predict_suffixes = frozenset({".npy"})
    shape = (1, 3, 40)

    def __init__(self, root: str, **common):
        super().__init__(**common)
        self.root = root

    @property
    def class_names(self):
        return sorted(path.name for path in Path(self.root).iterdir() if path.is_dir())

    @property
    def inputs(self):
        return InputSpec("signals", torch.float32, self.shape, -5, 5, "mV", rate_hz=100)

    def read(self, path):
        try:
            return torch.from_numpy(np.load(path)).float()[None]
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no signal ({error}); give an array of 3 x 40") from error

    def load(self):
        names = [(label, path) for label, name in enumerate(self.class_names)
                 for path in sorted((Path(self.root) / name).glob("*.npy"))]
        labels = torch.tensor([label for label, _ in names])
        paths = [path.relative_to(self.root).as_posix() for _, path in names]
        digest = hashlib.sha256(b"".join(path.read_bytes() for _, path in names)).hexdigest()
        whole = Samples(torch.stack([self.read(path) for _, path in names]), labels, paths, digest)
        train, test = hold_out(labels, 0.2, self.seed)
        return whole.subset(train), None, whole.subset(test)

    def figures(self, samples):
        return {"shape": list(self.shape)}
'''


@pytest.fixture
def signals(tmp_path: Path) -> Iterator[Path]:
    """A folder of slow and fast waves, and a module that reads them in the working folder."""
    (tmp_path / "ecg_by_me.py").write_text(ECG)
    drawn = np.random.default_rng(0)
    for name, waves in (("fast", 7), ("slow", -3)):
        (tmp_path / "ecg" / name).mkdir(parents=True)
        for number in range(40):
            times = np.arange(40) / 40 + drawn.uniform()
            leads = np.stack([np.sin(2 * np.pi * waves * times + lead) for lead in range(3)]) + np.sign(waves)
            np.save(tmp_path / f"ecg/{name}/{number}.npy", (leads + 0.3 * drawn.standard_normal((3, 40))).clip(-5, 5))
    yield tmp_path / "ecg"
    sys.modules.pop("ecg_by_me", None)


def test_every_command_takes_inputs_of_a_third_kind(signals: Path, command) -> None:
    own = ["--allow_class", "ecg_by_me"]
    fit = ["fit", "--model.encoder", "ImageEncoder", "--model.encoder.attention", "Verma", "--model.encoder.dim", "16"]
    fit += ["--model.encoder.depth", "1", "--model.encoder.heads", "2", "--data", "ecg_by_me.Signals"]
    fit += ["--data.root", "ecg", "--data.batch_size", "8", "--trainer.max_epochs", "20"]
    done = command(*fit, *own, "--trainer.enable_progress_bar", "false", "--experiment", "ecg")
    assert done.code == 0, done.err
    assert "baseline" not in done.out
    assert json.loads(Path("runs/ecg/0/metrics.json").read_text())["test/accuracy"] >= 0.9
    card = Path("runs/ecg/0/README.md").read_text()
    assert "pipeline_tag" not in card and "A model of signals, 2 classes" in card
    assert "It takes signals of 1 x 3 x 40, in mV, at 100 Hz." in card
    assert "pixels" not in card.split("## How it was trained")[0]

    checkpoint = [*own, "--ckpt_path", "runs/ecg/0/best.ckpt"]
    done = command("predict", *checkpoint, "--input", "ecg/fast")
    assert done.code == 0, done.err
    assert sum("\tfast\t" in line for line in done.out.splitlines()) >= 36
    done = command("preview", *fit[1:-2], *own, "--out", "preview.png")
    assert (done.code, Path("preview.png").exists()) == (0, True), done.err
    done = command("explain", *checkpoint, "--input", "ecg/fast/0.npy", "--out", "why.png")
    assert done.code == 0, done.err
    line = r"^fast [0-9.]+: half of the attribution lies in \d+ of 120 numbers$"
    assert re.search(line, done.out, re.MULTILINE), done.out

    done = command("export", *checkpoint, "--format", "onnx", "--out", "ecg.onnx")
    assert done.code == 0, done.err
    assert "inputs: signals, float32 (batch, 1, 3, 40), -5 to 5" in done.out
    model = longseq.load("runs/ecg/0/best.ckpt", allow_class=["ecg_by_me"])
    array = np.load("ecg/slow/1.npy").astype(np.float32)[None]
    (of_array,), (of_file,) = model.predict(array), model.predict("ecg/slow/1.npy")
    torch.testing.assert_close(of_array.probabilities, of_file.probabilities)
    done = command("predict", *checkpoint, "--input", "ecg/slow", "--embeddings", "features.npz")
    assert done.code == 0, done.err
    with np.load("features.npz") as features:
        expected = model.embed(features["paths"].tolist())
        torch.testing.assert_close(torch.from_numpy(features["embeddings"]), expected, rtol=1e-4, atol=1e-4)
    done = command("contract", "ecg_by_me.Signals", "--init_args.root", "ecg", *own)
    assert (done.code, "Signals keeps all 5 promises" in done.out) == (0, True), done.out
    (exported,) = onnxruntime.InferenceSession("ecg.onnx").run(None, {"signals": array[None]})
    np.testing.assert_allclose(exported[0], of_array.probabilities, atol=1e-4)
    for wrong, what in (
        (array[0], r"must be signals \(1, 3, 40\), got \(3, 40\)"),
        (100 * array, r"must be finite numbers in -5\.\.5, got values from "),
    ):
        with pytest.raises(ValueError, match=what):
            model.predict(wrong)
    array[0, 1, 7] = np.nan
    np.save("nan.npy", array[0])
    done = command("predict", *checkpoint, "--input", "nan.npy")
    assert done.code == 3
    assert done.err.splitlines()[-1] == "error: nan.npy: contains NaN or infinity; remove such values"


def test_statistics_of_the_same_numbers_in_another_shape_are_measured_anew(signals: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(signals.parent))
    import ecg_by_me

    class Flat(ecg_by_me.Signals):
        """Leads as channels."""

        shape = (3, 1, 40)

        def read(self, path):
            return super().read(path)[0][:, None]

    shapes = []
    for kind in (ecg_by_me.Signals, Flat):
        data = kind(root=str(signals))
        data.setup()
        remembered = data.remember("shape", lambda data=data: {"shape": list(data.train_set.sample(0).shape)})
        shapes.append(remembered["shape"])
    assert shapes == [[1, 3, 40], [3, 1, 40]]


def test_a_specification_varies_along_one_axis_at_most() -> None:
    for shape in ((None,), (12, None), (None, 1024)):
        assert InputSpec("signals", torch.float32, shape).shape == shape
    with pytest.raises(ArgumentError, match="inputs.shape must be one that varies along one axis"):
        InputSpec("signals", torch.float32, (1, None, None))
