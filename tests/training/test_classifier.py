"""The classifier: what it optimises, what it logs, what its checkpoints hold."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from sklearn.metrics import f1_score
from torch.utils.data import Dataset, IterableDataset

import longseq
from datamodules import Digits, Vowels
from longseq.arguments import SettingError
from longseq.attention import Linear, Linformer, Verma
from longseq.encoders import Encoder, ImageEncoder, Residual, SpectrogramEncoder
from longseq.files.checkpoint import CheckpointError, read_checkpoint
from longseq.files.description import build, describe
from longseq.training import Classifier
from longseq.training.optimizer import Optimization

SMALL = {"dim": 16, "depth": 2, "heads": 2}


def classifier(**change: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(ImageEncoder((1, 8, 8), Linformer(8, "layerwise"), **SMALL), **{"num_classes": 10, **change})


def fitted(
    model: Classifier,
    folder: Path,
    data: pl.LightningDataModule,
    steps: int = 4,
    callbacks: list[pl.Callback] | None = None,
) -> pl.Trainer:
    trainer = pl.Trainer(
        default_root_dir=folder, max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=2, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return trainer


def test_a_trained_model_goes_on_from_its_own_weights(tmp_path: Path) -> None:
    """Neither the checkpoint that its first training started from nor the data's singular vectors replace them."""
    data = Digits()
    fitted(classifier(), tmp_path, data, 1).save_checkpoint(tmp_path / "first.ckpt")
    second = classifier(init_from=str(tmp_path / "first.ckpt"))
    fitted(second, tmp_path, data).save_checkpoint(tmp_path / "second.ckpt")
    (tmp_path / "first.ckpt").unlink()
    loaded = Classifier.load_from_checkpoint(tmp_path / "second.ckpt")
    for model in (second, loaded, longseq.resize(loaded, (1, 8, 8))):
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        fitted(model, tmp_path, data, 0)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, weights[name], msg=name)
    mechanism = Linformer(8, projection=Linear("singular"))
    model = Classifier(ImageEncoder((1, 8, 8), mechanism, **SMALL), 10)
    fitted(model, tmp_path, data, 0)
    started = model.encoder.trunk.blocks[0].attn.project_keys.weight.clone()
    with torch.no_grad():
        model.encoder.trunk.blocks[0].attn.project_keys.weight.add_(1)
    fitted(model, tmp_path, data, 0)
    torch.testing.assert_close(model.encoder.trunk.blocks[0].attn.project_keys.weight, started + 1)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        for number in itertools.count():
            yield torch.full((1, 8, 8), number % 2, dtype=torch.uint8), number % 2


