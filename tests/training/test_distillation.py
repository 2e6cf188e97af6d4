"""Distillation: what a student learns from a frozen teacher, and that nothing but its training needs the teacher."""

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from stopped import stop_in_fourth_step
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention import Linformer, Softmax
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.files.storage import CheckpointError, read_whole
from longseq.tasks import Masked, MultiLabel
from longseq.training import Classifier, MixUp
from longseq.training.distillation import Teacher
from longseq.training.flops import flops_per_sample

ROOT = Path(__file__).parents[2]
SMALL = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.limit_train_batches", "3"]
SMALL += ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1", "--trainer.logger", "false"]
FIT = ["fit", "--config", str(ROOT / "configs/image/digits.yaml"), *SMALL, "--trainer.max_epochs", "2"]


def classifier(attention: Any = None, **options: Any) -> Classifier:
    encoder = ImageEncoder([1, 4, 4], dim=8, depth=1, heads=2, attention=attention or Linformer(k=4))
    return Classifier(encoder, **{"num_classes": 3, **options})


def saved(model: Classifier, path: Path) -> str:
    torch.nn.init.normal_(model.head.weight)
    checkpoint = {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams), "data": None}
    torch.save(checkpoint, path)
    return str(path)


def step(model: Classifier, inputs: Any, labels: Tensor) -> Tensor:
    """The loss of a training step, without a trainer."""
    model.teaching = None if model.teacher is None else Teacher(model.teacher, model)
    model.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    model.trainer.strategy.optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    torch.manual_seed(0)
    return model.train().training_step((inputs, labels), 0)


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    torch.manual_seed(1)
    return saved(classifier(Softmax()), tmp_path / "teacher.ckpt")


IMAGES = torch.arange(96, dtype=torch.uint8).view(6, 1, 4, 4)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(("alpha", "T"), [(0.0, 2.0), (0.3, 2.0), (1.0, 4.0)])
def test_the_loss_is_hintons(alpha: float, T: float, teacher: str) -> None:
    student = classifier(teacher=teacher, distillation_alpha=alpha, temperature=T)
    torch.nn.init.normal_(student.head.weight)
    loss = step(student, IMAGES, LABELS)
    outputs = student(IMAGES).double()
    taught = Classifier.load_from_checkpoint(teacher).eval()(IMAGES).double()
    expected = 0.0
    for mine, theirs, label in zip(outputs.detach(), taught, LABELS.tolist(), strict=True):
        p = [math.exp(score / T) for score in theirs.tolist()]
        q = [math.exp(score / T) for score in mine.tolist()]
        p, q = [value / sum(p) for value in p], [value / sum(q) for value in q]
        divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        entropy = -math.log(math.exp(mine[label]) / sum(map(math.exp, mine.tolist())))
        expected += ((1 - alpha) * entropy + alpha * T**2 * divergence) / len(IMAGES)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


def test_with_class_weights_two_processes_have_the_loss_of_one(teacher: str, monkeypatch) -> None:
    student = classifier(teacher=teacher, class_weights=[1.0, 2.0, 9.0])
    torch.nn.init.normal_(student.head.weight)
    whole = step(student, IMAGES, LABELS).detach()
    parts = [(IMAGES[:4], LABELS[:4]), (IMAGES[4:], LABELS[4:])]
    sums: list[list[Tensor]] = [[], []]

    def share(rank: int, others: list[Tensor]) -> Tensor:
        """The loss of a process that meets the sums of the other one."""

        def all_reduce(own: Tensor, group: Any = None) -> None:
            sums[rank].append(own.clone())
            own += others.pop(0) if others else own

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        return step(student, *parts[rank]).detach()

    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    share(0, [])
    second = share(1, [*sums[0]])
    first = share(0, [*sums[1]])
    torch.testing.assert_close((first + second) / 2, whole)


def test_many_labels_are_learned_from_the_teachers_probabilities() -> None:
    outputs, taught = torch.randn(5, 3), torch.randn(5, 3)
    chances = torch.sigmoid(taught.double() / 2)
    mine = torch.sigmoid(outputs.double() / 2)
    expected = -4 * (chances * mine.log() + (1 - chances) * (1 - mine).log()).mean()
    assert float(MultiLabel().distillation(outputs, taught, 2.0)) == pytest.approx(float(expected), rel=1e-5)


def test_the_teacher_sees_the_mixed_batch_and_is_frozen_in_evaluation_and_in_no_checkpoint(teacher: str) -> None:
    student = classifier(teacher=teacher, mix=MixUp(alpha=1.0))
    names = set(student.state_dict())
    seen: list[Tensor] = []
    forward = Classifier.forward
    student.teaching = Teacher(teacher, student)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classifier, "forward", lambda self, inputs: seen.append(inputs) or forward(self, inputs))
        step(student, IMAGES, LABELS).backward()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1]) and seen[0].is_floating_point()
    taught = student.teaching.model
    assert not taught.training and not any(weight.requires_grad for weight in taught.parameters())
    assert all(weight.grad is None for weight in taught.parameters())
    assert set(student.state_dict()) == names and taught not in set(student.modules())
    assert student.hparams["teacher"] == teacher


