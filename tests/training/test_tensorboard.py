"""What the callbacks leave in TensorBoard's event files, read back with TensorBoard's own reader."""

import io
import math
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.tensorboard import SummaryWriter

from datamodules import Digits, ImageFolder, Shift
from longseq.attention import Linformer, Verma
from longseq.encoders import Encoder, ImageEncoder, Residual, SpectrogramEncoder
from longseq.encoders.drawing import mel_row
from longseq.tasks import MultiLabel, SingleLabel, Task
from longseq.training import Classifier
from longseq.training.board.curves import read_curves
from longseq.training.board.pictures import draw_confusions
from longseq.training.board.tensorboard import (
    BestFigure,
    Confusions,
    DrawsSeldom,
    InputSamples,
    Overview,
    RateAndNorm,
    _choices,
    _name_of,
)

pytestmark = pytest.mark.draws

NAMES = ["cat", "dog", "who'd"]
SIZE = {"dim": 8, "depth": 1, "heads": 1}
RATE_HZ = 4000


class Samples(Dataset):
    """Twelve inputs; their augmentation draws from torch's global generator."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        torch.rand(1)
        return self.inputs[index], index % 3


def images() -> tuple[Encoder, Samples]:
    return ImageEncoder((3, 4, 4), Linformer(4), **SIZE), Samples(torch.randint(0, 256, (12, 3, 4, 4)).byte())


def sounds() -> tuple[Encoder, Samples]:
    encoder = SpectrogramEncoder(RATE_HZ, 0.25, Linformer(4), num_mels=16, **SIZE)
    time = torch.arange(RATE_HZ // 4) / RATE_HZ
    return encoder, Samples(0.1 * torch.sin(2 * torch.pi * 440 * time).repeat(12, 1))


def loader(dataset: Dataset, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size, collate_fn=lambda samples: tuple(default_collate(samples)), **options)


class Scripted(Classifier):
    """Classifies a fixed share of the validation samples correctly, one share an epoch, and calls the rest dogs."""

    shares = (0.5, 1.0, 0.75)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        labels = batch[1]
        share = 0.0 if self.trainer.sanity_checking else self.shares[self.trainer.current_epoch]
        right = torch.arange(len(labels)) < share * len(labels)
        answers = torch.where(right, labels, 1)
        self.log("val/accuracy", (answers == labels).float().mean())
        outputs = torch.nn.functional.one_hot(answers, 3).float()
        return {"outputs": outputs, "predicted": outputs, "labels": labels}


def fit(
    folder: Path, callbacks: list[pl.Callback], kind: Any = images, task: Task | None = None, **options: Any
) -> pl.Trainer:
    torch.manual_seed(0)
    encoder, dataset = kind()
    model = Scripted(encoder, 3, NAMES) if task is None else Classifier(encoder, 3, NAMES, task)
    trainer = pl.Trainer(
        accelerator="cpu", enable_model_summary=False, enable_progress_bar=False, enable_checkpointing=False,
        callbacks=callbacks, limit_train_batches=1,
        **{"max_epochs": 3, "logger": TensorBoardLogger(folder, "", "run", default_hp_metric=False)} | options,
    )  # fmt: skip
    trainer.fit(model, loader(dataset, 4, shuffle=True), loader(dataset, 12))
    return trainer


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "run"), {"images": 0, "audio": 0, "scalars": 0}).Reload()


def hparams(events: EventAccumulator) -> dict[str, Any]:
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def picture(image: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))


def test_the_confusion_matrix_is_an_image_of_every_epoch_on_lightnings_axis(tmp_path: Path) -> None:
    fit(tmp_path, [Confusions()])
    shown = read(tmp_path).Images("val/confusion")
    assert [image.step for image in shown] == [0, 1, 2]  # one training step an epoch; the first is 0
    first, second, third = (picture(image) for image in shown)
    assert first.shape == second.shape == third.shape
    assert not np.array_equal(first, second) and not np.array_equal(second, third)


def test_names_that_pictures_replace_by_numbers_are_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(folder: Path) -> dict[str, str]:
        fit(folder, [Overview()], max_epochs=1)
        events = read(folder)
        tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("text_summary")]
        return {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags}

    assert "classes/text_summary" not in texts(tmp_path / "latin")
    monkeypatch.setitem(globals(), "NAMES", ["cat", "\U0010fff0", "who'd"])
    assert "1 \U0010fff0" in texts(tmp_path / "other")["classes/text_summary"]


@pytest.mark.parametrize(("seconds", "steps"), [(100, [0, 1, 2]), (1, [0, 2])])
def test_figures_that_take_longer_than_an_epoch_are_drawn_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, steps: list[int]
) -> None:
    """Of a clock that every figure moves on by a second, and every epoch by a few or many."""
    now = [0.0]

    def draw(matrix: Tensor, class_names: list[str]) -> Any:
        now[0] += 1
        return draw_confusions(matrix, class_names)

    class Clock(pl.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            now[0] += seconds

    monkeypatch.setattr("longseq.training.board.tensorboard.draw_confusions", draw)
    monkeypatch.setattr("longseq.training.board.tensorboard.time.perf_counter", lambda: now[0])
    fit(tmp_path, [DrawsSeldom(), Confusions(), Clock()])
    shown = read(tmp_path).Images("val/confusion")
    assert [image.step for image in shown] == steps
    fit(tmp_path / "each", [Confusions()])
    assert np.array_equal(picture(shown[-1]), picture(read(tmp_path / "each").Images("val/confusion")[-1]))


def test_the_confusion_matrix_counts_what_validation_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []

    def draw(matrix: Tensor, class_names: list[str]) -> Any:
        assert class_names == NAMES
        drawn.append(matrix)
        return draw_confusions(matrix, class_names)

    monkeypatch.setattr("longseq.training.board.tensorboard.draw_confusions", draw)
    fit(tmp_path, [Confusions()], max_epochs=2)
    assert drawn[0].tolist() == [[2, 2, 0], [0, 4, 0], [0, 2, 2]]  # the first six are right; the others are called dogs
    assert drawn[1].tolist() == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]


def brightness(figure: Figure) -> Callable[[int, int], float]:
    """Return a function that gives the brightness (0..255) of the cell in a row and a column."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].mean(-1)

    def cell(row: int, column: int) -> float:
        x, y = figure.axes[0].transData.transform((column + 0.3, row + 0.3))  # beside the number
        return pixels[int(len(pixels) - y), int(x)]  # the pixel that holds the place

    return cell


