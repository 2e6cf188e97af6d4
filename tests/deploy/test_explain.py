"""What explain says: it finds the digit that decided, and draws it."""

import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from torch.nn.functional import cross_entropy

from datamodules import Needles
from datamodules.sets.needles import Maker
from longseq.arguments import ArgumentError
from longseq.attention import Linformer, Verma
from longseq.deploy.explain import _draw_image, _draw_sound, shortest_half
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.encoders.local import Conv1d
from longseq.tasks import MultiLabel
from longseq.training import Classifier
from longseq.training.answers.attribution import attribute
from longseq.training.answers.events import Event

RATE = 8000
DIGITS = 5  # zero to four


@pytest.fixture(scope="module")
def needles(real_data: Path) -> Needles:
    data = Needles(str(real_data), seconds=4.0, shortest=1.1)
    data.setup()
    return data


def spoken(maker: Maker, number: int, seconds: float, generator: torch.Generator) -> torch.Tensor:
    """A recording in which one digit is spoken."""
    return maker(torch.tensor(number % DIGITS), round(seconds * RATE), generator)


@pytest.fixture(scope="module")
def listener(needles: Needles) -> Classifier:
    """A model that was trained to tell which digit is spoken in recordings of up to two seconds."""
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(
        RATE, 4.0, Verma(length_scaling=1.0), num_mels=20, hop_ms=20.0, dim=32, depth=2, heads=2, mlp_ratio=2.0,
        any_length=True, positions="none", local=Conv1d(5),
    )  # fmt: skip
    model = Classifier(encoder, DIGITS, pool="max")
    generator = torch.Generator().manual_seed(0)
    maker, steps = needles.train_set.maker, 300

    def batch() -> torch.Tensor:
        seconds = 1.1 + 0.9 * float(torch.rand((), generator=generator))
        return torch.stack([spoken(maker, number, seconds, generator) for number in range(20)])

    batches = [batch() for _ in range(75)]  # heard four times each: drawing them takes as long as a step
    encoder.measure(batches[:4])
    labels = torch.arange(20) % DIGITS
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.03)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for step in range(steps):
        loss = cross_entropy(model(batches[step % len(batches)]), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@pytest.mark.thorough
def test_the_spoken_digit_in_a_longer_recording_holds_most_of_the_attribution(
    listener: Classifier, needles: Needles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In recordings of four seconds, whose digits and backgrounds no training has heard."""
    right, shares, of_rollout = [], [], []
    for trial in range(20):
        recordings = []
        for level_db in (15.0, -60.0):  # the same recording with its digit and, as good as, without it
            monkeypatch.setattr(needles, "level_db", level_db)
            generator = torch.Generator().manual_seed(trial)
            recordings.append(spoken(needles._test_maker, trial, 4.0, generator)[None])
        waveform, without = recordings
        frames = (listener.encoder.front_end(waveform) != listener.encoder.front_end(without)).any(3)[0, 0]
        assert 0.02 < float(frames.float().mean()) < 0.3
        (found,) = attribute(listener, waveform, [trial % DIGITS])
        rows = found.by_row()
        assert float(rows.sum()) == pytest.approx(1) == float(found.rollout.sum())
        right.append(int(listener(waveform).argmax()) == trial % DIGITS)
        shares.append(float(rows[frames].sum()))
        of_rollout.append(float(found.rollout[frames].sum() / frames.float().mean()))
    assert np.mean(right) >= 0.7, right
    assert np.mean(shares) >= 0.8, shares
    assert np.mean(of_rollout) > 2, of_rollout  # the digit's tokens give more than twice their part


def test_the_gradient_is_that_of_the_score() -> None:
    torch.manual_seed(0)
    model = Classifier(ImageEncoder((1, 6, 6), Linformer(5), dim=8, depth=2, heads=2), 3).double().eval()
    torch.nn.init.normal_(model.head.weight)
    model.encoder.set_statistics(torch.tensor(100.0), torch.tensor(50.0))
    image = torch.rand(1, 1, 6, 6).double() * 255
    found = attribute(model, image, [1])[0].gradient
    for row, column in ((0, 0), (3, 4)):
        change = torch.zeros_like(image)
        change[0, 0, row, column] = 1e-3
        slope = float(model(image + change)[0, 1] - model(image - change)[0, 1]) / 2e-3
        assert float(found[0, row, column]) == pytest.approx(slope * float(image[0, 0, row, column] - 100), rel=1e-3)


@pytest.mark.parametrize("pool", [None, "avg", "max", "linear_softmax", "attention"])
def test_padding_has_no_share(pool: str | None) -> None:
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(RATE, 0.4, Linformer(7), num_mels=20, dim=16, depth=2, heads=4)
    model = Classifier(encoder, 3, pool=pool).eval()  # type: ignore[arg-type]
    torch.nn.init.normal_(model.head.weight)
    encoder.set_statistics(torch.tensor(-5.0), torch.tensor(3.0))
    inputs = {"waveforms": torch.nn.functional.pad(torch.randn(1, 800), (0, 2400)), "lengths": torch.tensor([800])}
    (found,) = attribute(model, inputs, [0])
    assert found.rollout[11:].abs().max() == 0 and float(found.rollout.sum()) == pytest.approx(1)
    assert found.gradient[:, 11:].abs().max() == 0


def test_the_shortest_half_is_that_of_a_plain_search() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 9, 30):
        shares = torch.rand(length, generator=generator).double() ** 4
        first, last = shortest_half(shares)
        stretches = [
            (b - a, a, b)
            for a in range(length)
            for b in range(a, length)
            if shares[a : b + 1].sum() >= shares.sum() / 2
        ]
        assert last - first == min(stretches)[0] and shares[first : last + 1].sum() >= shares.sum() / 2 - 1e-12


def test_an_image_is_explained(command, digits_run: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 130).save(tmp_path / "grey.png")
    flags = ["--ckpt_path", digits_run / "best.ckpt", "--input", tmp_path / "grey.png"]
    done = command("explain", *flags, "--top", "2", "--out", tmp_path / "new/explained.png")
    assert done.code == 0, done.err
    assert len(re.findall(r"\d 0\.\d\d: half of the attribution lies in \d+ of 64 pixels", done.out)) == 2
    assert Image.open(tmp_path / "new/explained.png").width > 600
    again = command("explain", *flags, "--top", "2", "--out", tmp_path / "new/explained.png")
    assert (again.code, again.out) == (0, done.out), again.err
    mine = (tmp_path / "grey.png").read_bytes()
    done = command("explain", *flags, "--out", tmp_path / "grey.png")
    assert done.code == 2 and done.error.startswith("error: out: must be a new file, or one that longseq has written, ")
    assert (tmp_path / "grey.png").read_bytes() == mine
    done = command("explain", *flags, "--top", "11")
    assert done.code == 2 and "top: must be in 1..10" in done.err and done.err.count("\n") == 1
    done = command("explain", *flags[:3], tmp_path / "none.png")
    assert done.code == 2 and "none.png: no such file" in done.err and done.err.count("\n") == 1
    done = command("explain", *flags[:3], tmp_path)
    assert (
        done.error
        == f"error: input: must be an image file or a sound file, got {tmp_path}: a folder; give one of its files"
    )
    for form in ("bmp", "pgf", "rgba"):
        done = command("explain", *flags, "--out", tmp_path / f"explained.{form}")
        assert done.code == 2 and "out: must be a .png, .pdf or .svg" in done.err and done.err.count("\n") == 1


def recording(label: int, generator: torch.Generator) -> torch.Tensor:
    """Two seconds of noise with one of two tones in it, for 0.4 s."""
    waveform = 0.01 * torch.randn(2 * RATE, generator=generator)
    begin = int(torch.randint(2 * RATE - 3200, (), generator=generator))
    waveform[begin : begin + 3200] += 0.2 * torch.sin(2 * torch.pi * (500, 1500)[label] * torch.arange(3200) / RATE)
    return waveform


def test_a_recording_is_explained_with_its_events(command, tmp_path: Path) -> None:
    lines = ["path,label"]
    for number in range(12):
        waveform = recording(number % 2, torch.Generator().manual_seed(number))
        soundfile.write(tmp_path / f"{number}.wav", waveform.numpy(), RATE)
        lines.append(f"{number}.wav,{'low' if number % 2 else 'low;high'}")
    (tmp_path / "clips.csv").write_text("\n".join(lines) + "\n")
    data = ["--data.root", tmp_path, "--data.table", tmp_path / "clips.csv", "--data.labels_separator", ";"]
    free = ["--model.encoder.any_length", "true", "--model.encoder.positions", "none", "--model.pool", "max"]
    small = ["--model.encoder.dim", "16", "--model.encoder.depth", "1", "--model.encoder.attention", "Verma"]
    small += ["--model.encoder.attention.k", "null"]
    flags = ["--model.task", "MultiLabel", "--trainer.max_epochs", "1", "--trainer.default_root_dir", tmp_path]
    done = command("fit", "--config", "audio/folder", *small, *free, *data, *flags, "--trainer.accelerator", "cpu")
    assert done.code == 0, done.err
    (checkpoint,) = (tmp_path / "runs").glob("*/0/best.ckpt")
    done = command(
        "explain", "--ckpt_path", checkpoint, "--input", tmp_path / "3.wav", "--top", "2", "--out", tmp_path / "x.png"
    )
    assert done.code == 0, done.err
    times = [tuple(map(float, pair)) for pair in re.findall(r"between (\d+\.\d\d) and (\d+\.\d\d) s", done.out)]
    assert len(times) == 2 and all(0 <= begin < end <= 2.02 for begin, end in times)
    assert Image.open(tmp_path / "x.png").height > 500


def test_a_model_without_attention_is_refused() -> None:
    model = Classifier(ImageEncoder((1, 4, 4), Verma(), dim=8, depth=1, heads=2), 3, task=MultiLabel()).eval()
    model.encoder.trunk.blocks[0].attn = torch.nn.Identity()
    with pytest.raises(ArgumentError, match="must have attention in every block"):
        attribute(model, torch.zeros(1, 1, 4, 4), [0])


LONG = [
    "Great spotted woodpecker (Dendrocopos major)",
    "Eurasian three-toed woodpecker (Picoides tridactylus), also called northern three-toed woodpecker",
    "Lesser_spotted_woodpecker_(Dryobates_minor)_juvenile",
]


def overlapping(figure) -> list[tuple[str, str]]:
    """The texts of a figure that lie on each other, or reach out of it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in figure.findobj(Text) if re.search("[a-z]", text.get_text())]  # no numbers of ticks
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    pairs = [(one, two) for n, (one, box) in enumerate(boxes) for two, other in boxes[:n] if box.overlaps(other)]
    width, height = canvas.get_width_height()
    outside = [(name, "edge") for name, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    return pairs + outside


@pytest.mark.parametrize("number", [1, 3])
def test_long_names_do_not_overlap_in_the_picture_of_an_image(number: int) -> None:
    model = Classifier(ImageEncoder((3, 8, 8), Linformer(k=4), dim=8, depth=1, heads=1), 3).eval()
    batch = 255 * torch.rand(1, 3, 8, 8)
    found = attribute(model, batch, list(range(number)))
    names = [f"{name} 0.{label}1" for label, name in enumerate(LONG[:number])]
    assert overlapping(_draw_image(model.encoder, batch[0], names, found, (0, 255))) == []


def test_a_name_that_begins_with_an_underscore_is_in_the_legend() -> None:
    model = Classifier(SpectrogramEncoder(RATE, 1.0, Linformer(k=4), dim=8, depth=1, heads=1), 3).eval()
    batch = {"waveforms": torch.randn(1, RATE), "lengths": torch.tensor([RATE])}
    picture = model.encoder.front_end(batch)[0].detach()
    figure = _draw_sound(model.encoder, picture, ["_silence_ 0.91"], attribute(model, batch, [0]), 0.0, [])
    assert "_silence_ 0.91" in [text.get_text() for text in figure.findobj(Text)]


def test_long_names_do_not_overlap_in_the_picture_of_a_sound() -> None:
    model = Classifier(SpectrogramEncoder(RATE, 1.0, Linformer(k=4), dim=8, depth=1, heads=1), 3).eval()
    batch = {"waveforms": torch.randn(1, RATE), "lengths": torch.tensor([RATE])}
    found = attribute(model, batch, [0, 1, 2])
    with torch.no_grad():
        picture = model.encoder.front_end(batch)[0]
    names = [f"{name} 0.{label}1" for label, name in enumerate(LONG)]
    times = [(0.05, 0.2, 0), (0.15, 0.5, 1), (0.17, 0.3, 2), (0.9, 0.98, 1), (0.92, 0.95, 0)]
    events = [Event(begin, end, LONG[label], 0.9) for begin, end, label in times]
    assert overlapping(_draw_sound(model.encoder, picture, names, found, 0.0, events)) == []