class Batches(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.full((4, 1, 8, 8), index, dtype=torch.uint8), torch.full((4,), index)


@pytest.mark.parametrize(("dataset", "batch_size"), [(Stream(), 4), (Batches(), None)])
def test_a_stream_and_a_set_of_batches_are_measured_and_trained(dataset: Any, batch_size: int | None, tmp_path) -> None:
    data = pl.LightningDataModule.from_datasets(train_dataset=dataset, batch_size=batch_size)
    model = classifier(num_classes=2)
    fitted(model, tmp_path, data, 2)
    assert (float(model.encoder.mean), float(model.encoder.std)) == (0.5, 0.5)


def plain(value: Any) -> bool:
    """Whether a value consists only of tensors and plain types."""
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.mark.parametrize(("given", "expected"), [(None, WORDS), ([*"abcdefghij"], [*"abcdefghij"])])
def test_a_classifier_fitted_from_python_has_the_names_of_its_data_unless_it_has_its_own(
    given: list[str] | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Digits.setup

    def with_words(data: Digits, stage: str | None = None) -> None:
        setup(data, stage)
        data.class_names = WORDS

    monkeypatch.setattr(Digits, "setup", with_words)
    trainer = fitted(classifier(class_names=given), tmp_path, Digits(), steps=1)
    trainer.save_checkpoint(tmp_path / "named.ckpt")
    assert Classifier.load_from_checkpoint(tmp_path / "named.ckpt").class_names == expected
    assert longseq.load(tmp_path / "named.ckpt").class_names == expected


def test_data_with_another_number_of_classes_leaves_a_classifier_its_numbers(tmp_path: Path) -> None:
    model = classifier(num_classes=12)
    fitted(model, tmp_path, Digits(), steps=1)
    assert model.class_names == [str(label) for label in range(12)]


def test_norms_biases_and_position_embeddings_are_not_decayed() -> None:
    model = classifier(weight_decay=0.1)
    model._trainer = pl.Trainer(max_steps=10, logger=False, enable_checkpointing=False)
    model._trainer.fit_loop.max_epochs = -1
    optimizer = model.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    spared = {names[id(p)] for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}
    assert decayed | spared == set(names.values())
    assert "encoder.trunk.pos_embed" in spared
    assert all("norm" in name or name.endswith("bias") or name.endswith("pos_embed") for name in spared)
    assert "encoder.trunk.blocks.0.attn.project_keys.weight" in decayed
    assert not any("norm" in name or name.endswith("bias") for name in decayed)


def test_the_optimizer_has_the_betas_that_are_asked_for_and_else_its_own() -> None:
    for betas, expected in ((None, (0.9, 0.999)), ([0.9, 0.98], (0.9, 0.98))):
        optimizer = Optimization(betas=betas).make_optimizer(classifier())
        assert {group["betas"] for group in optimizer.param_groups} == {expected}
    with pytest.raises(SettingError, match=r"^model.betas: sgd has 0, got 2; leave them out, or choose adamw"):
        Optimization("sgd", betas=[0.9, 0.98]).make_optimizer(classifier())


def test_the_learning_rate_rises_linearly_then_falls_along_a_cosine(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = classifier(learning_rate=0.01, warmup_fraction=0.2)
    trainer = pl.Trainer(max_steps=20, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         accelerator="cpu", limit_val_batches=0, callbacks=[Watch()])  # fmt: skip
    trainer.fit(model, datamodule=Digits())
    warmup = [0.0025, 0.005, 0.0075, 0.01]
    cosine = [0.005 * (1 + math.cos(math.pi * step / 16)) for step in range(16)]
    assert rates == pytest.approx(warmup + cosine)


def test_the_last_step_of_an_epoch_is_the_mean_of_the_batches_that_it_has(tmp_path: Path) -> None:
    def gradients(accumulated: int) -> torch.Tensor:
        """Those of each of five batches, as they are added up, of weights that hardly move."""
        pl.seed_everything(0, verbose=False)
        model = classifier(optimizer="sgd", learning_rate=1e-12)
        found: list[torch.Tensor] = []
        model.head.bias.register_hook(lambda gradient: found.append(gradient.clone()))
        trainer = pl.Trainer(
            default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, limit_train_batches=5, accumulate_grad_batches=accumulated,
        )  # fmt: skip
        trainer.fit(model, datamodule=Digits())
        return torch.stack(found)

    shares = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2])
    torch.testing.assert_close(gradients(3), gradients(1) * shares[:, None], rtol=1e-4, atol=1e-7)


def test_the_first_loss_is_the_logarithm_of_the_number_of_classes() -> None:
    model = classifier()
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    loss = torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 3]))
    assert loss.item() == pytest.approx(math.log(10))


