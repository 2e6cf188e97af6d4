"""Masked pretraining: what is hidden, what the loss counts, and that a classifier starts from it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import longseq
from longseq import ImageEncoder, Linformer, SpecAugment, SpectrogramEncoder, Verma
from longseq.encoders.patches import patches_of
from longseq.tasks import Masked
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample

ROOT = Path(__file__).parents[2]
SMALL = {"dim": 16, "depth": 2, "heads": 4}


def images(count: int = 3) -> torch.Tensor:
    return torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def clips() -> dict[str, torch.Tensor]:
    lengths = torch.tensor([3200, 1000, 90])
    waveforms = torch.randn(3, 3200, generator=torch.Generator().manual_seed(0))
    return {"waveforms": waveforms * (torch.arange(3200) < lengths[:, None]), "lengths": lengths}


def classifier(encoder, **options) -> Classifier:
    torch.manual_seed(0)
    return Classifier(encoder, 2, task=Masked(**options))


def test_targets_are_the_normalised_pixels_of_each_patch_and_the_loss_is_over_hidden_ones_alone() -> None:
    encoder = ImageEncoder((3, 8, 8), Linformer(7), patch_size=2, **SMALL)
    encoder.measure([images()])
    model = classifier(encoder, share=0.25).eval()
    outputs = model(images())
    assert outputs.shape == (3, 16, 2 * 12 + 1)
    rebuilt, targets, counted = outputs[..., :12], outputs[..., 12:24], outputs[..., 24]
    assert counted.sum(1).tolist() == [4, 4, 4]
    picture = (images().float() - encoder.mean) / encoder.std
    for sample in range(3):
        for token in range(16):
            y, x = 2 * (token // 4), 2 * (token % 4)
            expected = picture[sample, :, y : y + 2, x : x + 2].flatten()
            torch.testing.assert_close(targets[sample, token], expected)
    errors = [(rebuilt[s, t] - targets[s, t]).abs().mean() for s in range(3) for t in range(16) if counted[s, t] > 0]
    expected = torch.stack(errors).mean()
    torch.testing.assert_close(model.task.loss(outputs, outputs, torch.ones(2), 0.0), expected)
    metric = model.task.own_metrics(2)["l1"]
    for part in outputs.split(2):
        metric.update(part, torch.zeros(len(part)))
    torch.testing.assert_close(metric.compute(), expected)
    torch.testing.assert_close(model.task.losses(outputs, torch.zeros(3)).mean(), expected)


def test_what_is_hidden_is_not_seen() -> None:
    """New pixels in hidden places do not change what the model rebuilds; new pixels in other places do."""
    encoder = ImageEncoder((3, 8, 8), Verma(), **SMALL)
    encoder.set_statistics(torch.full((3, 1, 1), 128.0), torch.full((3, 1, 1), 60.0))
    model = classifier(encoder).double().eval()
    first = model(images())
    hidden = first[..., -1].unflatten(1, (8, 8)) > 0
    assert hidden.float().mean() == 0.5
    changed = torch.where(hidden[:, None], 255 - images(), images())
    torch.testing.assert_close(model(changed)[..., :3], first[..., :3], rtol=1e-12, atol=1e-12)
    changed = torch.where(hidden[:, None], images(), 255 - images())
    assert (model(changed)[..., :3] - first[..., :3]).abs().max() > 1e-3


def test_a_training_hides_other_tokens_each_time_and_an_evaluation_the_same() -> None:
    model = classifier(ImageEncoder((3, 8, 8), Verma(), **SMALL))
    model.encoder.measure([images()])
    assert torch.equal(model.eval()(images())[..., -1], model(images())[..., -1])
    model.train()
    assert not torch.equal(model(images())[..., -1], model(images())[..., -1])


def test_an_evaluation_hides_the_same_whatever_the_batch() -> None:
    model = classifier(SpectrogramEncoder(8000, 0.4, Verma(), num_mels=8, **SMALL), span=2).eval()
    model.encoder.measure([clips()])
    together = model(clips())[..., -1]
    for number, (waveform, length) in enumerate(zip(*clips().values(), strict=True)):
        alone = model({"waveforms": waveform[None, :length], "lengths": length[None]})[0, :, -1]
        assert torch.equal(together[number, : len(alone)], alone)
        assert not together[number, len(alone) :].any()


def test_errors_of_bfloat16_outputs_are_summed_in_float32() -> None:
    outputs = torch.rand(2, 4000, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs[..., -1] = 1
    task = Masked()
    expected = (outputs[..., :4].double() - outputs[..., 4:8].double()).abs().mean()
    loss = task.loss(outputs, outputs, torch.ones(2), 0.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert task.weight(outputs, outputs, torch.ones(2)) == 2 * 4000 * 4


def test_a_rebuilder_costs_what_it_multiplies_for_every_token() -> None:
    encoder = ImageEncoder((3, 32, 32), Verma(), patch_size=4, dim=64, depth=2, heads=4)
    of_head = flops_per_sample(classifier(encoder)).forward - flops_per_sample(Classifier(encoder, 2)).forward
    assert of_head == 2 * 64 * 64 * (3 * 4 * 4) - 2 * 64 * 2


def test_spans_hide_neighbours_together() -> None:
    model = classifier(ImageEncoder((3, 8, 8), Verma(), **SMALL), span=8).eval()
    counted = model(images())[..., -1].unflatten(1, (8, 8))
    assert ((counted == 0).all(2) | (counted == 1).all(2)).all()


def test_padding_is_neither_seen_nor_counted() -> None:
    encoder = SpectrogramEncoder(8000, 0.4, Linformer(7), num_mels=16, **SMALL)
    encoder.measure([clips()])
    model = classifier(encoder).double().eval()
    outputs = model(clips())
    rows = encoder.rows(clips()).tolist()
    for sample, count in enumerate(rows):
        assert outputs[sample, count:, -1].sum() == 0
    batch = clips()
    batch["waveforms"][1, 1100:] = 0.7  # behind what its last frame hears
    torch.testing.assert_close(model(batch)[1, : rows[1], :16], outputs[1, : rows[1], :16], rtol=1e-9, atol=1e-9)


def test_inputs_of_any_length_have_a_share_of_their_own_tokens_hidden() -> None:
    encoder = SpectrogramEncoder(8000, 1.0, Verma(), num_mels=16, positions="none", any_length=True, **SMALL)
    encoder.measure([clips()])
    model = classifier(encoder).eval()
    for first, length in ((0, 41), (1, 13)):
        batch = {name: values[first:] for name, values in clips().items()}
        assert model(batch)[..., -1].shape == (3 - first, 41)  # as long as the padded waveforms
        alone = {name: values[:1] for name, values in batch.items()}
        assert model(alone)[..., -1].shape == (1, length) and model(alone)[..., -1].sum() == round(0.5 * length)


@pytest.mark.parametrize(("share", "span"), [(0.5, 1), (0.3, 1), (0.5, 4), (0.9, 4)])
def test_of_each_clip_of_a_batch_a_share_of_its_own_tokens_is_hidden(share: float, span: int) -> None:
    encoder = SpectrogramEncoder(8000, 0.4, Verma(), num_mels=16, positions="none", **SMALL)
    encoder.measure([clips()])
    model = classifier(encoder, share=share, span=span).train()
    counts = encoder.rows(clips()).tolist()
    assert counts == [41, 13, 2]
    for _ in range(5):
        hidden = model(clips())[..., -1]
        for sample, count in enumerate(counts):
            spans = -(-count // span)
            number = max(min(round(share * spans), spans - 1), 1)  # of spans, of which the last may be shorter
            assert number * span - (spans * span - count) <= hidden[sample].sum() <= number * span
            assert hidden[sample].sum() < count or spans == 1


def test_behind_the_end_of_a_clip_there_is_nothing_to_rebuild() -> None:
    """In its last row of patches too, which may reach beyond its end."""
    encoder = SpectrogramEncoder(8000, 0.4, Verma(7), num_mels=16, tokens=[8, 4], **SMALL)
    encoder.measure([clips()])
    model = classifier(encoder).eval()
    alone = {"waveforms": clips()["waveforms"][1:2, :1000], "lengths": clips()["lengths"][1:2]}
    count = model(alone).shape[1]
    assert encoder.rows(alone) % 8 and count == 8
    torch.testing.assert_close(model(clips())[1, :count, 32:64], model(alone)[0, :, 32:64])


def test_its_weight_is_what_its_loss_divides_by() -> None:
    """So that the losses of several processes become that of all their clips, however long each one is."""
    encoder = SpectrogramEncoder(8000, 0.4, Verma(), num_mels=16, positions="none", **SMALL)
    encoder.measure([clips()])
    model = classifier(encoder).eval()
    outputs, labels, ones = model(clips()), torch.zeros(3), torch.ones(2)
    parts = [part.contiguous() for part in outputs.split([1, 2])]
    losses = torch.stack([model.task.loss(part, part, ones, 0.0) for part in parts])
    weights = torch.stack([model.task.weight(part, labels, ones) for part in parts])
    torch.testing.assert_close((losses * weights).sum() / weights.sum(), model.task.loss(outputs, labels, ones, 0.0))
    assert weights.tolist() == [16 * round(41 / 2), 16 * (round(13 / 2) + 1)]


def test_a_pretraining_does_not_mix_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier(ImageEncoder((3, 8, 8), Verma(), **SMALL))
    model.encoder.measure([images()])
    model.mix = lambda inputs, targets: pytest.fail("mixed")
    monkeypatch.setattr("longseq.training.classifier.loss_of_step", lambda losses, *_: (losses[0].mean,) * 3)
    monkeypatch.setattr("longseq.training.classifier.is_spare_batch", lambda trainer, index: False)
    monkeypatch.setattr(model.bad_steps, "count", lambda *arguments: False)
    monkeypatch.setattr(model, "log", lambda *arguments: None)
    model._trainer = object()
    assert model.training_step((images(), torch.tensor([0, 1, 0])), 0).isfinite()


@pytest.mark.parametrize("tokens", ["frames", [8, 4]], ids=str)
def test_every_weight_learns_and_a_picture_is_drawn(tokens) -> None:
    encoder = SpectrogramEncoder(8000, 0.4, Linformer(7), num_mels=16, tokens=tokens, **SMALL)
    model = classifier(encoder).train()
    with pytest.warns(UserWarning, match="never measured"):
        outputs = model(clips())
    model.task.loss(outputs, outputs, torch.ones(2), 0.0).backward()
    assert [name for name, weight in model.named_parameters() if not weight.grad.abs().sum()] == []
    figure = model.task.draw(encoder, outputs.detach())
    assert len(figure.axes) == 9
    picture, _ = encoder.prepared(clips())
    shape = (picture.shape[0], 1, -1, 16)
    whole = torch.stack(
        [
            model.task._picture(encoder, patches)
            for patches in patches_of(picture, *encoder.trunk.patch_embed.patch_size)
        ]
    )
    again = ((whole - encoder.mean) / encoder.std).reshape(shape)[:, :, : picture.shape[2]]
    torch.testing.assert_close(again, picture, rtol=1e-4, atol=1e-4)


def test_a_pretraining_from_the_command_line_is_a_start_for_a_classifier(command, tmp_path: Path) -> None:
    fit = ["fit", "--config", ROOT / "configs/image/digits.yaml", "--model.encoder.dim", "16", "--model.encoder.depth"]
    fit += ["1", "--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "2"]
    done = command(*fit, "--model.task", "Masked", "--model.task.share", "0.4", "--experiment", "masked")
    assert done.code == 0, done.err
    assert "test l1:" in done.out
    figures = json.loads(Path("runs/masked/0/metrics.json").read_text())
    assert figures["test/l1"] == pytest.approx(figures["test/loss"], rel=1e-3)
    events = EventAccumulator(*map(str, Path("runs/masked/0").glob("*seed0")), size_guidance={"images": 0}).Reload()
    assert len(events.Images("val/outputs")) == 2
    losses = [point.value for point in events.Scalars("val/l1")]
    assert losses[-1] < losses[0] < 2
    done = command(*fit, "--model.init_from", "runs/masked/0/best.ckpt", "--experiment", "fine")
    assert done.code == 0, done.err
    assert "the head gets new weights: Masked before, SingleLabel now" in done.out
    model = Classifier.load_from_checkpoint("runs/masked/0/best.ckpt")
    assert (type(model.task), model.task.share) == (Masked, 0.4)
    (tmp_path / "x.png").write_bytes((ROOT / "docs/picture.png").read_bytes())
    predict = ["predict", "--ckpt_path", "runs/masked/0/best.ckpt", "--input", "x.png"]
    done = command(*predict)
    assert (done.code, "Masked predicts no classes; give --embeddings" in done.error) == (2, True)
    features = ["--embeddings", "features.npz"]
    done = command(*predict, *features, "--top", "3")
    assert (done.code, done.error) == (2, "error: top: applies to classes, and Masked predicts none; leave it out")
    done = command(*predict, *features)
    assert (done.code, done.out) == (0, ""), done.err
    expected = longseq.load("runs/masked/0/best.ckpt").embed("x.png")
    np.testing.assert_allclose(np.load("features.npz")["embeddings"], expected, rtol=1e-5, atol=1e-6)


def test_what_specaugment_would_hide_is_no_target() -> None:
    encoder = SpectrogramEncoder(8000, 0.4, Verma(), num_mels=16, spec_augment=SpecAugment(), **SMALL)
    model, inputs = classifier(encoder), {"waveforms": torch.randn(4, 3200), "lengths": torch.full((4,), 3200)}
    encoder.measure([inputs])
    torch.testing.assert_close(model.train()(inputs)[..., 16:32], model.eval()(inputs)[..., 16:32])


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="^share must be in 0..1"):
        Masked(share=1.0)
    with pytest.raises(ValueError, match="^span must be 1 or more"):
        Masked(span=0)
    with pytest.raises(ValueError, match="^metrics must be absent: .* got recall; leave them out"):
        Masked(metrics={"recall": "MulticlassRecall"})
    with pytest.raises(ValueError, match=r"^task\.span must be smaller than the number of tokens, 64, got 64; "):
        classifier(ImageEncoder((3, 8, 8), Verma(), **SMALL), span=64)


def test_samples_of_several_classes_are_counted_for_the_card() -> None:
    assert Masked().counts(torch.tensor([[1, 0], [1, 1], [0, 0]]), 2).tolist() == [2, 1]
    assert Masked().counts(torch.tensor([1, 1, 0]), 2).tolist() == [1, 2]