@pytest.mark.parametrize("num_classes", [2, 10, 25, 26, 200])
def test_a_confusion_matrix_of_few_or_many_classes_is_drawn_legibly(num_classes: int) -> None:
    matrix = torch.diag(torch.arange(num_classes))  # class 0 has no samples
    figure = draw_confusions(matrix, [f"class {label}" for label in range(num_classes)])
    cell = brightness(figure)
    assert cell(0, 0) > 230 and cell(num_classes - 1, num_classes - 1) < 100
    assert max(figure.get_size_inches() * figure.dpi) <= 1400
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert ("class 1" in labels) == (num_classes <= 25)


def test_a_confusion_is_coloured_by_its_share_of_the_true_class() -> None:
    cell = brightness(draw_confusions(torch.tensor([[1, 0], [99, 1]]), NAMES[:2]))
    assert cell(0, 0) < 100 and cell(1, 0) < 100  # all of class 0, and nearly all of class 1
    assert cell(0, 1) > cell(1, 1) + 10  # a share of one in a hundred must differ visibly from none


def test_images_are_shown_once_and_the_training_order_stays_the_same(tmp_path: Path) -> None:
    class Order(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
            seen[-1].append(batch[0])

    seen: list[list[Tensor]] = [[]]
    fit(tmp_path, [Order(), InputSamples(3)])
    events = read(tmp_path)
    assert len(events.Images("inputs/samples")) == 1
    assert events.Tags()["audio"] == []
    seen.append([])
    fit(tmp_path / "without", [Order()])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_images_that_a_gpu_makes_of_indices_are_shown_as_the_loader_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(folder: Path) -> bytes:
        torch.manual_seed(0)
        data = Digits(augment=[Shift(0.5)])
        model = Classifier(ImageEncoder(data.shape, Linformer(4), dim=8, depth=1, heads=1), 10)
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=1, limit_val_batches=0, enable_model_summary=False, enable_checkpointing=False,
            logger=TensorBoardLogger(folder, "", "run", default_hp_metric=False), callbacks=[InputSamples(3)],
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
        return read(folder).Images("inputs/samples")[0].encoded_image_string

    by_loader = shown(tmp_path / "loader")
    monkeypatch.setattr(Digits, "_gpu", lambda _: torch.device("cpu"))
    monkeypatch.setattr(Digits, "_free_bytes", lambda *_: 2**30)
    assert shown(tmp_path / "device") == by_loader


def test_sounds_can_be_heard_at_their_rate_and_full_volume(tmp_path: Path) -> None:
    fit(tmp_path, [InputSamples(3)], sounds)
    events = read(tmp_path)
    assert len(events.Images("inputs/samples")) == 1
    tags = events.Tags()["audio"]
    assert len(tags) == 3 and all(tag.split("_")[1] in ("cat", "dog", "whod") for tag in tags)
    (heard,) = events.Audio(tags[0])
    assert heard.sample_rate == RATE_HZ
    with wave.open(io.BytesIO(heard.encoded_audio_string)) as file:
        assert file.getframerate() == RATE_HZ and file.getnframes() == RATE_HZ // 4
        assert np.abs(np.frombuffer(file.readframes(RATE_HZ), "<i2")).max() == 32767


@pytest.mark.parametrize("hertz", [250, 500, 1000, 2000])
def test_the_frequency_axis_tells_where_a_tone_lies(hertz: int) -> None:
    encoder = SpectrogramEncoder(16000, 0.5, Linformer(4), num_mels=80, **SIZE)
    tone = torch.sin(2 * torch.pi * hertz * torch.arange(8000) / 16000)
    loudest = int(encoder.front_end(tone[None])[0, 0, 25].argmax())
    assert mel_row(hertz, 80, 16000) == pytest.approx(loudest + 0.5, abs=1)


def test_the_hparams_tab_shows_the_best_accuracy_not_the_last_beside_flat_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    fit(tmp_path, [BestFigure()])
    events = read(tmp_path)
    before, *best = [scalar.value for scalar in events.Scalars("hp/val_best")]
    assert math.isnan(before) and best == pytest.approx([2 / 3, 1.0, 1.0])  # TensorBoard shows no point for NaN
    choices = hparams(events)
    assert choices["settings.encoder"] == "ImageEncoder" and choices["settings.encoder.dim"] == 8
    assert choices["attention"] == "Linformer" and choices["k"] == "4"
    assert sorted(choices)[:3] == ["attention", "k", "learning_rate"]  # with a data module also batch_size and data
    assert choices["learning_rate"] == 1e-3 and choices["precision"] == "32-true" and choices["tokens"] == 16
    assert choices["parameters"] > 100 and choices["seed"] == 7
    assert not any("class_path" in name or "init_args" in name or "class_names" in name for name in choices)


def test_the_hparams_tab_has_the_figures_of_all_tasks_of_a_folder(tmp_path: Path) -> None:
    """As TensorBoard itself reads a folder with runs of two tasks, whose figures have different names."""
    dataset = images()[1]
    for name, task in {"first": SingleLabel(), "second": MultiLabel()}.items():
        trainer = fit(tmp_path / name, [BestFigure()], task=task, max_epochs=1)
        trainer.test(trainer.lightning_module, loader(dataset, 12), verbose=False)
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(runs, str(tmp_path))))
    request = RequestContext()
    declared = context.experiment_from_metadata(request, "", True, context.hparams_metadata(request, ""), None)
    columns = [info.name.tag for info in declared.metric_infos]
    assert columns == ["hp/val_best", "hp/test"]
    for name, metric in {"first": "accuracy", "second": "average_precision"}.items():
        events = read(tmp_path / name)
        last = [events.Scalars(tag)[-1].value for tag in (*columns, f"val/{metric}", f"test/{metric}")]
        assert last[:2] == last[2:]


