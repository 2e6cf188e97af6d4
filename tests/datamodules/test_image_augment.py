"""Random changes of images: what they may do, and which images are mirrored."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import DataError, ImageFolder, Mirror, Shift


def arrows(folder: Path, are_directed: bool) -> ImageFolder:
    """Arrows to the left and to the right, or rings and discs, at any place of noisy images."""
    random = np.random.default_rng(0)
    for number in range(60):
        for label, name in enumerate(("one", "other")):
            image = random.integers(0, 60, (12, 12), dtype=np.uint8)
            top, left = random.integers(0, 7, 2)
            shape = np.tri(6, dtype=bool) if are_directed else np.ones((6, 6), dtype=bool)
            if label:
                shape = shape[:, ::-1] if are_directed else shape & (np.indices((6, 6)) % 5 == 0).any(0)
            image[top : top + 6, left : left + 6][shape] = 255
            path = folder / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    data = ImageFolder(str(folder), augment=[Mirror()])
    data.setup("fit")
    return data


@pytest.mark.parametrize("are_directed", [True, False])
def test_images_are_mirrored_unless_that_changes_classes(
    are_directed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = arrows(tmp_path / "pictures", are_directed)
    loader = data.train_dataloader()
    (mirror,) = data.augment
    image = torch.arange(12, dtype=torch.uint8).reshape(1, 3, 4)
    drawn = [mirror(image) for _ in range(200)]
    is_mirrored = [torch.equal(each, image.flip(2)) for each in drawn]
    assert all(torch.equal(each, image) or mirrored for each, mirrored in zip(drawn, is_mirrored, strict=True))
    assert sum(is_mirrored) == 0 if are_directed else 60 < sum(is_mirrored) < 140
    said = "pictures: no image is mirrored in training, which would change classes: an SVM recognises "
    assert (said in capsys.readouterr().err) is are_directed
    assert any("no image is mirrored" in remark for remark in data.remarks) is are_directed
    assert len(next(iter(loader))[0])


def test_a_shift_moves_by_an_eighth_at_most_and_mirrors_what_is_at_the_edge() -> None:
    image = torch.arange(16, dtype=torch.uint8)[None, :, None] * 16 + torch.arange(16, dtype=torch.uint8)
    padded = np.pad(image[0].numpy(), 2, mode="reflect")
    allowed = {padded[y : y + 16, x : x + 16].tobytes() for y in range(5) for x in range(5)}
    seen = {Shift()(image).numpy().tobytes() for _ in range(500)}
    assert seen == allowed


def test_a_shift_of_an_image_of_one_pixel_keeps_it() -> None:
    image = torch.full((3, 1, 1), 7, dtype=torch.uint8)
    assert torch.equal(Shift(0.5)(image), image)


def test_a_shift_by_more_than_half_of_the_image_is_refused() -> None:
    with pytest.raises((DataError, ValueError), match="fraction"):
        Shift(0.6)
