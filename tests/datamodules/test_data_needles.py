"""Recordings with hidden digits: what is hidden, where, how loud, and that nothing of the test is heard before."""

import csv
import math
from pathlib import Path

import pytest
import torch
from small_sets import SMALL

from datamodules import ESC50, FSDD, Needles
from datamodules.errors import DataError
from datamodules.samples import ForTraining


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    SMALL[Needles](tmp_path, monkeypatch)
    return str(tmp_path)


def needles(root: str, **change) -> Needles:
    data = Needles(root, **{"num_train": 40, "num_test": 20, "seconds": 6.0, "shortest": 2.5, **change})
    data.setup()
    return data


def only_digits(root: str, trial: int, seconds: float = 6.0, **change) -> torch.Tensor:
    """A recording without its background: two levels of the same one differ in the digits alone."""
    loud, quiet = (needles(root, level_db=level, **change).recording(seconds, trial)[0] for level in (0.0, -60.0))
    return loud - quiet


@pytest.mark.parametrize("level", [20.0, 0.0, -6.0])
def test_a_digit_is_as_loud_as_was_asked_for(root: str, level: float) -> None:
    recording, _ = needles(root, level_db=level).recording(6.0, 3)
    background, _ = needles(root, level_db=-60.0).recording(6.0, 3)
    digit = recording - background
    heard = digit[digit != 0]
    ratio = heard.square().mean() / background[digit == 0].square().mean()
    assert 10 * torch.log10(ratio) == pytest.approx(level, abs=0.5)


@pytest.mark.parametrize("question", ["digit", "same", "order"])
def test_one_digit_is_hidden_or_two_in_different_halves(root: str, question: str) -> None:
    for trial in range(4):
        digits = only_digits(root, trial, question=question)
        halves = digits[:24_000], digits[24_000:]
        # the longest digit of the small set is 0.13 s long
        assert all(half.count_nonzero() <= 0.13 * 8000 for half in halves)
        assert sum(bool(half.any()) for half in halves) == (1 if question == "digit" else 2)


@pytest.mark.parametrize("question", ["digit", "same", "order"])
def test_a_label_is_what_is_spoken(root: str, question: str) -> None:
    data = needles(root, question=question)
    maker = data.train_set.maker
    generator = torch.Generator().manual_seed(0)
    pairs = set()
    for label in range(data.num_classes):
        for _ in range(40):
            spoken = maker._spoken(torch.tensor(label), generator)
            pairs.add(tuple(spoken))
            if question == "digit":
                assert spoken == [label]
            elif question == "same":
                assert data.class_names[label] == ("same" if spoken[0] == spoken[1] else "different")
            else:
                assert data.class_names[label] == ("rising" if spoken[0] < spoken[1] else "falling")
    assert len(pairs) == 10 if question == "digit" else len(pairs) > 30
    for digit, clips in enumerate(maker.digits):
        names = FSDD(root, val_fraction=0.1)
        names.setup()
        assert len(clips) == int((names.train_set.labels == digit).sum())


@pytest.mark.parametrize("held_out", [[7, 8, 9], [0, 5]])
def test_the_test_compares_digits_that_training_and_validation_never_hold(root: str, held_out: list[int]) -> None:
    data = needles(root, question="same", held_out_digits=held_out)
    others = set(range(10)) - set(held_out)
    for name, samples in data.splits().items():
        assert samples.labels.sum() == len(samples) // 2  # half are the same
        spoken: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
        generator = torch.Generator().manual_seed(0)
        for label, pairs in spoken.items():
            pairs.update(tuple(samples.maker._spoken(torch.tensor(label), generator)) for _ in range(900))
        expected = set(held_out) if name == "test" else others
        assert spoken[1] == {(digit, digit) for digit in expected}
        assert spoken[0] == {(first, second) for first in expected for second in expected if first != second}


