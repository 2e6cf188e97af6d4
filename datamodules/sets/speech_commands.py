"""Speech Commands v0.02: single words of one second, with the official lists."""

import random
from pathlib import Path
from typing import Any, Literal

from datamodules.decoding.sound_files import seconds_of
from datamodules.errors import DataError, require
from datamodules.own.audio_folder import AudioFiles
from datamodules.own.files import Item
from datamodules.sets.fetch import fetch_and_unpack, folder_with

URL = "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz"
_SHA256 = "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58"
FOLDER = "SpeechCommands/speech_commands_v0.02"
_LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}  # of the clips of each split
_NUM_CLIPS = 105_829  # of the whole data set
TEN = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_NOISE = "_background_noise_"
_EXTRA = 0.1  # clips of silence, and as many of unknown words, for each clip of the ten words


class SpeechCommands(AudioFiles):
    """Spoken words of one second at 16 kHz; validation_list.txt and testing_list.txt define the official splits.

    Source: Warden, Speech Commands (2018), CC BY 4.0, 105,829 clips. The 12 classes are those of the paper, but `seed`
    draws the clips of "unknown" and "silence", also for the test. The paper's test archive has other clips, so
    accuracies can be compared only roughly with those on that archive, and only roughly between seeds.

    Args:
        root: Folder that holds SpeechCommands/speech_commands_v0.02, or this folder itself.
        task: The classes. "35": every word. "10": yes, no, up, down, left, right, on, off, stop and go. "12": these
            ten, "unknown" (other words, a tenth as many clips) and "silence" (background noise, as many as "unknown").
        download: Fetch the archive if the data is missing or incomplete.
        sample_rate_hz: Rate of the inputs.
        seconds: Length of the longest input.
        common: Arguments of AudioFiles.

    Raises:
        DataError: From setup, if files are missing or broken, or cannot be fetched.
    """

    def __init__(
        self,
        root: str,
        task: Literal["35", "10", "12"] = "35",
        download: bool = False,
        sample_rate_hz: int = 16_000,
        seconds: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(root=root, sample_rate_hz=sample_rate_hz, seconds=seconds, **common)
        require(task in ("35", "10", "12"), "task", "35, 10 or 12", task, "35 is every word")
        self.task = task
        self.download = download

    def find(self) -> list[Item]:
        if self.download:
            root = Path(self.root).expanduser()
            fetch_and_unpack(URL, root, FOLDER, self._is_whole, _SHA256)
        base = self._base()
        if base is None:
            lists = f"{FOLDER} with {' and '.join(_LISTS.values())}"
            raise DataError(f"{self.root}: no {lists}; unpack {URL} there, or set data.download to true")
        prefix = base.relative_to(self.folder)
        listed = {name: split for split, file in _LISTS.items() for name in (base / file).read_text().split()}
        present = {f"{path.parent.name}/{path.name}" for path in base.glob("[a-z]*/*.wav")}
        # a listed file should be there; the scan reports those that are missing
        items = [
            Item(str(prefix / name), name.partition("/")[0], listed.get(name, "train"))
            for name in sorted(present | set(listed))
        ]
        if self.task == "35":
            return items
        words = [item for item in items if item.label in TEN]
        return words if self.task == "10" else words + self._unknown(items, words) + self._silence(base, words)

    def _unknown(self, items: list[Item], words: list[Item]) -> list[Item]:
        others = [item for item in items if item.label not in TEN]
        generator = random.Random(self.seed)
        chosen = []
        for split in ("train", "val", "test"):
            of_split = [item for item in others if item.split == split]
            count = min(_share(words, split), len(of_split))
            chosen += [Item(item.path, "unknown", split) for item in generator.sample(of_split, count)]
        return chosen

    def _silence(self, base: Path, words: list[Item]) -> list[Item]:
        """Clips of one second of noise: the first 80 % of each recording for training, 10 % for each other split."""
        paths = sorted((base / _NOISE).glob("*.wav"))
        if not paths:
            raise DataError(f"{base / _NOISE}: no background noise; the 12-class task needs it, 10 and 35 do not")
        generator = random.Random(self.seed)
        chosen = []
        for split, (first, last) in {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}.items():
            for _ in range(_share(words, split)):
                path = generator.choice(paths)
                length = seconds_of(path)
                start = generator.uniform(first * length, max(last * length - 1, first * length))
                chosen.append(Item(str(path.relative_to(self.folder)), "silence", split, "", start, start + 1))
        return chosen

    def _base(self) -> Path | None:
        return folder_with(self.root, FOLDER, *_LISTS.values())

    def _is_whole(self) -> bool:
        base = self._base()
        return base is not None and sum(1 for _ in base.glob("[a-z]*/*.wav")) >= _NUM_CLIPS


def _share(words: list[Item], split: str) -> int:
    return max(round(_EXTRA * sum(item.split == split for item in words)), 1)
