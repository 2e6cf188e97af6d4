"""The splits that a seed draws never change: a checkpoint must not be tested on what an earlier version trained on.

splits.json holds what was drawn before datamodules/splits.py existed: the sizes of the splits, a hash of splits.csv and
of the identity that a checkpoint holds; and the messages on data that cannot be divided. Images and sounds are
written without a library, so their bytes are the same anywhere.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules import ESC50, FSDD, AudioFolder, DataError, DataModule, ImageFolder, ImageShards
from datamodules.archives.write_shards import write_tar

GOLDEN = Path(__file__).with_name("splits.json")


def ppm(seed: object) -> bytes:
    """An image of 2x2 pixels."""
    return b"P6 2 2 255\n" + hashlib.sha256(str(seed).encode()).digest()[:12]


def wav(seed: object, seconds: float = 0.02) -> bytes:
    """Noise of 16 bits at 8 kHz."""
    noise = b"".join(hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(round(500 * seconds)))
    head = struct.pack("<4sIHHIIHH4sI", b"fmt ", 16, 1, 1, 8000, 16000, 2, 16, b"data", len(noise))
    return b"RIFF" + struct.pack("<I", 4 + len(head) + len(noise)) + b"WAVE" + head + noise


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# Of files


def class_folders(root: Path, sizes: dict[str, int], prefix: str = "") -> None:
    """Images in class folders, two of each site."""
    for name, size in sizes.items():
        for number in range(size):
            path = f"{prefix}{name}/site{number // 2}-{number}.ppm"
            write(root / path, ppm(path))


def folders(sizes: dict[str, int] | None = None, **parts: dict[str, int]) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for prefix, of_part in ({"": sizes} if sizes else parts).items():
            class_folders(root, of_part, prefix and f"{prefix}/")

    return make


def copies(root: Path) -> None:
    """A file of the validation joins two of the training, where a test is drawn."""
    folders(train={"a": 9, "b": 9}, val={"a": 3, "b": 3})(root)
    for name in ("train/a/site2-5", "val/a/site1-2", "train/a/site4-8"):
        write(root / f"{name}.ppm", ppm("the same"))
    for name in ("train/b/site0-0", "train/b/site3-7"):
        write(root / f"{name}.ppm", ppm("also the same"))


def copies_through_another_split(root: Path) -> None:
    """The files of p0, in the validation, have the contents of files of other patients, where a test is drawn."""
    lines = ["path,label,split,patient"]
    for number in range(30):
        is_val = number % 5 == 0
        write(root / f"{number}.ppm", ppm(number // 10 if is_val or number % 10 == 3 else f"{number} alone"))
        label = "ab"[number % 10 in (0, 3, 5, 7)]
        lines.append(f"{number}.ppm,{label},{'val' if is_val else 'train'},p{0 if is_val else number}")
    write(root / "t.csv", "\n".join(lines).encode())


def one_is_broken(root: Path) -> None:
    folders({"a": 9, "b": 7})(root)
    write(root / "a/site1-3.ppm", b"P6 2 2 255\n")


def table(columns: str, row: Callable[[int], str], rows: int = 24, kind: str = "ppm") -> Callable[[Path], None]:
    def make(root: Path) -> None:
        lines = [columns.replace(" ", ",")]
        for number in range(rows):
            line = row(number)
            path = line.split(",")[0]
            write(root / path, ppm(path) if kind == "ppm" else wav(path, 0.2))
            lines.append(line)
        write(root / "t.csv", "\n".join(lines).encode())

    return make


def fsdd(root: Path) -> None:
    for number in range(100):
        name = f"free-spoken-digit-dataset/recordings/{number % 10}_jackson_{number // 10}.wav"
        write(root / name, wav(name))


def esc50(root: Path) -> None:
    rows = ["filename,fold,target,category"]
    for number in range(30):
        name = f"{number % 5 + 1}-{number}.wav"
        write(root / "ESC-50-master/audio" / name, wav(name))
        rows.append(f"{name},{number % 5 + 1},0,{('rain', 'wind')[number // 15]}")
    write(root / "ESC-50-master/meta/esc50.csv", "\n".join(rows).encode())


# Of shards


def shards(_label: Callable[[int], Any] = lambda number: "abc"[number % 3], **sizes: int) -> Callable[[Path], None]:
    """Shards by their names, with so many samples of 12 patients."""

    def make(root: Path) -> None:
        number = 0
        for name, size in sizes.items():
            members = {}
            for _ in range(size):
                key, label = f"patient{number % 12}/{number:03}", _label(number)
                members[f"{key}.ppm"] = ppm(number) if label != "broken" else b"P6 2 2 255\n"
                if isinstance(label, list):
                    members[f"{key}.json"] = json.dumps({"label": label}).encode()
                else:
                    members[f"{key}.cls"] = ("a" if label == "broken" else label).encode()
                number += 1
            write_tar(root / f"{name}.tar", iter(members.items()))

    return make


def rows_of_parquet(root: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "image": [{"bytes": ppm(number), "path": f"{number}.ppm"} for number in range(24)],
        "label": ["ab"[number % 2] for number in range(24)],
    }
    for name, first in (("train-0", 0), ("train-1", 12)):
        part = {column: values[first : first + 12] for column, values in columns.items()}
        pyarrow.parquet.write_table(pyarrow.table(part), root / f"{name}.parquet")


CLASSES = {"a": 13, "b": 8, "few": 2, "one": 1}
CASES: dict[str, tuple[type[DataModule], Callable[[Path], None], dict[str, Any]]] = {}


def case(name: str, kind: type[DataModule], make: Callable[[Path], None], **options: Any) -> None:
    for seed in (0, 1, 123456789):
        CASES[f"{name}, seed {seed}"] = kind, make, {"seed": seed, **options}


case("folders", ImageFolder, folders(CLASSES))
case("folders, other shares", ImageFolder, folders(CLASSES), val_fraction=0.3, test_fraction=0.4)
case("folders, train test", ImageFolder, folders(train=CLASSES, test={"a": 3, "b": 2}))
case("folders, train val", ImageFolder, folders(train={"a": 9, "b": 9}, val={"a": 3, "b": 2}))
case("folders, train val test", ImageFolder, folders(train=CLASSES, val={"a": 2}, test={"a": 3}))
case("folders, test alone", ImageFolder, folders(test={"a": 3, "b": 2}))
case("folders, groups", ImageFolder, folders({"a": 14, "b": 12, "c": 8}), groups="(site[0-9]+)")
case("folders, copies", ImageFolder, copies)
case("folders, copies in folds", ImageFolder, copies, folds=2, fold=1)
case("folders, a broken file", ImageFolder, one_is_broken, on_error="skip", in_memory=False)
for fold in (1, 3):
    of_fold = {"folds": 3, "fold": fold}
    case(f"folders, fold {fold}", ImageFolder, folders({"a": 9, "b": 7, "few": 3}), **of_fold)
    groups = folders({"a": 14, "b": 12})
    case(f"folders, groups, fold {fold}", ImageFolder, groups, groups="./(site[0-9]+)", **of_fold)
    given = folders(train={"a": 9, "b": 7}, test={"a": 3})
    case(f"folders, train test, fold {fold}", ImageFolder, given, **of_fold)
    given = folders(train={"a": 9, "b": 7}, val={"a": 6, "b": 4})
    case(f"folders, train val, fold {fold}", ImageFolder, given, **of_fold)
    given = folders(train={"a": 9, "b": 7}, val={"a": 6, "b": 4}, test={"a": 3})
    case(f"folders, train val test, fold {fold}", ImageFolder, given, **of_fold)
given = table("path label patient", lambda n: f"{n}.ppm,{'aab'[n % 3]},p{n * n % 7}")
of_groups = {"table": "t.csv", "groups": "patient"}
case("table, copies through another split", ImageFolder, copies_through_another_split, test_fraction=0.5, **of_groups)
case("table, groups", ImageFolder, given, table="t.csv", groups="patient", val_fraction=0.25)
case("table, groups, fold", ImageFolder, given, table="t.csv", groups="patient", folds=2, fold=2)
given = table("path label split", lambda n: f"{n}.ppm,{'ab'[n % 2]},{('train', 'train', 'val', 'test')[n % 4]}")
case("table, splits", ImageFolder, given, table="t.csv")
given = table("path label split", lambda n: f"{n}.ppm,{'ab'[n % 2]},{('train', 'train', 'val', 'test', '')[n % 5]}")
case("table, splits and rows without one", ImageFolder, given, table="t.csv")
given = table("path label fold", lambda n: f"{n}.ppm,{'ab'[n % 2]},{n % 3 + 9}")
case("table, folds that are not asked for", ImageFolder, given, table="t.csv")
case("table, test_fold", ImageFolder, given, table="t.csv", test_fold=9)
case("table, val_fold", ImageFolder, given, table="t.csv", val_fold="10")
case("table, test_fold and val_fold", ImageFolder, given, table="t.csv", test_fold=9, val_fold="10")
for fold in (1, 2, 3):
    case(f"table, own fold {fold}", ImageFolder, given, table="t.csv", folds=3, fold=fold)
given = table("path label fold", lambda n: f"{n}.ppm,{'ab'[n // 12]},{n % 2}")
case("table, own folds, two", ImageFolder, given, table="t.csv", folds=2, fold=2)
given = table("path label", lambda n: f"{n}.ppm,{';'.join('abcd'[: n % 4])}")
case("table, several classes", ImageFolder, given, table="t.csv", labels_separator=";", test_fraction=0.3)
case("table, several classes, fold", ImageFolder, given, table="t.csv", labels_separator=";", folds=2, fold=1)
given = table(
    "path label start end", lambda n: f"{n % 9}.wav,{'ab'[n // 3 % 2]},{n // 9 / 25},{(n // 9 + 1) / 25}", 27, "wav"
)
case("table, parts of sounds", AudioFolder, given, table="t.csv", sample_rate_hz=8000, seconds=0.1)
case("table, clips", AudioFolder, given, table="t.csv", labels_separator=";", clip_seconds=0.05, sample_rate_hz=8000)
case("FSDD", FSDD, fsdd, val_fraction=0.2)
case("FSDD, fold", FSDD, fsdd, folds=2, fold=2)
case("ESC-50", ESC50, esc50, test_fold=2)
case("ESC-50, drawn validation", ESC50, esc50, val_fold=None)
case("ESC-50, fold", ESC50, esc50, folds=5, fold=3)

case("shards", ImageShards, shards(x=20, y=11))
case("shards, other shares", ImageShards, shards(x=20, y=11), val_fraction=0.3, test_fraction=0.4)
case("shards, few", ImageShards, shards(lambda n: "few" if n in (3, 9) else "one" if n == 5 else "ab"[n % 2], x=20))
case("shards, train test", ImageShards, shards(train=20, test=6))
case("shards, train val", ImageShards, shards(valid=5, train=24))
case("shards, train val test", ImageShards, shards(test=4, train=12, val=5))
case("shards, groups", ImageShards, shards(x=20, y=20), groups="patient[0-9]+", val_fraction=0.3)
case("shards, groups, given", ImageShards, shards(train=8, test=4), groups="patient[0-9]+", val_fraction=0.3)
case("shards, several classes", ImageShards, shards(lambda n: [*"abcd"[: n % 4]], x=12, y=14))
case(
    "shards, broken sample",
    ImageShards,
    shards(lambda n: "broken" if n == 4 else "ab"[n % 2], x=9, y=9),
    on_error="skip",
)
case("shards of rows", ImageShards, rows_of_parquet, in_memory=False)
for fold in (1, 3):
    of_fold = {"folds": 3, "fold": fold}
    case(f"shards, fold {fold}", ImageShards, shards(x=20, y=11), **of_fold)
    case(f"shards, groups, fold {fold}", ImageShards, shards(x=20, y=20), groups="patient[0-9]+", **of_fold)
    case(f"shards, train test, fold {fold}", ImageShards, shards(test=6, train=20), **of_fold)
    case(f"shards, train val, fold {fold}", ImageShards, shards(train=20, val=7), **of_fold)
    case(f"shards, train val test, fold {fold}", ImageShards, shards(test=6, train=20, val=7), **of_fold)
    case(f"shards, several classes, fold {fold}", ImageShards, shards(lambda n: [*"abcd"[: n % 4]], x=26), **of_fold)


def divided(case: str, root: Path) -> DataModule:
    kind, make, options = (CASES | ERRORS)[case]
    root.mkdir()
    make(root)
    data = kind(**{"root": str(root), **options})
    data.setup("test")
    return data


def drawn(case: str, folder: Path) -> list[int | str]:
    data = divided(case, folder / "data")
    data.save_splits(folder / "splits.csv")
    text = (folder / "splits.csv").read_text() + json.dumps(data.identity)
    return [*map(len, data.splits().values()), hashlib.sha256(text.encode()).hexdigest()[:16]]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case.endswith(" 0") else pytest.mark.thorough) for case in CASES]
)
def test_a_seed_draws_the_splits_that_it_has_always_drawn(case: str, tmp_path: Path) -> None:
    assert drawn(case, tmp_path) == json.loads(GOLDEN.read_text())[case]


ERRORS: dict[str, tuple[type[DataModule], Callable[[Path], None], dict[str, Any]]] = {
    "folders, no class to train on": (ImageFolder, folders(train={"a": 3}, test={"a": 3, "b": 3}), {}),
    "folders, nothing to test": (ImageFolder, folders({"a": 1, "b": 1}), {}),
    "folders, nothing to validate": (ImageFolder, folders({"a": 2, "b": 2}), {}),
    "folders, a divided group": (
        ImageFolder, folders(test={"a": 4, "b": 4}, train={"a": 4, "b": 4}), {"groups": "site[0-9]"}
    ),
    "folders, no group": (ImageFolder, folders({"a": 4, "b": 4}), {"groups": "site[1-9]"}),
    "folders, few for folds": (ImageFolder, folders({"a": 4, "b": 4}), {"folds": 5, "fold": 1}),
    "folders, no fold": (ImageFolder, folders({"a": 4, "b": 4}), {"test_fold": 1}),
    "folders, test alone in folds": (ImageFolder, folders(test={"a": 4, "b": 4}), {"folds": 2, "fold": 1}),
    "table, a divided group": (
        ImageFolder,
        table("path label split patient", lambda n: f"{n}.ppm,{'ab'[n % 2]},{('test', 'train')[n // 12]},{n % 13}"),
        {"table": "t.csv", "groups": "patient"},
    ),
    "table, a group in two folds": (
        ImageFolder,
        table("path label fold patient", lambda n: f"{n}.ppm,{'ab'[n % 2]},{n % 3},p{n // 2}"),
        {"table": "t.csv", "groups": "patient", "folds": 3, "fold": 1},
    ),
    "table, splits and folds": (
        ImageFolder,
        table("path label fold split", lambda n: f"{n}.ppm,{'ab'[n % 2]},{n % 3},train"),
        {"table": "t.csv", "folds": 3, "fold": 1},
    ),
    "table, other folds": (
        ImageFolder,
        table("path label fold", lambda n: f"{n}.ppm,{'ab'[n % 2]},{n % 3}"),
        {"table": "t.csv", "folds": 4, "fold": 1},
    ),
    "table, the same fold twice": (
        ImageFolder,
        table("path label fold", lambda n: f"{n}.ppm,{'ab'[n % 2]},{n % 3}"),
        {"table": "t.csv", "test_fold": 1, "val_fold": "1"},
    ),
    "shards, no class to train on": (
        ImageShards, shards(lambda n: "ab"[n >= 8], train=8, test=8), {}
    ),
    "shards, nothing to test": (ImageShards, shards(lambda n: "abc"[n], x=3), {}),
    "shards, nothing to validate": (ImageShards, shards(x=6), {}),
    "shards, a divided group": (ImageShards, shards(train=14, test=12), {"groups": "patient[0-9]+"}),
    "shards, no group": (ImageShards, shards(x=14), {"groups": "patient[1-9]"}),
    "shards, few for folds": (ImageShards, shards(x=14), {"folds": 6, "fold": 1}),
    "shards, no train": (ImageShards, shards(val=14, test=4), {}),
    "shards, one names no split": (ImageShards, shards(train=14, x=4), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_data_that_cannot_be_divided_are_refused_in_the_words_of_always(case: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        divided(case, tmp_path / "data")
    assert str(error.value).replace(str(tmp_path / "data"), "ROOT") == json.loads(GOLDEN.read_text())[case]