def test_no_recording_of_one_digit_holds_a_held_out_one_and_the_classes_stay_ten(root: str) -> None:
    data = needles(root, held_out_digits=[0, 8])
    assert data.num_classes == 10
    for samples in data.splits().values():
        counts = samples.labels.bincount(minlength=10)
        assert counts[0] == counts[8] == 0 and counts[counts > 0].max() - counts[counts > 0].min() <= 1
    assert [data.recording(2.5, trial)[1] for trial in range(9)] == [1, 2, 3, 4, 5, 6, 7, 9, 1]


def test_held_out_digits_change_the_digest_and_their_absence_does_not_change_recordings(root: str) -> None:
    plain, held_out = needles(root, question="same"), needles(root, question="same", held_out_digits=[7, 8, 9])
    assert plain.test_set.digest() != held_out.test_set.digest()
    first = plain.test_set.maker._spoken(torch.tensor(0), torch.Generator().manual_seed(5))
    assert first == torch.randperm(10, generator=torch.Generator().manual_seed(5))[:2].tolist()


def test_recordings_of_several_digits_hold_one_to_three_different_ones_each_in_its_share(root: str) -> None:
    data = needles(root, question="digits", num_train=200, shortest=4.0)
    labels = data.train_set.labels
    assert labels.shape == (200, 10) and labels.unique().tolist() == [0, 1] and labels.sum(0).min() > 20
    assert labels.sum(1).unique(return_counts=True)[0].tolist() == [1, 2, 3]
    generator = torch.Generator().manual_seed(0)
    orders = [data.train_set.maker._spoken(labels[0], generator) for _ in range(20)]
    assert {tuple(sorted(order)) for order in orders} == {tuple(labels[0].nonzero()[:, 0].tolist())}
    loud, quiet = (needles(root, question="digits", shortest=4.0, level_db=level).test_set for level in (0.0, -60.0))
    for index in range(10):
        digits = loud.sample(index) - quiet.sample(index)
        # gaps within a digit are short, so that sounds a tenth of a second apart are two digits
        heard = digits.abs().unfold(0, 800, 800).amax(1) > 1e-4
        starts = int((heard[1:] & ~heard[:-1]).sum() + heard[0])
        assert starts == int(loud.labels[index].sum())
    with pytest.raises(DataError, match="several classes"):
        data.recording(6.0, 0)


def test_no_digit_and_no_background_of_the_test_was_heard_before(root: str) -> None:
    data = needles(root)
    digits, backgrounds = FSDD(root, val_fraction=0.1), ESC50(root, sample_rate_hz=8000)
    digits.setup()
    backgrounds.setup()
    with open(Path(root) / "ESC-50-master/meta/esc50.csv") as file:
        folds = {row["filename"]: row["fold"] for row in csv.DictReader(file)}
    used = {}
    for name, samples in data.splits().items():
        of_split = backgrounds.splits()[name]
        used[name] = {folds[Path(path).name] for path in of_split.names}
        for ours, theirs in zip(samples.maker.backgrounds, of_split.inputs, strict=True):
            torch.testing.assert_close(ours / ours.abs().max(), theirs / theirs.abs().max())
        heard = torch.cat([clip for clips in samples.maker.digits for clip in clips]).sort()[0]
        assert torch.equal(heard, torch.cat(list(digits.splits()[name].inputs)).sort()[0])
    assert used == {"train": {"1", "2", "3"}, "val": {"4"}, "test": {"5"}}


def test_no_speaker_of_the_test_was_heard_before_if_that_is_asked_for(real_data: Path) -> None:
    data = Needles(str(real_data), test_speakers=["theo"], val_speakers=["lucas"])
    data.setup()
    assert [sum(map(len, data.splits()[name].maker.digits)) for name in ("train", "val", "test")] == [2000, 500, 500]


