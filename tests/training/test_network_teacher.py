"""A student of a frozen network: logits of its classes, or features through a map that no trained model has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import pytorch_lightning as pl
import small_networks
import soundfile
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from stopped import stop_in_fourth_step
from torch import Tensor

import longseq
from datamodules import Digits
from longseq.arguments import ArgumentError, SettingError
from longseq.attention import Linformer, NoAttention
from longseq.encoders import ImageEncoder
from longseq.files.storage import CheckpointError, read_whole
from longseq.tasks import Masked, MultiLabel, Ordinal, Regression, SingleLabel
from longseq.training import Classifier, CutMix, MixUp
from longseq.training.distillation import NetworkTeacher, Teacher, is_network, network_of
from longseq.training.flops import flops_per_sample

ROOT = Path(__file__).parents[2]
SMALL = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.limit_train_batches", "3"]
SMALL += ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1", "--trainer.logger", "false"]
DIGITS = ["fit", "--config", str(ROOT / "configs/image/digits.yaml"), *SMALL, "--trainer.max_epochs", "2"]
IMAGES = torch.arange(96, dtype=torch.uint8).view(6, 1, 4, 4)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def means(tmp_path: Path) -> dict[str, Any]:
    """A network of images of 4 x 6 pixels: the mean of each of three channels."""
    small_networks.onnx_of_images(tmp_path / "means.onnx", class_names=["8", "x", "3"])
    return {"network": str(tmp_path / "means.onnx"), "value_range": [-1.0, 1.0]}


def classifier(**options: Any) -> Classifier:
    encoder = ImageEncoder([1, 4, 4], dim=8, depth=1, heads=2, attention=options.pop("attention", None) or Linformer(4))
    encoder.set_statistics(torch.full((1, 1, 1), 40.0), torch.full((1, 1, 1), 30.0))
    return Classifier(encoder, **{"num_classes": 3, **options})


class Rows:
    """A teaching of known rows."""

    model = None

    def __init__(self, width: int) -> None:
        self.width = width

    __call__ = NetworkTeacher.__call__
    losses = NetworkTeacher.losses


def step(model: Classifier, taught: Tensor, labels: Tensor = LABELS) -> Tensor:
    """The loss of a training step, without a trainer."""
    model.teaching = Rows(taught.shape[1])  # type: ignore[assignment]
    if model.distillation == "features":
        model.to_teacher = torch.nn.Linear(8, taught.shape[1], bias=False, dtype=model.dtype)
    torch.nn.init.normal_(model.head.weight)  # type: ignore[arg-type]
    model.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    model.trainer.strategy.optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    torch.manual_seed(0)
    return model.train().training_step((IMAGES, labels, taught), 0)


FEATURES = {"teacher": "BirdNET", "distillation": "features"}
SEVERAL = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("pool", [None, "avg", "max", "attention"])
@pytest.mark.parametrize(
    ("task", "labels"),
    [
        (SingleLabel(), LABELS), (MultiLabel(), SEVERAL), (Ordinal(), LABELS), (Regression(), SEVERAL.float()),
    ],
)  # fmt: skip
def test_features_are_learned_by_the_cosine_in_every_task(task: Any, labels: Tensor, pool: Any) -> None:
    torch.manual_seed(0)
    student = classifier(**FEATURES, task=task, pool=pool, distillation_alpha=0.3)
    if isinstance(task, Regression):
        task.learn(labels, ["a", "b", "c"])
    taught = torch.randn(6, 5)
    loss = step(student, taught, labels)
    features, tokens, present = student.encoder.all_features(IMAGES)
    outputs = (
        student.head(features) if student.pooling is None else student.pooling(tokens, student.head(tokens), present)
    )
    own = task.loss(outputs, labels, torch.ones(3), 0.0)
    distance = 0.0
    assert student.to_teacher is not None
    for mine, theirs in zip(features.double(), taught.double(), strict=True):
        mapped = student.to_teacher.weight.double() @ mine
        distance += 1 - float(mapped @ theirs / (mapped.square().sum() * theirs.square().sum()).sqrt())
    assert float(loss.detach()) == pytest.approx(0.7 * float(own.detach()) + 0.3 * distance / 6, rel=1e-5)


def test_the_gradient_of_the_map_is_that_of_finite_differences() -> None:
    student = classifier(**FEATURES, distillation_alpha=1.0).double()
    taught = torch.randn(6, 5)
    step(student, taught).backward()
    assert student.to_teacher is not None
    weight = student.to_teacher.weight
    features = student.encoder(IMAGES).detach()
    for row, column in ((0, 0), (3, 5)):
        values = []
        for change in (1e-5, -1e-5):
            moved = weight.detach().clone()
            moved[row, column] += change
            mapped = features.double() @ moved.double().T
            cosines = (mapped * taught).sum(1) / (mapped.norm(dim=1) * taught.double().norm(dim=1))
            values.append(float((1 - cosines).mean()))
        expected = (values[0] - values[1]) / 2e-5
        assert float(weight.grad[row, column]) == pytest.approx(expected, rel=1e-3, abs=1e-6)  # type: ignore[index]
    assert student.encoder.trunk.patch_embed.proj.weight.grad.abs().sum() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("mix", [MixUp(1.0), CutMix(1.0)])
def test_what_is_taught_is_mixed_with_the_shares_of_the_labels(mix: Any) -> None:
    student = classifier(**FEATURES, mix=mix)
    taught = torch.randn(6, 5)
    torch.manual_seed(3)
    _, targets, mixed = student.mixed(IMAGES, LABELS, taught)
    share = float(targets[0, 0])  # of the first sample, whose class is 0; the last one's is 2
    assert 0 < share < 1
    torch.testing.assert_close(mixed, share * taught + (1 - share) * taught.roll(1, 0))
    torch.manual_seed(3)
    plain = student.mixed(IMAGES, LABELS)
    assert len(plain) == 2 and torch.equal(plain[1], targets)


@pytest.mark.parametrize("task", [SingleLabel(), MultiLabel(), Ordinal()])
def test_probabilities_and_logits_of_a_network_become_the_outputs_that_have_them(task: Any) -> None:
    outputs = torch.randn(4, task.num_outputs(3)).sort(dim=1, descending=True).values
    probabilities = task.probabilities(outputs)
    again = task.outputs_of(probabilities, True)
    torch.testing.assert_close(task.probabilities(again), probabilities)
    if isinstance(task, Ordinal):
        torch.testing.assert_close(again, outputs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(task.outputs_of(probabilities.log() + 3, False), outputs, rtol=1e-4, atol=1e-5)
    else:
        scores = torch.randn(4, 3)
        assert torch.equal(task.outputs_of(scores, False), scores)


def test_a_network_costs_a_training_nothing() -> None:
    plain, student = classifier(), classifier(**FEATURES)
    student.teaching = Rows(5)  # type: ignore[assignment]
    assert flops_per_sample(student) == flops_per_sample(plain)


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        (None, False), ("runs/a/0/best.ckpt", False), ("x.ckpt", False), ("m.onnx", True), ("a/b.tflite", True),
        ("m.pt2", True), ("BirdNET", True), ("mine.Net", True), ({"network": "Timm", "model": "x"}, True),
    ],
)  # fmt: skip
def test_a_file_a_class_or_arguments_name_a_network_and_other_paths_a_checkpoint(teacher: Any, expected: bool) -> None:
    assert is_network(teacher) is expected


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"rate_hz": 3}, ": {'rate_hz': 3} names no network; give --model.teacher.network"),
        ({"network": "m.onnx", "rate": 3}, ".rate: no such argument of Onnx; it takes file, output, rate_hz, window_"),
        ({"network": "Timm"}, ": Timm lacks its argument model; it takes model, weights"),
        ({"network": "m.onnx", "rate_hz": -3}, ".rate_hz: must be positive, got -3; "),
        ("Nothing", ": datamodules.networks.nothing.Nothing is no FrozenNetwork"),
        ("os.system", ": os.system may not be named; --allow_class os if you trust it"),
        ("m.pt2", ": Exported runs the code of its file; --allow_class datamodules.networks.exported if you"),
    ],
)
def test_a_wrong_network_is_refused_in_a_line(described: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longseq.files.description._ALLOWED_PACKAGES", [])  # those of other tests of this process
    with pytest.raises(SettingError, match=rf"^model\.teacher{said}"):
        network_of(described)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**FEATURES, "task": Masked()}, "teacher must be left out with the task Masked"),
        ({"teacher": "BirdNET", "task": Regression()}, "teacher must be left out with the task Regression"),
        ({**FEATURES, "freeze": "encoder"}, "distillation must be logits with freeze encoder"),
        ({"teacher": "x.ckpt", "teacher_classes": "a.txt"}, "teacher_classes must be left out except for the logits"),
        ({**FEATURES, "teacher_classes": "a.txt"}, "teacher_classes must be left out except for the logits"),
        ({"distillation": "both"}, "distillation must be logits or features"),
    ],
)
def test_what_does_not_go_together_is_refused(options: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}"):
        classifier(**options)


def test_the_classes_of_a_network_are_found_by_their_names(means: dict[str, Any], tmp_path: Path) -> None:
    data = Digits(val_fraction=0.1)
    data.setup()
    outputs = data.outputs_of(network_of(means))  # type: ignore[arg-type]
    NetworkTeacher(means, classifier(num_classes=2, class_names=["3", "8"]), data)
    assert data.taught is not None and torch.equal(data.taught, outputs[:, [2, 0]])
    with pytest.raises(
        SettingError, match="has no class 4; give its names in --model.teacher_classes, or --model.dist"
    ):
        NetworkTeacher(means, classifier(num_classes=2, class_names=["3", "4"]), data)
    (tmp_path / "names.txt").write_text("4\nd\n3\n")
    options = {"num_classes": 2, "class_names": ["3", "4"], "teacher": means}
    NetworkTeacher(means, classifier(**options, teacher_classes=str(tmp_path / "names.txt")), data)
    assert torch.equal(data.taught, outputs[:, [2, 0]])
    (tmp_path / "names.txt").write_text("3\n4\n")
    with pytest.raises(SettingError, match="gives 3 numbers, and there are names of 2 classes; choose the output of"):
        NetworkTeacher(means, classifier(**options, teacher_classes=str(tmp_path / "names.txt")), data)
    with pytest.raises(SettingError, match=r"^model.teacher_classes: none.txt: No such file"):
        NetworkTeacher(means, classifier(**options, teacher_classes="none.txt"), data)
    small_networks.onnx_of_images(tmp_path / "nameless.onnx")
    with pytest.raises(
        SettingError, match="states no classes; give their names in --model.teacher_classes, or --model"
    ):
        NetworkTeacher({**means, "network": str(tmp_path / "nameless.onnx")}, classifier(), data)
    with pytest.raises(SettingError, match="a network teaches samples of a data module with outputs_of; "):
        NetworkTeacher(means, classifier(), None)


def test_outputs_that_are_not_finite_are_refused_with_the_name_of_the_sample(
    means: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Digits()
    data.setup()
    outputs = torch.zeros(len(data.train_set), 3)
    outputs[7, 1] = torch.nan
    monkeypatch.setattr(data, "outputs_of", lambda network: outputs)
    with pytest.raises(SettingError, match=f"gives NaN or infinity for {data.train_set.names[7]}; leave it out"):
        NetworkTeacher(means, classifier(**FEATURES), data)


def test_an_exported_teacher_teaches_what_its_checkpoint_teaches(command: Callable, exports: None) -> None:
    assert command(*DIGITS, "--experiment", "teacher").code == 0
    done = command("export", "--ckpt_path", "runs/teacher/0/best.ckpt", "--out", "t.onnx")
    assert done.code == 0, done.err
    options = ["--model.encoder.drop_path", "0", "--model.distillation_alpha", "0.9"]
    for name, teacher in (("ckpt", "runs/teacher/0/best.ckpt"), ("onnx", "t.onnx")):
        done = command(*DIGITS, *options, "--experiment", name, "--model.teacher", teacher)
        assert done.code == 0, done.err
    one, other, plain = (read_whole(f"runs/{name}/0/last.ckpt")["state_dict"] for name in ("ckpt", "onnx", "teacher"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(one["head.weight"], plain["head.weight"], rtol=1e-3, atol=1e-4)


@pytest.fixture
def student_of_features(means: dict[str, Any]) -> list[str]:
    flags = ["--model.teacher", means["network"], "--model.teacher.value_range", "[-1, 1]"]
    return [
        *DIGITS,
        *flags,
        "--model.distillation",
        "features",
        "--model.encoder.dropout",
        "0.1",
        "--model.mix",
        "MixUp",
    ]


@pytest.mark.parametrize(
    "averages", [[], ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay", "0.5"]]
)
def test_a_resumed_student_of_features_is_bit_for_bit_the_same(
    averages: list[str], student_of_features: list[str], command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = [*student_of_features, *averages]
    done = command(*fit, "--experiment", "whole")
    assert done.code == 0, done.err
    stop_in_fourth_step(monkeypatch)
    assert command(*fit, "--experiment", "killed").code == 143
    resumed = command("fit", "--resume", "runs/killed/0")
    assert resumed.code == 0, resumed.err
    for part in ("state_dict", *(["current_model_state"] if averages else [])):
        whole, killed = (read_whole(f"runs/{name}/0/last.ckpt")[part] for name in ("whole", "killed"))
        assert "to_teacher.weight" in whole and whole["to_teacher.weight"].shape == (3, 8)
        assert all(torch.equal(killed[name], whole[name]) for name in whole) and whole.keys() == killed.keys()
    refused = command("fit", "--resume", "runs/killed/0", "--model.distillation", "logits", "--trainer.max_epochs", "3")
    said = "error: model.distillation: logits cannot use the state of the checkpoint's features; give the same teacher"
    assert (refused.code, refused.error[: len(said)]) == (2, said)


def test_no_trained_model_has_the_map_or_needs_the_teacher(
    student_of_features: list[str], means: dict[str, Any], command: Callable, exports: None, tmp_path: Path
) -> None:
    assert command(*student_of_features, "--experiment", "x").code == 0
    Path(means["network"]).unlink()
    checkpoint = "runs/x/0/best.ckpt"
    assert "to_teacher.weight" in read_whole(checkpoint)["state_dict"]
    assert command("test", "--ckpt_path", checkpoint).code == 0
    model = longseq.load(checkpoint).model
    assert "to_teacher.weight" not in model.state_dict() and model.to_teacher is None
    assert command("export", "--ckpt_path", checkpoint, "--format", "safetensors", "--out", "shared").code == 0
    assert "to_teacher" not in (tmp_path / "shared/model.safetensors").read_bytes().decode(errors="replace")
    shared = longseq.load("shared").model
    assert torch.equal(shared(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)), model(torch.zeros(1, 1, 8, 8).byte()))
    done = command("export", "--ckpt_path", checkpoint, "--out", "m.onnx")
    assert done.code == 0, done.err
    assert [entry.name for entry in onnxruntime.InferenceSession("m.onnx").get_outputs()] == ["probabilities"]
    assert command(*DIGITS, "--model.init_from", checkpoint, "--experiment", "tuned").code == 0
    assert "to_teacher.weight" not in read_whole("runs/tuned/0/last.ckpt")["state_dict"]
    assert command(*DIGITS, "--model.teacher", checkpoint, "--experiment", "pupil").code == 0


def test_the_features_of_a_checkpoint_of_other_classes_are_learned_from_the_same_batch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = classifier(num_classes=5, attention=NoAttention())
    checkpoint = {"state_dict": trained.state_dict(), "hyper_parameters": dict(trained.hparams), "data": None}
    torch.save(checkpoint, tmp_path / "t.ckpt")
    student = classifier(teacher=str(tmp_path / "t.ckpt"), distillation="features")
    teaching = Teacher(student.teacher, student)  # type: ignore[arg-type]
    assert teaching.width == 8
    torch.testing.assert_close(teaching(IMAGES, student), trained.eval().encoder(IMAGES))
    student.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    weights = []
    for drawn in (1, 2):
        torch.rand(drawn)  # several processes draw other numbers before
        student._meet_teacher(str(tmp_path / "t.ckpt"))
        assert student.to_teacher is not None
        weights.append(student.to_teacher.weight)
    assert torch.equal(*weights)
    with pytest.raises(CheckpointError, match="has 5 classes, and the data has 3"):
        Teacher(str(tmp_path / "t.ckpt"), classifier(teacher="t.ckpt"))


@pytest.mark.parametrize("callback", [EMAWeightAveraging(decay=0.5), StochasticWeightAveraging(1e-2, 1)])
def test_averages_of_weights_have_a_map_of_their_own(callback: Any, means: dict[str, Any], tmp_path: Path) -> None:
    encoder = ImageEncoder([1, 8, 8], dim=8, depth=1, heads=2, attention=Linformer(4))
    model = Classifier(encoder, 10, teacher=means, distillation="features")
    options = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1, "logger": False}
    trainer = pl.Trainer(callbacks=[callback], default_root_dir=tmp_path, accelerator="cpu", **options)
    trainer.fit(model, datamodule=Digits())
    averaged = getattr(callback._average_model, "module", callback._average_model)
    assert averaged.to_teacher is not model.to_teacher
    assert all(bool(weight.isfinite().all()) for weight in model.state_dict().values() if weight.is_floating_point())


def test_a_sound_is_taught_by_a_network_of_another_rate_and_without_it_is_another_model(
    command: Callable, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    for name, level in (("loud", 0.8), ("soft", 0.05)):
        (tmp_path / "sounds" / name).mkdir(parents=True)
        for number in range(10):
            sound = level * random.uniform(-1, 1, 240 + 8 * number)
            soundfile.write(tmp_path / "sounds" / name / f"{number}.wav", sound, 1000, subtype="FLOAT")
    small_networks.onnx_of_sounds(tmp_path / "m.onnx", rate_hz=2000)
    flags = ["fit", "--data", "AudioFolder", "--data.root", tmp_path / "sounds", "--trainer.max_epochs", "1"]
    flags += ["--model.encoder", "WaveformEncoder", "--model.encoder.attention", "Verma", "--model.encoder.dim", "8"]
    flags += ["--model.encoder.depth", "1", "--data.num_workers", "2"]  # with a board, which draws training samples
    taught = [*flags, "--model.teacher", tmp_path / "m.onnx"]
    for experiment, given in (("plain", flags), ("taught", [*taught, "--model.distillation", "features"])):
        done = command(*given, "--experiment", experiment)
        assert done.code == 0, done.err
    weights = [read_whole(f"runs/{name}/0/last.ckpt")["state_dict"]["head.weight"] for name in ("plain", "taught")]
    assert not torch.equal(*weights)
    done = command(*taught, "--experiment", "logits")
    said = "error: model.teacher: states no classes; give their names in --model.teacher_classes, or "
    assert (done.code, done.error[: len(said)]) == (2, said)
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    done = command(*taught, "--experiment", "broken")
    assert done.code == 3 and "onnxruntime cannot open it" in done.error and "\n" not in done.error
    done = command(*DIGITS, "--model.teacher", tmp_path / "none.onnx", "--model.distillation", "features")
    assert done.code == 3 and done.error.startswith("error: model.teacher.file: "), done.error
