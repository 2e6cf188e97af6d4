"""What training draws: counted augmentation, batches of similar lengths, balanced classes, mixtures, masks."""

from types import SimpleNamespace

import pytest
import torch
from torchvision.transforms import v2

from datamodules import FSDD, DataError, Digits, Gain, Noise, TimeShift
from datamodules.order import CountedSampler
from datamodules.samples import Clips, ForTraining, LabelledTensors
from longseq import Linformer, SpecAugment, SpectrogramEncoder
from longseq.files.description import build, describe
from longseq.training import Classifier, CutMix, MixUp

FLIPS = [v2.RandomHorizontalFlip(), v2.RandomErasing(p=0.5)]


def epoch(data: Digits, number: int) -> torch.Tensor:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return torch.cat([inputs for inputs, _ in loader])


def augmented(**options) -> Digits:
    data = Digits(augment=FLIPS, **options)
    data.setup()
    return data


def test_an_augmentation_is_a_function_of_seed_epoch_and_index():
    data = augmented()
    first = epoch(data, 0)
    torch.rand(100)
    assert torch.equal(epoch(data, 0), first)
    assert torch.equal(epoch(augmented(num_workers=2), 0), first)
    assert torch.equal(epoch(augmented(batch_size=17), 0), first)
    assert not torch.equal(epoch(data, 1).sort(0)[0], first.sort(0)[0])
    assert not torch.equal(epoch(augmented(seed=1), 0).sort(0)[0], first.sort(0)[0])


def test_a_resumed_epoch_draws_what_is_left_of_it():
    data = augmented()
    whole = epoch(data, 3)
    data.load_state_dict({"epoch": 3, "batches": 5})
    assert torch.equal(epoch(data, 3), whole[5 * 64 :])


def test_augmentation_leaves_validation_test_and_the_global_generator_alone():
    data, plain = augmented(), Digits()
    plain.setup()
    before = torch.get_rng_state()
    epoch(data, 0)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("val_dataloader", "test_dataloader"):
        ours, theirs = (torch.cat([inputs for inputs, _ in getattr(part, name)()]) for part in (data, plain))
        assert torch.equal(ours, theirs)


def test_samples_of_one_batch_are_augmented_each_in_its_own_way():
    image = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8).expand(50, 1, 8, 8)
    drawn = ForTraining(LabelledTensors(image, torch.zeros(50).long()), [v2.RandomHorizontalFlip()], seed=0)
    inputs, _ = drawn.__getitems__(list(range(50)))
    flipped = (inputs[:, 0, 0, 0] == 7).sum()
    assert 15 <= flipped <= 35


def test_an_augmentation_that_changes_the_size_is_refused():
    with pytest.raises(DataError, match=r"data.augment: makes \[1, 4, 4\] of an input of \[1, 8, 8\]; choose"):
        Digits(augment=[v2.RandomCrop(4)]).setup()


@pytest.mark.parametrize(
    ("transforms", "said"),
    [
        ([v2.ConvertImageDtype(torch.float32)], r"makes torch.float32 of an input of torch.uint8; choose"),
        ([v2.ToDtype(torch.float32, scale=True)], r"makes torch.float32 of an input of torch.uint8; choose"),
        ([v2.Normalize([0.5], [0.5])], r"Normalize fails \(.+\); choose transforms for torch.uint8 inputs"),
        ([v2.ToPILImage()], r"makes Image of an input of \[1, 8, 8\]; choose"),
    ],
)
def test_an_augmentation_that_fails_or_changes_the_type_is_refused_on_one_line(transforms, said):
    with pytest.raises(DataError, match=f"^data.augment: {said}") as error:
        Digits(augment=transforms).setup()
    assert "\n" not in str(error.value)


def test_augmentations_that_change_the_type_and_change_it_back_are_no_mistake():
    Digits(augment=[v2.ToDtype(torch.float32, scale=True), v2.ToDtype(torch.uint8, scale=True)]).setup()


def test_augmentations_survive_a_checkpoint():
    data = Digits(augment=[v2.RandomCrop(8, padding=2), v2.RandAugment(3)])
    again = build(describe(data), Digits)
    image = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8)
    for ours, theirs in zip(data.augment, again.augment, strict=True):
        torch.manual_seed(0)
        changed = ours(image)
        torch.manual_seed(0)
        assert torch.equal(theirs(image), changed)


# Sound