def test_a_training_hears_new_recordings_in_every_epoch_and_an_evaluation_the_same_ones(root: str) -> None:
    data = needles(root)
    training = ForTraining(data.train_set, (), seed=0)
    (first, labels), (second, again) = (training.__getitems__([epoch * 40 + 5]) for epoch in (0, 1))
    assert torch.equal(labels, again) and torch.equal(first["lengths"], second["lengths"])
    assert not torch.equal(first["waveforms"], second["waveforms"])
    assert torch.equal(training.__getitems__([5])[0]["waveforms"], first["waveforms"])
    assert torch.equal(data.test_set.sample(3), data.test_set.sample(3))
    assert not torch.equal(data.test_set.sample(3)[:9000], data.test_set.sample(13)[:9000])
    assert data.train_set.lengths.min() >= 2.5 * 8000 and data.train_set.lengths.max() <= 6 * 8000
    assert [len(data.test_set.sample(index)) for index in range(9)] == data.test_set.lengths[:9].tolist()


def test_an_empty_recording_has_the_backgrounds_of_the_test_and_no_digit(root: str) -> None:
    loud, quiet = (needles(root, level_db=level) for level in (40.0, -60.0))
    empty = loud.empty_recording(6.0, 3)
    assert torch.equal(empty, quiet.empty_recording(6.0, 3)) and len(empty) == 48_000
    background, _ = quiet.recording(6.0, 3)
    torch.testing.assert_close(empty / empty.std(), background / background.std(), rtol=0, atol=0.01)
    assert not torch.equal(empty, loud.empty_recording(6.0, 4))


def test_recordings_of_any_duration_are_made_again_from_their_number(root: str) -> None:
    data = needles(root)
    waveform, label = data.recording(61.5, 12)
    assert len(waveform) == 61.5 * 8000 and label == 2 and waveform.abs().max() <= 1
    assert torch.equal(waveform, needles(root).recording(61.5, 12)[0])
    assert not torch.equal(waveform, data.recording(61.5, 22)[0])
    quiet = waveform.unfold(0, 800, 800).square().mean(1)
    assert (quiet > 0).all()  # the background never stops


def test_noise_has_the_spectra_of_the_recordings_and_never_repeats(root: str) -> None:
    data = needles(root, background="noise")
    from datamodules.sets.needles import _noise_like

    clip = data.train_set.maker.backgrounds[0]
    generator = torch.Generator().manual_seed(0)
    first, second = _noise_like(clip, generator), _noise_like(clip, generator)
    torch.testing.assert_close(
        torch.fft.rfft(first).abs()[1:-1], torch.fft.rfft(clip).abs()[1:-1], rtol=1e-3, atol=1e-4
    )
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.1
    assert not torch.equal(data.recording(6.0, 0)[0], needles(root).recording(6.0, 0)[0])


@pytest.mark.parametrize("decibels", [-6.0, 3.0])
def test_a_tilt_changes_each_octave_by_its_decibels(decibels: float) -> None:
    from datamodules.sets.needles import _tilted

    for eighth in (1, 2, 4, 8):  # of the highest frequency
        tone = torch.cos(torch.pi * eighth / 8 * torch.arange(8000, dtype=torch.float64)).float()
        change = _tilted(tone, decibels)[8:-8].std() / tone[8:-8].std()
        assert 20 * change.log10() == pytest.approx(decibels * math.log2(eighth / 8), abs=0.02)


@pytest.mark.parametrize("split", ["train", "test"])
def test_mixed_backgrounds_are_pairs_of_the_splits_own_clips_or_noise(root: str, split: str) -> None:
    data = needles(root, background="mixed", shortest=2.5)
    maker = data.splits()[split].maker
    maker.is_training = False  # so that its clips keep their frequencies
    cycles = [100 + 50 * number for number in range(len(maker.backgrounds))]
    times = torch.arange(4000) / 4000
    maker.backgrounds = [torch.sin(2 * torch.pi * number * times) for number in cycles]
    generator = torch.Generator().manual_seed(0)
    pairs, noises = set(), 0
    for _ in range(120):
        clip = maker._background_clip(generator)
        assert clip.square().mean().sqrt() == pytest.approx(0.02, rel=1e-3)
        power = torch.fft.rfft(clip).abs().square()
        heard = (power > 0.01 * power.sum()).nonzero()[:, 0].tolist()
        if len(clip) == 4000:
            assert set(heard) <= set(cycles) and 1 <= len(heard) <= 2
            assert power[heard].sum() > 0.99 * power.sum()
            pairs.add(tuple(heard))
        else:
            noises += 1
            assert len(clip) == 5 * 8000 and not heard
    assert 15 <= noises <= 50 and len(pairs) >= 12