@pytest.mark.parametrize("kinds", [(torch.float32, True), (torch.bfloat16, False)])
def test_the_teacher_follows_the_students_precision(kinds: tuple[torch.dtype, bool], teacher: str) -> None:
    dtype, autocast = kinds
    student = classifier(teacher=teacher).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = step(student, IMAGES, LABELS)
    loss.backward()
    assert torch.isfinite(loss) and student.teaching is not None and student.teaching.model.dtype == dtype
    assert student.head.weight.grad is not None


def test_a_padded_sound_is_taught_as_alone(tmp_path: Path) -> None:
    encoders = [
        SpectrogramEncoder(8000, 0.4, num_mels=20, dim=8, depth=1, heads=2, attention=attention)
        for attention in (Softmax(), Linformer(k=4))
    ]
    torch.manual_seed(0)
    path = saved(Classifier(encoders[0], 3), tmp_path / "sound.ckpt")
    student = Classifier(encoders[1], 3, teacher=path, distillation_alpha=1.0)
    waveforms, lengths = torch.rand(2, 3200) - 0.5, torch.tensor([3200, 1600])
    waveforms[1, 1600:] = 0
    together = Teacher(path, student)({"waveforms": waveforms, "lengths": lengths}, student)
    alone = Teacher(path, student)({"waveforms": waveforms[1:, :1600], "lengths": lengths[1:]}, student)
    torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-5)


def test_training_costs_a_forward_pass_of_the_teacher_more(teacher: str) -> None:
    plain, student = classifier(), classifier(teacher=teacher)
    student.teaching = Teacher(teacher, student)
    without, with_teacher = flops_per_sample(plain), flops_per_sample(student)
    assert with_teacher.forward == without.forward
    assert with_teacher.training - without.training == flops_per_sample(classifier(Softmax())).forward


def test_pretraining_has_no_teacher() -> None:
    with pytest.raises(ArgumentError, match=r"^teacher must be left out with the task Masked, got x.ckpt; "):
        classifier(task=Masked(), teacher="x.ckpt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"class_names": ["0", "c", "b"]},
            "has '1' where the data has 'c'; give one of the same classes in this order",
        ),
        ({"num_classes": 2}, "has 3 classes, and the data has 2; "),
        ({"task": MultiLabel()}, "learned the task SingleLabel, and the model learns MultiLabel; "),
    ],
)
def test_a_teacher_of_another_question_is_refused(options: dict[str, Any], said: str, teacher: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^model\.teacher: .*{said}"):
        Teacher(teacher, classifier(**options))


def test_a_resumed_student_is_bit_for_bit_the_same_and_its_checkpoint_needs_no_teacher(
    command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*FIT, "--experiment", "teacher", "--model.encoder.attention", "Softmax").code == 0
    taught = [*FIT, "--model.encoder.dropout", "0.1", "--model.teacher", "runs/teacher/0/best.ckpt"]
    assert command(*taught, "--experiment", "whole").code == 0
    assert command(*FIT, "--model.encoder.dropout", "0.1", "--experiment", "plain").code == 0
    stop_in_fourth_step(monkeypatch)
    assert command(*taught, "--experiment", "killed").code == 143
    Path("runs/teacher").rename("runs/moved")
    done = command("fit", "--resume", "runs/killed/0")
    said = "error: model.teacher: runs/teacher/0/best.ckpt: no such file; "
    assert (done.code, done.error[: len(said)]) == (4, said)
    resumed = command("fit", "--resume", "runs/killed/0", "--model.teacher", "runs/moved/0/best.ckpt")
    assert resumed.code == 0, resumed.err
    whole, killed, plain = (
        read_whole(f"runs/{name}/0/last.ckpt")["state_dict"] for name in ("whole", "killed", "plain")
    )
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    assert whole.keys() == plain.keys() and not torch.equal(whole["head.weight"], plain["head.weight"])
    assert command("test", "--ckpt_path", "runs/whole/0/best.ckpt").code == 0  # whose teacher has gone


def test_a_teacher_of_other_inputs_is_one_line(command) -> None:
    assert command(*FIT, "--experiment", "teacher").code == 0
    done = command(*FIT, "--data.size", "6", "--model.teacher", "runs/teacher/0/best.ckpt")
    said = "takes inputs with shape [1, 8, 8], and the data has [1, 6, 6]; give a teacher of the same inputs"
    assert (done.code, done.error) == (4, f"error: model.teacher: runs/teacher/0/best.ckpt {said}")
