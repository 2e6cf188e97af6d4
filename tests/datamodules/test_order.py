"""The order of samples depends only on the seed and the epoch."""

import itertools

import pytest
import torch

from datamodules import DataError, Digits
from datamodules.order import CountedSampler, RankSampler, SizedRankSampler, SizedSampler


def dealt(sampler, world):
    shares = []
    for rank in range(world):
        sampler.ranks = lambda rank=rank: (rank, world)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    return shares


def epoch(data, number, workers=0):
    data.num_workers = workers
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return torch.cat([labels for _, labels in loader]).tolist()


@pytest.fixture
def digits():
    data = Digits()
    data.setup()
    data.train_set.labels = torch.arange(len(data.train_set))
    return data


def test_an_epoch_is_the_same_whatever_was_drawn_before_and_on_any_number_of_workers(digits):
    expected = epoch(digits, 3)
    torch.rand(17)
    epoch(digits, 2)
    assert epoch(digits, 3) == epoch(digits, 3, workers=2) == expected
    assert sorted(expected) == list(range(len(expected)))


def test_epochs_and_seeds_have_orders_of_their_own(digits):
    other = Digits(seed=1)
    other.setup()
    other.train_set.labels = torch.arange(len(other.train_set))
    orders = [epoch(digits, 0), epoch(digits, 1), epoch(other, 0), epoch(other, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_loader_leaves_the_global_generator_alone(digits):
    before = torch.get_rng_state()
    epoch(digits, 0)
    list(digits.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batches", [0, 1, 7, 20])
def test_a_start_in_mid_epoch_skips_what_is_done_and_the_next_epoch_is_whole(digits, batches):
    whole, after = epoch(digits, 4), epoch(digits, 5)
    digits.load_state_dict({"epoch": 4, "batches": batches})
    assert epoch(digits, 4) == whole[64 * batches :]
    assert epoch(digits, 5) == after


def test_a_new_training_with_the_data_of_one_that_went_on_starts_at_the_beginning(digits):
    whole = epoch(digits, 4)
    digits.load_state_dict({"epoch": 4, "batches": 7})
    digits.setup("fit")
    assert epoch(digits, 4) == whole


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_share_an_evaluation_without_repetition(world):
    evaluated = [index for share in dealt(RankSampler(101), world) for index in share]
    assert sorted(evaluated) == list(range(101))


def batches(world, num_samples, **options):
    """The samples of each batch of all ranks, those of spares left out."""
    whole: dict[int, list[int]] = {}
    counts = set()
    for rank in range(world):
        sampler = CountedSampler(num_samples, 24 // world, 0, ranks=lambda rank=rank: (rank, world), **options)
        sampler.set_epoch(3)
        counts.add(-(-len(sampler) // sampler.batch_size))
        for number in range(max(counts)):
            assert 1 <= len(sampler.batch(number)) <= sampler.batch_size
            if not sampler.is_spare(number):
                whole.setdefault(number, []).extend(sampler.batch(number))
    assert counts == {len(whole)}  # the same number on all ranks, or some would wait for ever
    return [sorted(whole[number]) for number in sorted(whole)]


LENGTHS = torch.arange(200) * 7 % 41
OPTIONS = {"plain": {}, "lengths": {"lengths": LENGTHS}, "balanced": {"labels": LENGTHS % 3}}


@pytest.mark.parametrize("num_samples", [5, 95, 96, 97, 99, 101, 119])
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_hold_the_same_samples_on_any_number_of_ranks(options, num_samples):
    of_samples = {name: values[:num_samples] for name, values in OPTIONS[options].items()}
    expected = batches(1, num_samples, **of_samples)
    assert [len(batch) for batch in expected[:-1]] == [24] * (len(expected) - 1)
    if options != "balanced":
        assert sorted(index for batch in expected for index in batch) == list(range(num_samples))
    for world in (2, 3, 4, 8):
        assert batches(world, num_samples, **of_samples) == expected


def test_other_processes_share_the_batches_of_those_before(digits):
    state = {"epoch": 0, "batches": 2, "batch_size": 64, "processes": 2}
    for processes, expected in ((1, 128), (4, 32), (2, 64)):
        digits.batch_size = 64
        digits._ranks = lambda processes=processes: (0, processes)
        digits.load_state_dict(state)
        assert digits.batch_size == expected
    digits.batch_size = 48  # which the user has asked for
    digits._ranks = lambda: (0, 4)
    digits.load_state_dict(state)
    assert digits.batch_size == 48


def test_processes_that_cannot_share_a_batch_are_refused(digits):
    digits._ranks = lambda: (0, 3)
    what = "3 processes cannot share the batches of 128 samples that 2 had; ask for a number that divides 128"
    with pytest.raises(DataError, match=rf"^trainer.devices: {what}$"):
        digits.load_state_dict({"epoch": 0, "batches": 2, "batch_size": 64, "processes": 2})


def test_one_process_asks_for_no_fewer_processes():
    assert list(RankSampler(0)) == []
    with pytest.raises(DataError, match=r"^trainer.devices: 3 processes for 2 samples of a split; ask for fewer$"):
        RankSampler(2, ranks=lambda: (0, 3))


# Batches with few tokens


def sized(lengths, batch_size=16, max_tokens=1000, seed=0):
    return SizedSampler(len(lengths), batch_size, seed, lengths, max_tokens)


@pytest.fixture
def sizes():
    """The sizes of bags: log-normal, a few of them larger than the limit."""
    sizes = (torch.randn(500, generator=torch.Generator().manual_seed(0)) + 4).exp().clamp(1, 5000).long()
    assert sizes.min() < 10 and (sizes > 1000).any()
    return sizes


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("num_samples", [500, 499, 40, 8])
def test_batches_of_few_tokens_hold_every_sample_once_an_epoch_on_any_number_of_ranks(sizes, world, num_samples):
    sampler = sized(sizes[:num_samples])
    for epoch in range(3):
        sampler.set_epoch(epoch)
        shares = dealt(sampler, world)
        assert len({len(share) for share in shares}) == 1  # ranks agree on the number of batches
        seen = []
        for rank, share in enumerate(shares):
            sampler.ranks = lambda rank=rank: (rank, world)
            for number, batch in enumerate(share):
                indices = [key % num_samples for key in batch]
                assert indices == sampler.batch(number)
                assert 1 <= len(batch) <= 16 and (len(batch) == 1 or len(batch) * sizes[indices].max() <= 1000)
                seen += [] if sampler.is_spare(number) else indices
        assert sorted(seen) == list(range(num_samples))


def test_the_number_of_batches_is_the_same_in_every_epoch_and_their_samples_are_not(sizes):
    sampler = sized(sizes)
    epochs = []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        epochs.append({frozenset(key % 500 for key in batch) for batch in sampler})
    assert {len(epoch) for epoch in epochs} == {len(sampler)}
    of_many = [{batch for batch in epoch if 1 < len(batch) < 16} for epoch in epochs]
    assert all(len(one & other) < len(one) / 4 for one, other in itertools.combinations(of_many, 2))


def test_little_of_a_batch_of_few_tokens_is_padding(sizes):
    sampler = sized(sizes)
    padded = sum(len(batch) * int(sizes[batch].max()) for batch in sampler)
    assert 1 - int(sizes.sum()) / padded < 0.1


def test_a_start_in_mid_epoch_skips_batches_of_few_tokens_and_the_next_epoch_is_whole(sizes):
    sampler, resumed = sized(sizes), sized(sizes)
    sampler.set_epoch(4)
    whole = list(sampler)
    resumed.start(4, 7)
    assert list(resumed) == whole[7:]
    resumed.set_epoch(5)
    sampler.set_epoch(5)
    assert list(resumed) == list(sampler)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_evaluation_in_batches_of_few_tokens_holds_every_sample_once(sizes, world):
    shares = dealt(SizedRankSampler(16, sizes, 1000), world)
    batches = [batch for share in shares for batch in share]
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    assert all(1 <= len(batch) <= 16 for batch in batches)
    assert all(len(batch) == 1 or len(batch) * sizes[batch].max() <= 1000 for batch in batches)
