"""What explain says of features: which tile of a bag decided, as a table and as a picture at the coordinates."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from longseq.arguments import ArgumentError
from longseq.attention import Verma
from longseq.deploy._explain_bag import _draw_tiles, explain_bag, smallest_distance
from longseq.encoders import FeatureEncoder
from longseq.training import Classifier

MARKED = {"0": 3, "1": 5}  # the feature that is large in one tile of a bag of each class


def bag(label: str, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Features and coordinates of tiles in any order, and the tile that decides."""
    side = int(generator.integers(3, 6))
    xy = 256 * np.stack(np.meshgrid(np.arange(side), np.arange(side)), axis=-1).reshape(-1, 2)
    features = 0.3 * generator.standard_normal((len(xy), 8)).astype(np.float32)
    tile = int(generator.integers(len(xy)))
    features[tile, MARKED[label]] += 4
    return features, generator.permutation(xy), tile


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("pool", ["gated", "max", "statistics"])
def test_the_tile_that_decides_has_the_largest_share(command, pool: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for label in MARKED:
        (tmp_path / "bags" / label).mkdir(parents=True)
        for number in range(30):
            features, xy, _ = bag(label, generator)
            np.savez(tmp_path / "bags" / label / f"{number}.npz", features=features, coords=xy)
    config = tmp_path / "bags.yaml"
    config.write_text(
        "model: {encoder: {class_path: FeatureEncoder, init_args: {dim: 16, depth: 0, attention: None, "
        f"pool: {pool}}}}}, learning_rate: 0.02}}\n"
        "data: {class_path: FeatureFolder, init_args: {root: bags, batch_size: 10}}\n"
        "trainer: {max_epochs: 12}\n"
    )
    done = command("fit", "--config", config, "--baseline", "false")
    assert done.code == 0, done.err
    features, xy, tile = bag("1", generator)
    np.savez(tmp_path / "new.npz", features=features, coords=xy)
    checkpoint = tmp_path / "runs/bags/0/best.ckpt"
    done = command("explain", "--ckpt_path", checkpoint, "--input", "new.npz", "--out", "new.png")
    assert done.code == 0, done.err
    rows = rows_of(tmp_path / "new.csv")
    assert [(float(row["x"]), float(row["y"])) for row in rows] == [tuple(map(float, place)) for place in xy]
    shares = [float(row["share of 1"]) for row in rows]
    assert int(np.argmax(shares)) == tile and sum(shares) == pytest.approx(1, abs=1e-4)
    if pool == "gated":
        weights = [float(row["pooling weight"]) for row in rows]
        assert int(np.argmax(weights)) == tile and sum(weights) == pytest.approx(1, abs=1e-4)
    else:
        assert "pooling weight" not in rows[0]
    assert done.out.splitlines()[-2:] == ["new.csv", "new.png"]
    Image.open(tmp_path / "new.png").verify()


def classifier(num_coordinates: int, token_seconds: float | None = None) -> Classifier:
    torch.manual_seed(0)
    encoder = FeatureEncoder(
        3, 9, Verma(), num_coordinates=num_coordinates, token_seconds=token_seconds, dim=8, depth=1, heads=2,
        pool="gated",
    )  # fmt: skip
    encoder.set_statistics(torch.zeros(3 + num_coordinates, 1, 1), torch.ones(3 + num_coordinates, 1, 1))
    model = Classifier(encoder, 2, class_names=["left", "right"]).double().eval()
    torch.nn.init.normal_(model.head.weight)  # it starts at zero
    return model


@pytest.mark.parametrize(("num_coordinates", "token_seconds"), [(2, None), (0, 3.0), (0, None)])
def test_shares_are_those_of_differences_of_the_score(
    num_coordinates: int, token_seconds: float | None, tmp_path: Path
) -> None:
    model = classifier(num_coordinates, token_seconds)
    features = torch.randn(1, 9, 3 + num_coordinates, dtype=torch.float64)
    inputs = {"features": features, "lengths": torch.tensor([9])}
    explain_bag(model, inputs, 60.0, torch.tensor([0.3, 0.7]), [1, 0], tmp_path / "bag.png")
    rows = rows_of(tmp_path / "bag.csv")
    for label, name in enumerate(model.class_names):
        products = torch.zeros(9, 3, dtype=torch.float64)
        for token in range(9):
            for feature in range(3):
                scores = []
                for change in (1e-5, -1e-5):
                    changed = features.clone()
                    changed[0, token, feature] += change
                    with torch.no_grad():
                        scores.append(float(model({**inputs, "features": changed})[0, label]))
                products[token, feature] = (scores[0] - scores[1]) / 2e-5 * features[0, token, feature]
        expected = products.abs().sum(1) / products.abs().sum()
        shares = torch.tensor([float(row[f"share of {name}"]) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(shares, expected, rtol=1e-4, atol=1e-6)
    if token_seconds is not None:
        assert [float(row["start"]) for row in rows] == [60.0 + 3 * token for token in range(9)]
    assert ("start" in rows[0], "x" in rows[0]) == (token_seconds is not None, bool(num_coordinates))


def test_a_table_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "bag.csv").write_text("patient,age\n")
    inputs = {"features": torch.randn(1, 9, 3, dtype=torch.float64), "lengths": torch.tensor([9])}
    with pytest.raises(ArgumentError, match=r"^out must be a new file"):
        explain_bag(classifier(0), inputs, 0.0, torch.tensor([0.3, 0.7]), [1], tmp_path / "bag.png")


def test_a_square_is_as_large_as_the_smallest_distance_between_two_tiles() -> None:
    places = np.array([[0.0, 0.0], [300.0, 40.0], [300.0, 40.0], [1000.0, 1000.0]])
    assert smallest_distance(places) == 300
    assert smallest_distance(places[:1]) == 1
    drawn = []

    class Axes:
        figure = type("Figure", (), {"colorbar": lambda *_, **__: None})

        def imshow(self, image, extent, **_):
            drawn.append((image, extent))

        def __getattr__(self, name):
            return lambda *_, **__: None

    x, y = np.array([10.0, 110.0, 10.0]), np.array([0.0, 0.0, 200.0])
    _draw_tiles(Axes(), x, y, 100.0, np.array([0.1, 0.2, 0.7]))  # type: ignore[arg-type]
    image, (left, right, _, top) = drawn[0]
    pixel = (right - left) / image.shape[1]
    assert (left, top) == (10, 0)
    for row in range(image.shape[0]):
        for column in range(image.shape[1]):
            at_x, at_y = left + (column + 0.5) * pixel, top + (row + 0.5) * pixel
            inside = [
                share
                for a, b, share in zip(x, y, (0.1, 0.2, 0.7), strict=True)
                if a < at_x < a + 100 and b < at_y < b + 100
            ]
            assert np.array_equal(image[row, column], inside[0] if inside else np.nan, equal_nan=True)
