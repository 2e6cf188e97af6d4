"""The order of samples depends only on the seed and the epoch."""

import pytest
import torch

from datamodules import DataError, Digits
from datamodules.order import CountedSampler, RankSampler


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


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_share_an_epoch_evenly_and_an_evaluation_without_repetition(world):
    training = dealt(CountedSampler(101, 10, 0), world)
    assert {len(share) for share in training} == {-(-101 // world)}
    assert set().union(*training) == set(range(101))
    evaluated = [index for share in dealt(RankSampler(101), world) for index in share]
    assert sorted(evaluated) == list(range(101))


def test_one_process_asks_for_no_fewer_processes():
    assert list(RankSampler(0)) == []
    with pytest.raises(DataError, match=r"^trainer.devices: 3 processes for 2 samples of a split; ask for fewer$"):
        RankSampler(2, ranks=lambda: (0, 3))
