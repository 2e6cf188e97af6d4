"""Whether mirrored images are recognised worse than the images themselves."""

from itertools import product

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from datamodules import mirroring
from datamodules.mirroring import Mirrored, mirrored_accuracy, sign_test


def arrows(num: int) -> tuple[Tensor, Tensor]:
    """Triangles (n, 3, 24, 24) near the middle, of several sizes, in noise; 0 points to the left, 1 to the right."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(num, 3, 24, 24, generator=generator) * 60
    for image in images:
        length = int(torch.randint(8, 12, (), generator=generator))
        row, left = torch.randint(-2, 3, (2,), generator=generator).tolist()
        for column in range(length):  # from the tip on
            image[:, 12 + row - column // 2 : 13 + row + column // 2, 7 + left + column] += 120
    labels = torch.arange(num) % 2
    images[labels == 1] = images[labels == 1].flip(3)
    return images.to(torch.uint8), labels


def discs(num: int) -> tuple[Tensor, Tensor]:
    """Grey discs (n, 1, 20, 20) at any place in noise; small ones are of class 0, large ones of class 1."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num) % 2
    rows, columns = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    centres = torch.randint(6, 14, (num, 2, 1, 1), generator=generator)
    distances = (rows - centres[:, :1]) ** 2 + (columns - centres[:, 1:]) ** 2
    is_inside = distances < torch.where(labels == 0, 14, 32)[:, None, None, None]
    return (torch.rand(num, 1, 20, 20, generator=generator) * 100 + 100 * is_inside).to(torch.uint8), labels


def digits(classes: range | tuple[int, ...], each: int) -> tuple[Tensor, Tensor]:
    pixels, targets = map(torch.from_numpy, load_digits(return_X_y=True))
    chosen = torch.cat([(targets == label).nonzero()[:each, 0] for label in classes])
    return (pixels[chosen].view(-1, 1, 8, 8) * 15).to(torch.uint8), targets[chosen]


def test_a_mirrored_left_arrow_is_taken_for_a_right_one() -> None:
    found = mirrored_accuracy(*arrows(120))
    assert found is not None
    assert found.plain > 0.9 and found.mirrored < 0.1 and found.p < 1e-12 and found.changes_classes


def test_a_mirrored_disc_stays_a_disc() -> None:
    found = mirrored_accuracy(*discs(200))
    assert found is not None
    assert found.plain > 0.9 and found.mirrored > 0.9 and found.p > 0.01 and not found.changes_classes


@pytest.mark.parametrize("each", [10, 150])
def test_mirrored_digits_are_recognised_worse(each: int) -> None:
    found = mirrored_accuracy(*digits(range(10), each))
    assert found is not None
    assert found.plain > found.mirrored + 0.3 and found.changes_classes


def test_the_zero_and_the_eight_look_alike_in_a_mirror() -> None:
    found = mirrored_accuracy(*digits((0, 8), 150))
    assert found is not None and not found.changes_classes


def test_labels_by_chance_give_no_alarm_more_often_than_by_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(100):
        images = torch.randint(0, 256, (40, 1, 6, 6), generator=generator, dtype=torch.uint8)
        found = mirrored_accuracy(images, torch.randint(2, (40,), generator=generator))
        alarms += found is not None and found.p < 0.01
    assert alarms <= 4  # 1 is expected, and more than 4 are once in 300 times


def test_the_sign_test_counts_the_ways_in_which_coins_fall() -> None:
    for more, less in ((0, 0), (3, 0), (5, 2), (2, 6)):
        ways = [sum(coins) >= more for coins in product((0, 1), repeat=more + less)]
        assert sign_test(more, less) == sum(ways) / len(ways)
    assert sign_test(1500, 500) < 1e-100 < sign_test(1000, 1000) < 0.52  # neither overflows


def test_only_a_loss_that_is_sure_and_large_counts() -> None:
    assert Mirrored(0.9, 0.6, 1e-9).changes_classes
    assert not Mirrored(0.9, 0.6, 0.02).changes_classes  # of few images
    assert not Mirrored(0.775, 0.72, 0.005).changes_classes  # teapots and academic gowns of Tiny ImageNet


def test_of_many_images_a_part_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "MOST", 60)
    images, labels = arrows(400)
    of_many = mirrored_accuracy(images, labels)
    assert of_many is not None and of_many == mirrored_accuracy(images, labels)
    assert of_many.plain * 60 == pytest.approx(round(of_many.plain * 60)) and of_many.changes_classes


def test_of_fewer_than_two_classes_of_three_images_nothing_is_learned() -> None:
    images, _ = arrows(8)
    for labels in ([0] * 8, [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 1, 1]):
        assert mirrored_accuracy(images, torch.tensor(labels)) is None
    assert mirrored_accuracy(images, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])) is not None
