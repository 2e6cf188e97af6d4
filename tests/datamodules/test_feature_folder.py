"""Features of the user's own: bags of tokens in files of several kinds, correct and broken."""

import io
import math
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_sets import bag

from datamodules import DataError, FeatureFolder
from datamodules.decoding.feature_files import opened

FEATURES = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
PLACES = np.arange(14).reshape(7, 2) * 1000


def _h5(path: Path, **arrays: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def _npz(path: Path, **arrays: np.ndarray) -> None:
    np.savez(path, **arrays)


def _safetensors(path: Path, **arrays: np.ndarray) -> None:
    save_file({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}, path)


def _pt(path: Path, **arrays: np.ndarray) -> None:
    torch.save({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}, path)


WRITERS = {".h5": _h5, ".npz": _npz, ".safetensors": _safetensors, ".pt": _pt}
EVERY_ARCHIVE = pytest.mark.parametrize("suffix", WRITERS)


def _folder(root: Path, suffix: str = ".npz", number: int = 12, **arrays: np.ndarray) -> Path:
    """Twelve bags of two classes; each has the same arrays."""
    for at in range(number):
        path = root / ("normal", "tumor")[at % 2] / f"{at:02}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[suffix](path, **({"features": FEATURES + at} | arrays))
    return root


def _read(path: Path, **options) -> np.ndarray:
    """The file as an input of a data module that has seen no other file."""
    given = {"num_features": 4, "coordinates": False, "most_tokens": 10, "token_seconds": 0} | options
    return FeatureFolder("nowhere", **given).read(path).numpy()


# Good files


@EVERY_ARCHIVE
@pytest.mark.parametrize("names", [("features", "coords"), ("feats", "coordinates"), ("embeddings", "coords")])
def test_an_archive_of_features_and_coordinates_is_read_as_their_columns_side_by_side(suffix, names, tmp_path) -> None:
    of_features, of_places = names
    WRITERS[suffix](tmp_path / f"x{suffix}", **{of_features: FEATURES, of_places: PLACES, "other": FEATURES[:2]})
    assert np.array_equal(_read(tmp_path / f"x{suffix}"), FEATURES)
    whole = _read(tmp_path / f"x{suffix}", coordinates=True)
    assert whole.dtype == np.float32 and np.array_equal(whole, np.concatenate([FEATURES, PLACES], 1))


@EVERY_ARCHIVE
def test_an_only_array_needs_no_name_and_of_several_the_key_names_one(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    WRITERS[suffix](path, latents=FEATURES, coords=PLACES)
    assert np.array_equal(_read(path), FEATURES)
    WRITERS[suffix](path, latents=FEATURES, others=FEATURES + 1)
    assert np.array_equal(_read(path, key="others"), FEATURES + 1)
    with pytest.raises(DataError, match=r"no features, it holds (latents, others|others, latents); .* --data.key"):
        _read(path)
    with pytest.raises(DataError, match="no array called mine, it holds"):
        _read(path, key="mine")


def test_files_of_one_array_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", FEATURES)
    torch.save(torch.from_numpy(FEATURES), tmp_path / "x.pt")
    torch.save(torch.from_numpy(FEATURES), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("x.npy", "x.pt", "old.pt"):
        assert np.array_equal(_read(tmp_path / name), FEATURES)
        assert np.array_equal(_read(tmp_path / name, key="features"), FEATURES)


@EVERY_ARCHIVE
def test_a_leading_axis_of_one_a_single_vector_and_every_type_of_number_are_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    WRITERS[suffix](path, features=FEATURES[None], coords=PLACES[None])
    assert np.array_equal(_read(path), FEATURES)
    assert np.array_equal(_read(path, coordinates=True)[:, 4:], PLACES)
    WRITERS[suffix](path, features=FEATURES[0], coords=PLACES[0])
    assert np.array_equal(_read(path, coordinates=True), np.concatenate([FEATURES[:1], PLACES[:1]], 1))
    for kind in (np.float16, np.float64, np.uint8, np.int32):
        numbers = (9 * np.abs(FEATURES)).astype(kind)
        WRITERS[suffix](path, features=numbers)
        assert np.array_equal(_read(path), numbers.astype(np.float32))


def test_numbers_of_another_byte_order_and_of_bfloat16_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", FEATURES.astype(">f4"))
    assert np.array_equal(_read(tmp_path / "x.npy"), FEATURES)
    low = torch.from_numpy(FEATURES).bfloat16()
    torch.save(low, tmp_path / "x.pt")
    save_file({"features": low}, tmp_path / "x.safetensors")
    assert np.array_equal(_read(tmp_path / "x.pt"), low.float().numpy())
    assert np.array_equal(_read(tmp_path / "x.safetensors"), low.float().numpy())


def test_a_file_of_many_blocks_is_read_whole_and_in_parts(tmp_path: Path) -> None:
    large = np.random.default_rng(1).normal(size=(9000, 1024)).astype(np.float16)
    for suffix, write in WRITERS.items():
        write(tmp_path / f"x{suffix}", features=large)
        with opened(tmp_path / f"x{suffix}") as file:
            assert np.array_equal(file.read(0, 9000, False).numpy(), large.astype(np.float32))
            assert np.array_equal(file.read(4000, 8500, False).numpy(), large[4000:8500].astype(np.float32))


# Times


@EVERY_ARCHIVE
def test_equal_steps_of_times_are_the_seconds_from_one_token_to_the_next(suffix: str, tmp_path: Path) -> None:
    path, starts = tmp_path / f"x{suffix}", 1.5 * np.arange(7)
    for times in (starts, np.stack([starts, starts + 3], 1)):
        WRITERS[suffix](path, features=FEATURES, times=times)
        with opened(path) as file:
            assert file.token_seconds == 1.5
    WRITERS[suffix](path, features=FEATURES, times=starts**2)
    with opened(path) as file:
        assert file.token_seconds is None
    WRITERS[suffix](path, features=FEATURES, token_seconds=np.array(3.0))
    with opened(path) as file:
        assert file.token_seconds == 3


def test_notes_of_a_file_state_its_seconds(tmp_path: Path) -> None:
    save_file({"features": torch.from_numpy(FEATURES)}, tmp_path / "x.safetensors", {"token_seconds": "3.0"})
    bag(tmp_path / "x.h5", 7)
    with h5py.File(tmp_path / "x.h5", "a") as file:
        file.attrs["token_seconds"] = 3.0
    for name in ("x.safetensors", "x.h5"):
        with opened(tmp_path / name) as file:
            assert file.token_seconds == 3
    save_file({"features": torch.from_numpy(FEATURES)}, tmp_path / "x.safetensors", {"token_seconds": "soon"})
    with pytest.raises(DataError, match="token_seconds 'soon' is no positive number"):
        _read(tmp_path / "x.safetensors")


def test_tokens_with_times_are_cut_into_windows_and_others_are_not(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", features=FEATURES)
    timed = FeatureFolder("nowhere", num_features=4, coordinates=False, most_tokens=3, token_seconds=2)
    path = str(tmp_path / "x.npz")
    assert timed.parts(path, any_length=True) == [(path, 0, 14)]
    parts = timed.parts(path)
    assert parts == [(path, 0, 6), (path, 6, 12), (path, 8, 14)]
    for part, (first, stop) in zip(parts, [(0, 3), (3, 6), (4, 7)], strict=True):
        assert np.array_equal(timed.read_part(part).numpy(), FEATURES[first:stop])
    assert timed.parts(path, window=4, hop=2)[1] == (path, 2, 6)
    untimed = FeatureFolder("nowhere", num_features=4, coordinates=False, most_tokens=3, token_seconds=0)
    assert untimed.token_seconds is None
    assert untimed.parts(path, any_length=True) == [(path, 0, None)]
    with pytest.raises(DataError, match="7 tokens, and the model takes 3 at most; .*any_length"):
        untimed.parts(path)
    with pytest.raises(ValueError, match="window must be left out, got 4; the tokens"):
        untimed.parts(path, window=4)


@pytest.mark.parametrize("num_tokens", range(1, 30))
def test_every_token_is_in_a_window(num_tokens: int, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(num_tokens)[:, None])
    data = FeatureFolder("nowhere", num_features=1, coordinates=False, most_tokens=5, token_seconds=0.3)
    for window, hop in ((None, None), (1.5, 0.7), (0.3, 0.3)):
        parts = data.parts(str(tmp_path / "x.npy"), window, hop)
        assert {int(token) for part in parts for token in data.read_part(part)[:, 0]} == {*range(num_tokens)}


# Broken files


def _broken(path: Path) -> str:
    with pytest.raises(DataError) as error:
        _read(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and "; " in text and "\n" not in text
    return text


@EVERY_ARCHIVE
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named_by_its_token(suffix: str, wrong: float, tmp_path: Path) -> None:
    broken = FEATURES.copy()
    broken[5, 2] = wrong
    WRITERS[suffix](tmp_path / f"x{suffix}", features=broken)
    assert "NaN or infinity in token 5" in _broken(tmp_path / f"x{suffix}")


@EVERY_ARCHIVE
def test_an_empty_bag_and_wrong_shapes_are_refused_in_words_of_their_own(suffix: str, tmp_path: Path) -> None:
    path, write = tmp_path / f"x{suffix}", WRITERS[suffix]
    write(path, features=FEATURES[:0])
    assert "an empty bag" in _broken(path)
    write(path, features=FEATURES[:, :0])
    assert "without any number" in _broken(path)
    write(path, features=np.zeros((2, 7, 4), np.float32))
    assert "features of shape (2, 7, 4); write (tokens, features)" in _broken(path)
    write(path, features=FEATURES, coords=PLACES[:6])
    assert "coords of shape (6, 2); 7 tokens need (7, 2)" in _broken(path)
    write(path, features=FEATURES, times=np.arange(6.0))
    assert "times of shape (6,) for 7 tokens" in _broken(path)
    write(path, features=np.ones((7, 4), bool))
    assert "bool; write numbers" in _broken(path)


@pytest.mark.parametrize("suffix", [".npy", *WRITERS])
@pytest.mark.parametrize("content", ["half", "noise", "nothing", "text"])
def test_a_damaged_file_is_refused_in_one_line(suffix: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    np.save(path, FEATURES) if suffix == ".npy" else WRITERS[suffix](path, features=FEATURES, coords=PLACES)
    whole = path.read_bytes()
    noise = np.random.default_rng(0).bytes(len(whole))
    path.write_bytes(
        {"half": whole[: len(whole) // 2], "noise": noise, "nothing": b"", "text": b"bag of words"}[content]
    )
    _broken(path)


class _Runs:
    def __reduce__(self):
        return Path.touch, (Path("it-ran"),)


def test_no_file_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.array([_Runs()], object)
    np.save(tmp_path / "x.npy", objects)
    np.savez(tmp_path / "x.npz", features=objects)
    torch.save({"features": _Runs()}, tmp_path / "x.pt")
    torch.save(_Runs(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(_Runs()))
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(_Runs()))
    for path in sorted(tmp_path.iterdir()):
        assert "never unpickled" in _broken(path)
    assert not (tmp_path / "it-ran").exists()


def test_a_pt_of_more_than_tensors_is_refused(tmp_path: Path) -> None:
    for content in ({"features": torch.ones(2, 4), "slide": "a.svs"}, [torch.ones(2, 4)], 7, torch.nn.Linear(2, 2)):
        torch.save(content, tmp_path / "x.pt")
        assert "holds more than" in _broken(tmp_path / "x.pt")


def test_arrays_of_an_h5_that_lie_in_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(FEATURES.tobytes())
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("features", (7, 4), "f4", external=str(tmp_path / "secret"))
    assert "lies in other files" in _broken(tmp_path / "x.h5")
    bag(tmp_path / "other.h5", 7, 4)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["features"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "features")
    assert "no features, it holds no array" in _broken(tmp_path / "x.h5")


def test_an_h5_without_h5py_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag(tmp_path / "x.h5", 3)
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert "pip install 'longseq[hdf5]'" in _broken(tmp_path / "x.h5")


# Folders


def test_a_folder_of_bags_is_a_data_set(tmp_path: Path) -> None:
    for number in range(20):
        bag(tmp_path / ("normal", "tumor")[number % 2] / f"{number}.h5", 3 + number)
    data = FeatureFolder(str(tmp_path), batch_size=4)
    assert data.shape == (22, 8) and data.num_coordinates == 2 and data.token_seconds is None
    assert data.inputs.shape == (None, 8)
    data.setup()
    assert data.class_names == ["normal", "tumor"]
    seen = 0
    for inputs, _ in data.train_dataloader():
        for tokens, length in zip(inputs["features"], inputs["lengths"], strict=True):
            assert not tokens[length:].any() and tokens[:length].any(1).all()
            seen += 1
    assert seen == len(data.train_set)
    figures = data.statistics()
    sizes = data.train_set.whole_lengths
    assert figures["tokens of a bag, fewest / median / most"] == [sizes.min(), sizes.median(), sizes.max()]
    assert figures["features of a token"] == 6
    assert figures["coordinates, x and y"][1] == "0..2048"  # five columns


def test_bags_in_memory_and_from_files_are_the_same(tmp_path: Path) -> None:
    _folder(tmp_path, coords=PLACES)
    held, read = (FeatureFolder(str(tmp_path), in_memory=in_memory) for in_memory in (True, False))
    for data in (held, read):
        data.setup()
    assert isinstance(held.train_set.inputs, list) and not isinstance(read.train_set.inputs, list)
    for one, other in zip(held.train_set.inputs, read.train_set.inputs, strict=True):
        assert torch.equal(one, other) and one.shape == (7, 6)
    assert held.identity == read.identity


def test_batches_are_sorted_by_size_without_reading_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        bag(tmp_path / ("normal", "tumor")[number % 2] / f"{number}.h5", 3 + number)
    data = FeatureFolder(str(tmp_path), in_memory=False)
    data.setup()
    (tmp_path / "normal").rename(tmp_path / "gone")
    assert sorted(data.train_set.lengths.tolist()) == sorted(3 + int(Path(name).stem) for name in data.train_set.names)


def test_files_of_unlike_widths_are_named_with_both(tmp_path: Path) -> None:
    _folder(tmp_path)
    np.savez(tmp_path / "tumor/07.npz", features=np.ones((3, 9)))
    with pytest.raises(DataError, match=r"normal/00.npz has 4 features of a token, and tumor/07.npz has 9 .*; take"):
        FeatureFolder(str(tmp_path)).setup()
    data = FeatureFolder(str(tmp_path), num_features=4)
    assert data.bad_files() == {"tumor/07.npz": "9 features of a token, not 4; take those of the same network"}


def test_coordinates_in_some_files_only_are_refused_or_ignored(tmp_path: Path) -> None:
    _folder(tmp_path, coords=PLACES)
    np.savez(tmp_path / "tumor/07.npz", features=FEATURES)
    with pytest.raises(DataError, match=r"normal/00.npz has coordinates, and tumor/07.npz has none; .* false"):
        FeatureFolder(str(tmp_path)).setup()
    assert FeatureFolder(str(tmp_path), coordinates=False).shape == (7, 4)
    assert "no coordinates" in FeatureFolder(str(tmp_path), coordinates=True).bad_files()["tumor/07.npz"]


def test_unlike_times_are_refused_or_given(tmp_path: Path) -> None:
    _folder(tmp_path, token_seconds=np.array(3.0))
    assert FeatureFolder(str(tmp_path)).token_seconds == 3
    np.savez(tmp_path / "tumor/07.npz", features=FEATURES)
    with pytest.raises(DataError, match=r"normal/00.npz has 3 s .*, and tumor/07.npz has none; give"):
        FeatureFolder(str(tmp_path)).setup()
    assert FeatureFolder(str(tmp_path), token_seconds=1.5).token_seconds == 1.5
    assert FeatureFolder(str(tmp_path), token_seconds=0).token_seconds is None


def test_broken_bags_end_the_run_or_are_left_out(tmp_path: Path) -> None:
    _folder(tmp_path)
    np.savez(tmp_path / "tumor/07.npz", features=FEATURES[:0])
    (tmp_path / "normal/04.npz").write_bytes(b"no bag")
    with pytest.raises(DataError, match="1 more broken file"):
        FeatureFolder(str(tmp_path)).setup()
    data = FeatureFolder(str(tmp_path), on_error="skip")
    data.setup()
    assert sum(map(len, data.splits().values())) == 10
    assert set(data.bad_files()) == {"tumor/07.npz", "normal/04.npz"}


def test_another_key_is_scanned_anew(tmp_path: Path) -> None:
    _folder(tmp_path, others=np.ones((3, 9)))
    assert FeatureFolder(str(tmp_path)).shape == (7, 4)
    assert FeatureFolder(str(tmp_path), key="others").shape == (3, 9)
    assert FeatureFolder(str(tmp_path)).shape == (7, 4)


def _table(root: Path, header: str, rows: list[str]) -> str:
    (root / "slides.csv").write_text("\n".join([header, *rows]))
    return str(root / "slides.csv")


def test_a_table_gives_several_classes_or_amounts(tmp_path: Path) -> None:
    for number in range(12):
        bag(tmp_path / f"{number}.h5", 3)
    rows = [f"{number}.h5,{('a', 'b', 'a;b')[number % 3]},{number}" for number in range(12)]
    table = _table(tmp_path, "path,label,age", rows)
    data = FeatureFolder(str(tmp_path), table=table, labels_separator=";")
    data.setup()
    assert data.train_set.labels.shape[1] == 2
    data = FeatureFolder(str(tmp_path), table=table, amounts=["age"])
    data.setup()
    ages = torch.cat([samples.labels for samples in data.splits().values()])[:, 0]
    assert sorted(ages.tolist()) == [*range(12)]


def test_times_in_a_table_are_refused(tmp_path: Path) -> None:
    bag(tmp_path / "x.h5", 3)
    table = _table(tmp_path, "path,label,start,end", ["x.h5,a,0,3"])
    with pytest.raises(DataError, match="line 2: start and end are of sounds"):
        FeatureFolder(str(tmp_path), table=table).setup()


def _patients(tmp_path: Path, **options) -> FeatureFolder:
    """Forty slides of ten patients: one has up to seven of them."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(40):
        bag(tmp_path / f"{number}.h5", 2)
        patient = int(generator.integers(10))
        rows.append(f"{number}.h5,{('normal', 'tumor')[patient % 2]},patient{patient}")
    table = _table(tmp_path, "path,label,patient", rows)
    return FeatureFolder(str(tmp_path), table=table, groups="patient", **options)


def _patients_of(data: FeatureFolder) -> dict[str, set[str]]:
    data.setup()
    splits = data.splits().items()
    return {split: {data.located(name)["patient"] for name in samples.names} for split, samples in splits}


def test_all_slides_of_a_patient_are_in_one_split(tmp_path: Path) -> None:
    patients = _patients_of(_patients(tmp_path))
    assert all(patients.values()) and sum(map(len, patients.values())) == 10


def test_every_patient_is_tested_in_one_fold_and_never_trained_on_there(tmp_path: Path) -> None:
    tested: list[str] = []
    for fold in range(1, 5):
        patients = _patients_of(_patients(tmp_path, folds=4, fold=fold))
        assert all(patients.values()) and sum(map(len, patients.values())) == 10
        tested += patients["test"]
    assert sorted(tested) == sorted(f"patient{number}" for number in range(10))


def test_copies_of_a_bag_stay_in_one_split_and_need_one_class(tmp_path: Path) -> None:
    _folder(tmp_path, number=40)
    content = (tmp_path / "normal/00.npz").read_bytes()
    (tmp_path / "normal/02.npz").write_bytes(content)
    data = FeatureFolder(str(tmp_path))
    data.setup()
    assert any("copies of other files" in remark for remark in data.remarks)
    (tmp_path / "tumor/01.npz").write_bytes(content)
    assert "the same content" in FeatureFolder(str(tmp_path)).bad_files()["tumor/01.npz"]


def test_features_are_not_written_as_shards(tmp_path: Path) -> None:
    data = FeatureFolder(str(_folder(tmp_path / "data")))
    data.setup()
    with pytest.raises(DataError, match="^data: features are not written as shards; "):
        data.write_shards(tmp_path / "shards", 10)
    assert data.file_of(data.train_set, 0)[0] == ".npz"
    assert np.load(io.BytesIO(data.file_of(data.train_set, 0)[1]))["features"].shape == (7, 4)
