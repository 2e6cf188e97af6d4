"""What docs/results/protocol.md compares: its experiments, with the flags of every system. controlled.py runs them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import words
from drawings import brightness
from words import Peer


class Experiment(NamedTuple):
    """What its systems share, and how long each trains. In flags DATA is the folder of the data sets and RUNS that of
    the trainings."""

    minutes: float
    flags: str  # of fit, before a system's own
    systems: dict[str, str]
    primary: tuple[list[str], list[str]]  # the better one of the first on the validation, minus that of the second
    group: str | None = None  # matches what is drawn together in the bootstrap, in a sample's name
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)  # of learning, tried first; a single one is not chosen
    rates_of: str = ""  # the experiment whose chosen rates are used instead
    steps_of: str = ""  # the experiment whose steps a minute are used, instead of measuring them
    seeds: int = 3
    prepare: Callable[[Path, Path], object] | None = None  # gets the data's and the experiment's folder, once
    start: str = ""  # flags of a common model from which all systems go on, and whose time does not count
    after: str = ""  # the experiment from whose models the systems go on, with its steps a minute, if one learned it
    peers: Mapping[str, Peer] = MappingProxyType({})  # systems that longseq does not have
    seconds: tuple[int, ...] = ()  # durations of Needles' test; the first is the experiment's own

    @property
    def paced_by(self) -> str:
        """The experiment whose steps a minute are used; if there is none, they are measured."""
        return self.after or self.steps_of


_LINFORMER, _VERMA, _NONE = "Linformer, Dynamic", "Verma without E", "no attention"
_LONG_KERNEL = "no attention, long kernel"
_DYNAMIC = "--model.encoder.attention Linformer --model.encoder.attention.projection Dynamic"
_NEW_SPEAKERS = "--data.test_speakers [theo,yweweler] --data.val_speakers [lucas]"
_SPOKEN = f"--data FSDD --data.root DATA {_NEW_SPEAKERS}"
_LEVEL = "--model.encoder.subtract_mean level"
_SPEAKERS = f"--config audio/needles --data.root DATA {_NEW_SPEAKERS}"
_DIGITS = f"{_SPEAKERS} --data.held_out_digits [7,8,9]"
_PIXELS = "--config image/mnist --data.root DATA --trainer.limit_val_batches 16"
_STATIC = {"static E": "--config controls/static --model.encoder.attention.k 64"}
_MIXING = {"Linformer, k = 64": ""} | _STATIC
_LEVELS = 1, 2, 4, 6, 14  # dashes
_OF_CLIPS = {
    _LINFORMER: f"{_DYNAMIC} --model.encoder.attention.k 32",
    _VERMA: "",
    "exact softmax": "--config controls/softmax",
    _NONE: "--config controls/none",
    "pooled features": "--config controls/features",
    _LONG_KERNEL: "--config controls/long_kernel --model.encoder.local.kernel_size 31",
}
_AND_S4D = _OF_CLIPS | {"S4D": "--model.encoder.attention S4D"}
_THREE = {name: _OF_CLIPS[name] for name in (_LINFORMER, _NONE, _LONG_KERNEL)}


def _of_clips(data: str, systems: dict[str, str]) -> Experiment:
    """Short sounds, from the data of these flags."""
    primary = [name for name in (_LINFORMER, _VERMA) if name in systems], [_NONE, _LONG_KERNEL]
    return Experiment(4, f"--config audio/speech_commands {data}", systems, primary)


def _of_words(clips: int, folder: str, systems: dict[str, str]) -> Experiment:
    """Ten words of Speech Commands, which are written to this folder of the trainings."""
    experiment = _of_clips(f"--data AudioFolder --data.root RUNS/{folder}/words", systems)
    prepare = partial(words.write, clips)
    return experiment._replace(group=r"(\w+)_nohash", prepare=prepare, peers=words.PEERS)


def _pathfinder(dashes: int, before: int | None, minutes: int = 10) -> Experiment:
    return Experiment(
        minutes,
        f"--config image/pathfinder --data.dashes {dashes} --model.encoder.local Conv2d",
        {
            "no attention, twice the depth": "--config controls/none --model.encoder.depth 8",
            "Linformer, k = 64": "--model.encoder.attention Linformer --model.encoder.attention.k 64",
            "Verma with E": "--model.encoder.attention.k 64",
            **_STATIC,
        },
        (["Linformer, k = 64", "Verma with E"], ["no attention, twice the depth"]),
        rates=(5e-4,),
        seeds=1,
        after="" if before is None else f"pathfinder/{before} dashes",
        peers={"mean brightness": brightness(dashes)},
    )


EXPERIMENTS = {
    "same": Experiment(
        6,
        f"{_DIGITS} --data.question same --data.shortest 2.2 --data.num_test 600 --model.pool attention",
        {
            _LINFORMER: f"{_DYNAMIC} --model.encoder.attention.k 64",
            "Verma": "",
            "exact softmax": "--config controls/softmax",
            "pooled features": "--config controls/features",
            _NONE: "--config controls/none --model.pool max",
        },
        ([_LINFORMER, "Verma"], ["pooled features"]),
        start=f"{_DIGITS} --config controls/none --trainer.max_epochs 10",
    ),
    "few": _of_words(30, "few", _OF_CLIPS),
    "more/words": _of_words(79, "more-words", _AND_S4D),
    "more/speakers": _of_clips(_SPOKEN, _AND_S4D),
    "more/level": _of_clips(f"{_SPOKEN} {_LEVEL}", _THREE)._replace(rates_of="more/speakers"),
    "more/level-kept": _of_clips(_SPOKEN, _THREE)._replace(rates_of="more/speakers", steps_of="more/level"),
    "needles": Experiment(
        8,
        f"{_SPEAKERS} --data.background mixed",
        {_NONE: "--config controls/none", "pooled features": "--config controls/features", "Verma": ""},
        (["Verma"], [_NONE]),
        seconds=(600, 60),
    ),
    "pixels": Experiment(
        4,
        _PIXELS,
        {
            **_MIXING,
            "one key": "--config controls/one_key",
            "exact softmax": "--config controls/softmax",
            _NONE: "--config controls/none",
        },
        (["Linformer, k = 64"], ["static E"]),
    ),
    "pixels/permuted": Experiment(
        4,
        f"{_PIXELS} --data.permutation 0 --data.augment [] --model.encoder.local null",
        _MIXING,
        (["Linformer, k = 64"], ["static E"]),
        rates_of="pixels",
    ),
    **{
        f"pathfinder/{dashes} dashes": _pathfinder(dashes, before)
        for dashes, before in zip(_LEVELS, (None, *_LEVELS), strict=False)
    },
    "pathfinder/2 dashes, longer": _pathfinder(2, 1, 30),
    "order": Experiment(
        6,
        f"{_SPEAKERS} --data.question order --data.shortest 2.2 --model.pool attention --model.encoder.positions clock",
        {"S4D": "--model.encoder.attention S4D", "LSTM": "--model.encoder.attention LSTM", "Verma": ""},
        (["Verma"], ["S4D"]),
        rates=(2e-3,),
        seeds=2,
    ),
}