def test_mixed_backgrounds_are_made_again_from_the_number_and_differ_from_epoch_to_epoch(root: str) -> None:
    data, again = (needles(root, background="mixed", num_train=10, num_test=10) for _ in range(2))
    assert torch.equal(data.test_set.sample(3), again.test_set.sample(3))
    (first, second), repeated = (
        [ForTraining(one.train_set, (), seed=0).__getitems__([5 + 10 * epoch])[0]["waveforms"] for epoch in range(2)]
        for one in (data, again)
    )
    assert torch.equal(first, repeated[0]) and torch.equal(second, repeated[1]) and not torch.equal(first, second)
    assert torch.equal(data.recording(61.5, 12)[0], again.recording(61.5, 12)[0])
    assert data.test_set.digest() != needles(root).test_set.digest()


def test_a_colour_makes_each_frequency_as_loud_as_its_gain_says() -> None:
    from datamodules.sets.needles import _coloured

    gains = torch.tensor([-12.0, 5.0, 6.0, 5.0, -12.0, -12.0, 12.0, 12.0, 0.0])
    for number, gain in enumerate(gains[:-1].tolist()):
        tone = torch.cos(torch.pi * number / 8 * torch.arange(8000, dtype=torch.float64)).float()
        heard = _coloured(tone, gains)
        torch.testing.assert_close(heard[8:-8], tone[8:-8] * 10 ** (gain / 20), rtol=1e-3, atol=1e-3)
    assert heard.shape == tone.shape


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"level_db": 100.0}, "level_db"),
        ({"num_train": 9}, "num_train"),
        ({"num_test": 0}, "num_test"),
        ({"shortest": 1.0}, "shortest"),
        ({"shortest": 1.5, "question": "same"}, "shortest"),
        ({"shortest": 2.5, "question": "digits"}, "shortest"),
        ({"shortest": 11.0}, "shortest"),
        ({"background": "music"}, "background"),
        ({"held_out_digits": [7, 8, 9], "question": "digits", "shortest": 4.0}, "held_out_digits"),
        ({"held_out_digits": [7, 8, 9], "question": "order"}, "held_out_digits"),
        ({"held_out_digits": [7], "question": "same"}, "held_out_digits"),
        ({"held_out_digits": [7, 7], "question": "same"}, "held_out_digits"),
        ({"held_out_digits": [9, 10], "question": "same"}, "held_out_digits"),
        ({"held_out_digits": list(range(9)), "question": "same"}, "held_out_digits"),
    ],
)
def test_a_bad_argument_is_refused_by_name(change, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got .*; .+"):
        Needles("nowhere", **change)


def test_recordings_differ_in_level_and_only_trainings_change_their_sounds(root):
    loud, quiet = (needles(root, level_db=level, seconds=3.0) for level in (0.0, -60.0))
    levels = torch.stack([20 * quiet.recording(3.0, trial)[0].std().log10() for trial in range(30)])
    assert -45 < levels.min() < -40 and -28 < levels.max() < -23  # 0.02 is -34 dB, and 10 dB to each side
    for name in ("train", "test"):
        ours, others = loud.splits()[name], quiet.splits()[name]
        whole = {len(clip) for clips in ours.maker.digits for clip in clips}
        heard = {int((ours.sample(number) - others.sample(number)).count_nonzero()) for number in range(20)}
        assert (heard <= whole) == (name == "test")