def test_the_best_accuracy_outlives_a_resumed_training(tmp_path: Path) -> None:
    first = BestFigure()
    trainer = fit(tmp_path / "first", [first], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    encoder, dataset = images()
    trainer = pl.Trainer(
        accelerator="cpu", enable_model_summary=False, enable_progress_bar=False, enable_checkpointing=False,
        logger=TensorBoardLogger(tmp_path, "", "run", default_hp_metric=False), callbacks=[BestFigure()],
        max_epochs=3, limit_train_batches=1,
    )  # fmt: skip
    trainer.fit(
        Scripted(encoder, 3, NAMES),
        loader(dataset, 4),
        loader(dataset, 12),
        ckpt_path=tmp_path / "last.ckpt",
        weights_only=True,
    )
    assert [scalar.value for scalar in read(tmp_path).Scalars("hp/val_best")] == [1.0, 1.0]


def test_the_overview_has_training_and_validation_in_one_chart_and_the_model_as_text(tmp_path: Path) -> None:
    fit(tmp_path, [Overview()])
    events = read(tmp_path)
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert charts["loss"] == ["train/loss", "val/loss"] and charts["accuracy"] == ["train/accuracy", "val/accuracy"]
    assert charts["learning rate"] == ["learning_rate"]
    text = events.Tensors("model/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "attention   Linformer(k=4" in text


def test_the_learning_rate_and_the_norm_of_the_gradients_are_curves(tmp_path: Path) -> None:
    class Norms(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            squares = sum(
                float(weight.grad.square().sum()) for weight in pl_module.parameters() if weight.grad is not None
            )
            expected.append((optimizer.param_groups[0]["lr"], squares**0.5))

    expected: list[tuple[float, float]] = []
    fit(tmp_path, [Norms(), RateAndNorm()], log_every_n_steps=1)
    events = read(tmp_path)
    rates, norms = ([point.value for point in events.Scalars(tag)] for tag in ("learning_rate", "gradient_norm"))
    assert len(rates) == len(expected) > 2
    for found, column in ((rates, 0), (norms, 1)):
        assert found == pytest.approx([each[column] for each in expected], rel=1e-4)


@pytest.mark.parametrize("other", [True, False])
def test_without_tensorboard_nothing_happens(tmp_path: Path, other: bool) -> None:
    callbacks = [Confusions(), InputSamples(), BestFigure(), Overview(), RateAndNorm()]
    fit(tmp_path, callbacks, logger=CSVLogger(tmp_path) if other else False, max_epochs=1)
    assert not list(tmp_path.rglob("events*"))


def test_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="num_samples must be positive"):
        InputSamples(0)


def test_the_curves_of_a_run_that_went_on_have_each_step_once_and_nothing_is_said(tmp_path: Path, caplog) -> None:
    for first, value in ((0, 1.0), (3, 2.0)):
        with SummaryWriter(str(tmp_path / "run/curves"), purge_step=first or None) as writer:
            for step in range(first, 6):
                writer.add_scalar("loss", value, step)
    assert read_curves(tmp_path / "run") == {"loss": [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]}
    assert not caplog.records


def test_a_model_without_blocks_has_no_attention_in_the_hparams_tab() -> None:
    model = Classifier(ImageEncoder((1, 8, 8), Verma(), patch_size=4, stem=Residual(), depth=0, dim=8, heads=1), 10)
    choices = _choices(pl.Trainer(accelerator="cpu", logger=False), model)
    assert choices["attention"] == "no blocks" and choices["tokens"] == 4


def test_two_folders_are_two_data_sets_in_the_hparams_tab() -> None:
    birds, frogs = (_name_of(ImageFolder(root)) for root in ("birds", "frogs"))
    assert (birds, frogs, _name_of(Digits())) == ("ImageFolder birds", "ImageFolder frogs", "Digits")