def test_sound_transforms_do_what_they_say():
    torch.manual_seed(0)
    clip = 0.1 * torch.sin(torch.arange(8000) / 5)
    shifted = TimeShift(0.2)(clip)
    assert torch.equal(shifted.sort()[0], clip.sort()[0]) and not torch.equal(shifted, clip)
    gains = torch.stack([20 * (Gain(6.0)(clip).std() / clip.std()).log10() for _ in range(200)])
    assert -6.01 <= gains.min() < -5 and 5 < gains.max() <= 6.01 and gains.mean().abs() < 1
    noise = Noise((20.0, 20.0), probability=1.0)(clip) - clip
    assert 10 * (clip.square().mean() / noise.square().mean()).log10() == pytest.approx(20, abs=0.3)
    assert not Noise(probability=1.0)(torch.zeros(100)).any()
    gap = torch.stack([clip, clip])
    gap[0, 7] = torch.nan
    added = Noise((20.0, 20.0), probability=1.0)(gap) - gap
    assert added.isnan().nonzero().tolist() == [[0, 7]]
    ratios = gap.square().nanmean(1) / added.square().nanmean(1)
    assert (10 * ratios.log10()).tolist() == pytest.approx([20, 20], abs=0.3)


def test_spec_augment_masks_each_sample_in_its_own_way_and_in_training_alone():
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(
        8000, 1.0, Linformer(8), num_mels=40, dim=16, depth=1, heads=1, spec_augment=SpecAugment(2, 8, 2, 20)
    )
    picture = torch.ones(20, 1, 101, 40)
    masked = encoder.augment(picture)
    bands, frames = (masked == 0).all(2)[:, 0], (masked == 0).all(3)[:, 0]
    assert len(bands.unique(dim=0)) > 10 and len(frames.unique(dim=0)) > 10
    assert bands.sum(1).max() <= 16 and frames.sum(1).max() <= 40
    assert 0.05 < (masked == 0).float().mean() < 0.6
    waveforms = torch.randn(4, 8000)
    encoder.bfloat16()  # which does not tell the frames of a long spectrogram apart
    seen = []
    encoder.spec_augment.register_forward_hook(lambda _layer, inputs, _output: seen.append(inputs[0].dtype))
    encoder(waveforms)
    assert seen == [torch.float32]
    encoder.float().eval()
    assert torch.equal(encoder(waveforms), encoder(waveforms))
    encoder.train()
    assert not torch.equal(encoder(waveforms), encoder(waveforms))


@pytest.mark.parametrize("mix", [MixUp(1.0), CutMix(1.0)])
def test_mixtures_have_the_shares_of_their_targets(mix):
    torch.manual_seed(1)
    images = torch.stack([torch.full((1, 40, 40), float(number)) for number in range(4)])
    mixed, targets = mix(images, torch.eye(4))
    assert torch.allclose(targets.sum(1), torch.ones(4))
    expected = (targets * torch.arange(4.0)).sum(1)
    assert torch.allclose(mixed.mean((1, 2, 3)), expected, atol=1e-3)
    assert 0 < targets[1, 0] < 1


def test_a_mixture_of_sounds_is_as_long_as_the_longer_one():
    waveforms = torch.ones(2, 100)
    waveforms[1, 60:] = 0
    mixed, targets = MixUp()({"waveforms": waveforms, "lengths": torch.tensor([100, 60])}, torch.eye(2))
    assert mixed["lengths"].tolist() == [100, 100]
    assert mixed["waveforms"][1, 70] == pytest.approx(float(targets[1, 0]))


# Batches


def padding(lengths: torch.Tensor, batches: list[list[int]]) -> float:
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 1 - sum(int(lengths[batch].sum()) for batch in batches) / padded


def batches_of(sampler: CountedSampler, size: int) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor([key % sampler.num_all for key in sampler]).split(size)]


@pytest.mark.parametrize("count", [640, 3001])
def test_padding_stays_under_a_tenth_on_lengths_from_one_to_ten(count):
    generator = torch.Generator().manual_seed(0)
    lengths = (800 * 10 ** torch.rand(count, generator=generator)).long()
    sampler = CountedSampler(count, 32, seed=0, lengths=lengths)
    batches = batches_of(sampler, 32)
    assert padding(lengths, batches) < 0.1 < padding(lengths, batches_of(CountedSampler(count, 32, 0), 32))
    assert sorted(index for batch in batches for index in batch) == list(range(count))
    sampler.set_epoch(1)
    assert batches_of(sampler, 32) != batches
    means = torch.tensor([float(lengths[batch].float().mean()) for batch in batches])
    assert (means.diff() < 0).float().mean() > 0.3  # the order of the batches is shuffled too