def test_accuracy_is_over_samples_and_f1_over_classes(tmp_path: Path) -> None:
    model, data = classifier(), Digits()
    trainer = fitted(model, tmp_path, data, steps=30)
    (logged,) = trainer.test(model, datamodule=data, verbose=False)
    predicted = torch.cat([model.eval()(images).argmax(1) for images, _ in data.test_dataloader()])
    labels = torch.cat([labels for _, labels in data.test_dataloader()])
    assert logged["test/accuracy"] == pytest.approx((predicted == labels).double().mean().item())
    assert logged["test/f1"] == pytest.approx(f1_score(labels, predicted, average="macro", zero_division=0.0))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_loss_is_over_samples_and_summed_in_float32(precision: Any) -> None:
    model, data = classifier(), Digits(batch_size=50)
    torch.nn.init.normal_(model.head.weight)
    trainer = pl.Trainer(accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False)
    (logged,) = trainer.test(model, datamodule=data, verbose=False)
    logits = torch.cat([model.eval()(images).detach() for images, _ in data.test_dataloader()]).double()
    labels = torch.cat([labels for _, labels in data.test_dataloader()])
    assert len(labels) == 359  # so the last batch is shorter than 50
    assert logged["test/loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_checkpoint_holds_no_numbers_and_names_of_numpy(tmp_path: Path) -> None:
    names = list(np.unique([f"{number}" for number in range(10)]))
    model = classifier(class_names=names, learning_rate=np.geomspace(1e-3, 1e-1, 3)[1])
    trainer = fitted(model, tmp_path, Digits(), 1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = longseq.load(tmp_path / "x.ckpt")
    assert loaded.model.class_names == names and loaded.model.learning_rate == pytest.approx(1e-2)


def test_statistics_of_a_stem_are_not_those_of_all_processes() -> None:
    model = Classifier(ImageEncoder((1, 8, 8), Verma(), patch_size=4, stem=Residual(), **SMALL), 10)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, sync_batchnorm=True, logger=False, enable_checkpointing=False)
    with pytest.raises(SettingError, match="sync_batchnorm: not together with a stem"):
        trainer.fit(model, datamodule=Digits())


def test_an_interrupted_evaluation_leaves_nothing_behind() -> None:
    class Interrupt(pl.Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise RuntimeError("interrupted")

    def validate(*callbacks: pl.Callback) -> Any:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
        trainer = pl.Trainer(accelerator="cpu", callbacks=list(callbacks), **quiet)
        return trainer.validate(model, datamodule=data, verbose=False)

    model, data = classifier(), Digits(batch_size=16)
    torch.nn.init.normal_(model.head.weight)
    expected = validate()
    with pytest.raises(RuntimeError, match="interrupted"):
        validate(Interrupt())
    assert validate() == expected


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_a_checkpoint_made_in_python_holds_tensors_and_plain_types_and_loads_alone(kind: str, tmp_path: Path) -> None:
    if kind == "image":
        model, data = classifier(label_smoothing=0.1, class_names=list("abcdefghij")), Digits(batch_size=32)
        inputs = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    else:
        data = Vowels(batch_size=32)
        encoder = SpectrogramEncoder(
            data.sample_rate_hz, data.seconds, Verma(4, "none"), num_mels=32, tokens=[8, 2], **SMALL
        )
        model, inputs = Classifier(encoder, data.num_classes), torch.randn(4, *data.shape)
    trainer = fitted(model, tmp_path, data)
    path = tmp_path / "made.ckpt"
    trainer.save_checkpoint(path)

    checkpoint = torch.load(path, weights_only=True)
    assert plain(checkpoint), checkpoint.keys()
    loaded = Classifier.load_from_checkpoint(path)
    assert torch.equal(loaded.eval()(inputs), model.eval()(inputs))
    assert describe(loaded) == describe(model)
    again = build(checkpoint["data"], pl.LightningDataModule)
    assert type(again) is type(data)
    assert again.batch_size == 32


def test_layers_share_their_projection_after_loading_too(tmp_path: Path) -> None:
    model = classifier()
    fitted(model, tmp_path, Digits()).save_checkpoint(tmp_path / "made.ckpt")
    first, second = (
        block.attn for block in Classifier.load_from_checkpoint(tmp_path / "made.ckpt").encoder.trunk.blocks
    )
    assert first.project_keys is first.project_values is second.project_keys is second.project_values


def test_the_training_sets_statistics_are_in_the_encoder_after_fit(tmp_path: Path) -> None:
    model, data = classifier(), Digits()
    fitted(model, tmp_path, data)
    pixels = data.train_set.inputs.double()
    assert model.encoder.mean.item() == pytest.approx(pixels.mean().item(), rel=1e-5)
    assert model.encoder.std.item() == pytest.approx(pixels.std(correction=0).item(), rel=1e-5)


def test_a_class_of_a_foreign_package_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="canary.Bird may not be named; --allow_class canary"):
        build({"class_path": "canary.Bird", "init_args": {}}, Encoder)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="broken.ckpt: not a readable checkpoint"):
        read_checkpoint(path)


def test_another_programs_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="foreign.ckpt: not a checkpoint of longseq"):
        read_checkpoint(tmp_path / "foreign.ckpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": 1}, "num_classes must be 2 or more for the task SingleLabel, got 1; add a class, or pretrain"),
        ({"class_names": ["a"]}, "class_names must hold num_classes = 10 names, got 1"),
        ({"learning_rate": -1.0}, "learning_rate must be positive and at most 1e30, got -1"),
        ({"weight_decay": -1.0}, "weight_decay must be in 0..1e6, got -1"),
        ({"betas": [0.9]}, "betas must be two numbers in 0..1 .1 excluded., got .0.9."),
        ({"betas": [0.9, 1.0]}, "betas must be two numbers in 0..1"),
        ({"class_weights": [1.0] * 9}, "class_weights must be 10 positive numbers or balanced"),
        ({"class_weights": [float("nan")] * 10}, "class_weights must be 10 positive numbers"),
        ({"label_smoothing": 1.0}, "label_smoothing must be in"),
        ({"optimizer": "adamm"}, "optimizer must be one of timm's, got 'adamm'"),
    ],
)
def test_a_number_out_of_range_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier(**change)


class WithItsOwnCourse(Classifier):
    def configure_optimizers(self) -> dict[str, Any]:
        groups = [{"params": [self.head.weight], "lr": 1e-2}, {"params": [self.head.bias], "lr": 1e-5}]
        optimizer = torch.optim.SGD(groups)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100)}


def test_a_subclass_keeps_its_own_optimizer_and_course(tmp_path: Path) -> None:
    model = WithItsOwnCourse(classifier().encoder, 10)
    trainer = fitted(model, tmp_path, Digits())
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [1e-2, 1e-5]
    assert type(trainer.lr_scheduler_configs[0].scheduler) is torch.optim.lr_scheduler.StepLR


class Freeze(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        pl_module.encoder.requires_grad_(False)


def test_what_a_callback_freezes_stays_as_it_is(tmp_path: Path) -> None:
    model = classifier()
    before = {name: weight.clone() for name, weight in model.encoder.named_parameters()}
    fitted(model, tmp_path, Digits(), callbacks=[Freeze()])
    for name, weight in model.encoder.named_parameters():
        assert torch.equal(weight, before[name]), name
    assert model.head.weight.any()
