"""A trained model of longseq as a frozen network: from one sound or image to the features of its windows or tiles."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from longseq.deploy.predictor import Predictor, load
from longseq.files.storage import CheckpointError, sha256_of

_BATCH = 16  # windows or tiles at once


class Trained:
    """The features in front of the head, of each window of a sound or of each tile of an image.

    It has the members of datamodules.Network that the command embed uses. A window has the length of the clips that the
    model was trained with, and a tile their height and width. They lie side by side. The last window ends with the
    sound, however short it is; the last tiles end with the image.

    Args:
        file: A checkpoint of fit, or a folder that ``export --format safetensors`` has written.
    """

    key = "network"

    def __init__(self, file: str) -> None:
        self.file = file

    @cached_property
    def _predictor(self) -> Predictor:
        predictor = load(self.file)
        if predictor.data.inputs.rate_hz and len(predictor.data.shape) > 1:
            what = f"hears {predictor.data.shape[0]} channels, and a frozen network of sounds hears one"
            raise CheckpointError(f"{self.file}: {what}; give a model of their mean")
        return predictor

    @property
    def kind(self) -> str:
        return self._predictor.data.inputs.kind

    @property
    def num_features(self) -> int:
        return self._predictor.model.encoder.dim

    @property
    def num_coordinates(self) -> int:
        return 0 if self.rate_hz else 2

    @property
    def rate_hz(self) -> int | None:
        return self._predictor.data.inputs.rate_hz

    @property
    def window(self) -> int:
        """The samples of a window."""
        return self._predictor.data.shape[-1]

    @property
    def token_seconds(self) -> float | None:
        return self.window / self.rate_hz if self.rate_hz else None

    @property
    def channels(self) -> int:
        return self._predictor.data.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a tile."""
        return tuple(self._predictor.data.shape[1:])

    @cached_property
    def digest(self) -> str:
        path = Path(self.file)
        return sha256_of(path / "model.safetensors" if path.is_dir() else path)

    @property
    def identity(self) -> str:
        return f"Trained {self.digest}"

    def num_tokens(self, size: Any) -> int:
        if self.rate_hz:
            return max(math.ceil(size / self.window), 1)
        return math.prod(math.ceil(length / side) for length, side in zip(size, self.size, strict=True))

    def __call__(self, values: Tensor) -> Float[Tensor, "n f_and_p"]:
        if self.rate_hz:
            return self._features(list(values.split(self.window)) or [values])
        height, width = self.size
        filled = pad(values, (0, max(width - values.shape[2], 0), 0, max(height - values.shape[1], 0)))
        filled = filled.expand(self.channels, -1, -1)
        rows, columns = (
            [min(start, length - side) for start in range(0, length, side)]
            for length, side in zip(filled.shape[1:], self.size, strict=True)
        )
        corners = [(top, left) for top in rows for left in columns]
        features = self._features([filled[:, top : top + height, left : left + width] for top, left in corners])
        centres = [[left + width / 2, top + height / 2] for top, left in corners]
        return torch.cat([features, torch.tensor(centres)], dim=1)

    def _features(self, parts: list[Tensor]) -> Float[Tensor, "n f"]:
        model, rows = self._predictor.model, []
        for at in range(0, len(parts), _BATCH):
            batch: Any = torch.stack(parts[at : at + _BATCH]) if not self.rate_hz else _padded(parts[at : at + _BATCH])
            with torch.inference_mode():
                rows.append(model.predict_step(batch, 0, probabilities=False, features=True).features.float())
        return torch.cat(rows).clone()


def _padded(waveforms: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(waveform) for waveform in waveforms])
    return {"waveforms": torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True), "lengths": lengths}