def test_padding_stays_under_a_tenth_on_spoken_digits(real_data):
    data = FSDD(str(real_data), batch_size=32)
    data.setup()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        given = there = 0
        for inputs, _ in loader:
            given += inputs["waveforms"].numel()
            there += int(inputs["lengths"].sum())
        assert 1 - there / given < 0.1


def test_ranks_get_batches_of_like_lengths_at_the_same_step():
    lengths = torch.arange(1, 1001)
    shares = []
    for rank in range(4):
        sampler = CountedSampler(1000, 8, 0, lengths=lengths, ranks=lambda rank=rank: (rank, 4))
        shares.append(batches_of(sampler, 8))
    assert sorted(index for share in shares for batch in share for index in batch) == list(range(1000))
    for together in zip(*shares, strict=True):
        of_all = torch.tensor(together)
        assert of_all.max() - of_all.min() < 60


def test_a_balanced_epoch_draws_each_class_as_often():
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    data = Digits(balanced=True)
    data.train_set = LabelledTensors(torch.zeros(1000, 1, 8, 8, dtype=torch.uint8), labels)
    drawn = torch.cat([labels for _, labels in data.train_dataloader()])
    assert len(drawn) == 1000
    assert (drawn.bincount() - 333).abs().max() < 60


def test_a_sample_that_comes_again_in_a_balanced_epoch_is_changed_in_another_way():
    labels = torch.tensor([0] * 28 + [1] * 2)
    noise = LabelledTensors(torch.zeros(30, 1, 4, 4), labels)
    training = ForTraining(noise, [lambda image: image + torch.rand(1, 4, 4)], seed=0)
    sampler = CountedSampler(30, 5, 0, labels=labels)
    drawn = {}
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for key in sampler:
            drawn.setdefault(key % 30, []).append(training.draw(key))
    assert len(drawn[28]) > 4
    for images in drawn.values():
        assert len(torch.stack(images).unique(dim=0)) == len(images)
    plain = CountedSampler(30, 5, 0)
    plain.set_epoch(1)
    assert sorted(plain) == list(range(30, 60))


def test_balanced_class_weights_count_each_class_as_much():
    model = Classifier(
        SpectrogramEncoder(8000, 0.1, Linformer(2), num_mels=8, dim=8, depth=1, heads=1), 3, class_weights="balanced"
    )

    data = Digits()
    data.setup()
    data.train_set = LabelledTensors(torch.zeros(100, 1), torch.tensor([0] * 70 + [1] * 20 + [2] * 10))

    class Trainer:
        ckpt_path = "resumed"  # when a training is resumed, nothing is measured
        datamodule = data
        precision_plugin = SimpleNamespace()
        strategy = SimpleNamespace(root_device=torch.device("cpu"))

    model._trainer = Trainer()
    model.setup("fit")
    counts = torch.tensor([70.0, 20, 10])
    assert torch.allclose(model.loss_weights * counts, torch.full((3,), 100 / 3))
    assert "loss_weights" not in model.state_dict()
    data.train_set = LabelledTensors(torch.zeros(8, 1), torch.tensor([0] * 6 + [1] * 2))  # none of class 2
    model.setup("fit")
    assert (model.loss_weights[:2] * torch.tensor([6, 2])).tolist() == [4, 4]


def test_statistics_are_computed_once_for_the_same_content(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path))
    calls = []

    def computed(data: Digits) -> dict:
        data.setup()
        return data.remember("mean", lambda: calls.append(1) or {"mean": data.train_set.inputs.double().mean()})

    first = computed(Digits())
    assert computed(Digits(batch_size=3)) == first and len(calls) == 1
    assert computed(Digits(seed=1)) != first and len(calls) == 2
    assert computed(Digits(size=9)) != first and len(calls) == 3


def test_a_subset_of_clips_keeps_names_lengths_and_crops():
    clips = Clips([torch.ones(n) for n in (5, 9, 7)], torch.tensor([0, 1, 2]), ["a", "b", "c"], max_samples=8)
    chosen = clips.subset(torch.tensor([2, 1]))
    assert (chosen.names, chosen.labels.tolist(), chosen.lengths.tolist()) == (["c", "b"], [2, 1], [7, 8])
    assert chosen.is_cropped and not clips.subset(torch.tensor([0])).is_cropped
