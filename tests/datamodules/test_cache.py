"""What the cache keeps from run to run: incomplete files are made anew, and an unwritable cache is named."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from PIL import Image

from datamodules import DataError, Digits, ImageFolder, Pathfinder
from datamodules.cache import cache_folder, replacing


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cut(folder: Path, pattern: str, share: float) -> None:
    files = list(folder.glob(pattern))
    assert files
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_cache_that_is_cut_off_is_made_anew(share, cache, images):
    def loaded() -> list:
        data, drawn = ImageFolder(str(images)), Pathfinder(num_train=20, num_test=4)
        data.setup()
        drawn.setup()
        return [data.facts, data.statistics(), data.train_set.inputs.tolist(), drawn.train_set.inputs.tolist()]

    first = loaded()
    for pattern in ("scans/*.json", "statistics/*.pt", "images/*.pt", "pathfinder/*.pt"):
        cut(cache, pattern, share)
    assert loaded() == first
    assert isinstance(torch.load(next(cache.glob("statistics/*.pt")), weights_only=True), dict)  # it is complete again


def test_an_image_that_has_changed_is_read_anew_and_all_are_for_another_size(cache, images):
    def loaded(size: int) -> torch.Tensor:
        data = ImageFolder(str(images), size=size)
        data.setup()
        inputs = {
            name: image for part in data.splits().values() for name, image in zip(part.names, part.inputs, strict=True)
        }
        return inputs["cats/03.png"]

    first = loaded(8)
    assert torch.equal(loaded(8), first)
    assert loaded(4).shape == (3, 4, 4)
    Image.fromarray(255 - first.permute(1, 2, 0).numpy()).save(images / "cats/03.png")
    assert torch.equal(loaded(8), 255 - first)


def test_a_cache_that_cannot_be_written_is_named_on_one_line(images, monkeypatch):
    monkeypatch.setenv("LONGSEQ_CACHE", "/proc")  # nobody can create a file there, not even root
    digits = Digits()
    digits.setup()
    for fails in (ImageFolder(str(images)).setup, Pathfinder(num_train=20, num_test=4).setup, digits.statistics):
        with pytest.raises(
            DataError, match=r"^/proc/\w+: cannot be created \(.+\); set LONGSEQ_CACHE to a folder"
        ) as error:
            fails()
        assert "\n" not in str(error.value)


def test_a_folder_in_the_cache_that_cannot_be_written_is_named_too(cache, images):
    (cache / "scans").parent.mkdir()
    (cache / "scans").symlink_to("/proc")
    with pytest.raises(DataError, match=r"scans/.+\.json: cannot be written \(.+\); make room or set"):
        ImageFolder(str(images)).setup()
    digits = Digits()
    digits.setup()
    (cache / "statistics").symlink_to("/proc")
    with pytest.raises(DataError, match=r"statistics/.+\.pt: cannot be written \(.+\); make room or set"):
        digits.statistics()


@pytest.fixture
def read_only(cache: Path) -> Iterator[Callable[[], None]]:
    """Lets nobody, not even root, write into the cache from then on."""
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", cache], check=True)
    yield lambda: subprocess.run(["mount", "-o", "remount,ro", cache], check=True)
    subprocess.run(["umount", cache], check=True)


@pytest.mark.needs("mounts")
@pytest.mark.parametrize("has_locks", [True, False])
def test_a_whole_cache_that_may_only_be_read_is_enough(has_locks, read_only, cache, images):
    (images / "cats/broken.png").write_bytes(b"no image")

    def loaded() -> list:
        data, drawn = ImageFolder(str(images), on_error="skip"), Pathfinder(num_train=20, num_test=4)
        data.setup()
        drawn.setup()
        return [data.facts, data.statistics(), data.train_set.inputs.tolist(), drawn.train_set.inputs.tolist()]

    first = loaded()
    if not has_locks:  # as in a copy without hidden files
        for path in cache.rglob(".*.lock"):
            path.unlink()
    read_only()
    assert loaded() == first
    with pytest.raises(DataError, match=r"cannot be written \(Read-only file system\); make room or set LONGSEQ_CACHE"):
        Pathfinder(num_train=21, num_test=4).setup()


def test_a_cache_on_a_file_system_without_locks_is_used(cache, images, monkeypatch):
    def without(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", without)
    for _ in range(2):
        ImageFolder(str(images)).setup()
    assert list(cache.glob("scans/*.json"))


@pytest.mark.parametrize("name", ["LONGSEQ_CACHE", "XDG_CACHE_HOME"])
def test_a_variable_that_is_empty_counts_as_none(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("LONGSEQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "")
    assert cache_folder("part") == tmp_path / ".cache/longseq/part"


def test_what_a_killed_writer_leaves_is_deleted_and_what_a_living_one_writes_is_not(tmp_path):
    code = "import sys, time\nfrom pathlib import Path\nfrom datamodules.cache import replacing\n"
    code += "with replacing(Path(sys.argv[1])) as temporary:\n    temporary.write_bytes(bytes(1000))\n"
    code += "    print(flush=True)\n    time.sleep(60)\n"
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)], stdout=subprocess.PIPE)
        for name in ("killed.tar", "living.tar")
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"\n"
        writers[0].kill()
        writers[0].wait()
        (tmp_path / ".mine.part").touch()  # of another program
        names = [f".{name}.tar.{writer.pid}.part" for name, writer in zip(("killed", "living"), writers, strict=True)]
        assert {path.name for path in tmp_path.iterdir()} == {*names, ".mine.part"}
        with replacing(tmp_path / "next.tar") as temporary:
            temporary.write_bytes(b"x")
        assert {path.name for path in tmp_path.iterdir()} == {names[1], ".mine.part", "next.tar"}
        assert (tmp_path / names[1]).stat().st_size == 1000
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
