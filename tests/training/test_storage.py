import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from longseq.files import storage
from longseq.files.checkpoint import good_checkpoints, has_checkpoint, read_any
from longseq.files.parts import META, write_sharded


def test_a_text_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    storage.write_text(path, "old")

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "replace", killed)
        with pytest.raises(SystemExit):
            storage.write_text(path, "new")
    assert path.read_text() == "old"
    storage.write_text(path, "ä")
    assert path.read_text(encoding="utf-8") == "ä"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_checkpoint_is_read_back_before_it_replaces_another_and_its_sum_can_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    storage.write_checkpoint({"state_dict": {"w": torch.ones(3)}}, path)
    subprocess.run(["sha256sum", "-c", "last.ckpt.sha256"], cwd=tmp_path, check=True, capture_output=True)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "sha256_of", lambda path: "another")
        with pytest.raises(storage.StorageError, match="what was read back is not what was written"):
            storage.write_checkpoint({"state_dict": {"w": torch.zeros(3)}}, path)
    assert torch.equal(storage.read_whole(path)["state_dict"]["w"], torch.ones(3))


def test_what_was_there_stays_until_all_that_replaces_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new/model.onnx"
    with storage.replacing(path) as part:
        part.write_text("old")

    def full_disk() -> None:
        with storage.replacing(path) as part:
            part.write_text("half")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        full_disk()
    assert path.read_text() == "old"
    with storage.replacing(path) as part:
        part.write_text("new")
        part.with_name("model.data").write_text("beside it")
    assert {file.name: file.read_text() for file in path.parent.iterdir()} == {
        "model.onnx": "new",
        "model.data": "beside it",
    }


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoint(step: int) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((3,), float(step))}, "global_step": step}


@contextmanager
def killed_at_rename(moment: int) -> Iterator[None]:
    """Stop a writer at the first of all its renames, or at the second, and so on; one with fewer comes to its end."""
    renames = 0

    def killed_at(plain: Any) -> Any:
        def rename(*paths: Any) -> None:
            nonlocal renames
            if renames == moment:
                raise SystemExit
            renames += 1
            plain(*paths)

        return rename

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", killed_at(os.rename))
        patch.setattr(os, "replace", killed_at(os.replace))
        with suppress(SystemExit):
            yield


@pytest.mark.parametrize("moment", range(7))
@pytest.mark.parametrize(
    "writers", [(storage.write_checkpoint, write_sharded), (write_sharded, storage.write_checkpoint)]
)
def test_a_file_that_replaces_a_folder_of_parts_or_the_reverse_leaves_one_of_them_whole(
    writers: Any, moment: int, one_process: None, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    first, second = writers
    first(checkpoint(1), path)
    with killed_at_rename(moment):
        second(checkpoint(2), path)
    (newest, *_), _ = good_checkpoints(tmp_path)
    found = newest.read()
    assert found["state_dict"]["weight"].tolist() == [found["global_step"]] * 3
    second(checkpoint(3), path)
    assert read_any(path)["global_step"] == 3
    assert sorted(file.name for file in tmp_path.iterdir()) in (["last.ckpt"], ["last.ckpt", "last.ckpt.sha256"])


@pytest.mark.parametrize("moment", range(5))
def test_the_first_folder_of_parts_is_whole_or_absent(moment: int, one_process: None, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with killed_at_rename(moment):
        write_sharded(checkpoint(1), path)
    assert good_checkpoints(tmp_path)[1] == []
    assert path.exists() == (moment == 4)
    write_sharded(checkpoint(2), path)
    assert read_any(path)["global_step"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_first_folder_of_parts_that_an_older_longseq_left_unfinished_is_replaced(
    one_process: None, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    (path / "1700000000").mkdir(parents=True)
    assert not has_checkpoint(tmp_path)
    write_sharded(checkpoint(1), path)
    assert has_checkpoint(tmp_path) and read_any(path)["global_step"] == 1
    assert len([folder for folder in path.iterdir() if folder.is_dir()]) == 1


@pytest.mark.parametrize("offsets", [[1], [2**40], [-1], [1.5], ["a"], [], [0, 0], None, 3])
def test_parts_that_do_not_fill_their_tensor_are_refused(offsets: Any, one_process: None, tmp_path: Path) -> None:
    """torch would take what the memory held."""
    path = tmp_path / "last.ckpt"
    write_sharded(checkpoint(1), path)
    (part,) = path.glob("*/*.safetensors")
    with safe_open(part, "pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    (key,) = [name for name, text in notes.items() if "saved_offsets" in text]
    noted = json.loads(notes[key])
    for of_tensor in noted.values():
        of_tensor["saved_offsets"] = offsets
    save_file(tensors, part, notes | {key: json.dumps(noted)})
    meta = torch.load(path / META, weights_only=True)
    meta["parts"]["sums"] = {part.name: storage.sha256_of(part)}
    storage.write_checkpoint(meta, path / META)
    with pytest.raises(storage.CheckpointError, match=rf"^{path}: damaged.*; give another$"):
        read_any(path)


def test_parts_that_lie_on_each_other_are_refused(one_process: None, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_sharded(checkpoint(1), path)
    (part,) = path.glob("*/*.safetensors")
    with safe_open(part, "pt") as file:
        name, notes = next(iter(file.keys())), dict(file.metadata())
    (key,) = [each for each, text in notes.items() if "saved_offsets" in text]
    for number, (offset, length) in enumerate(((0, 4), (0, 4), (8, 2))):  # ten numbers, and six of ten are there
        noted = json.dumps({name: {"saved_offsets": [offset]}})
        save_file({name: torch.ones(length)}, part.with_name(f"{number}.safetensors"), notes | {key: noted})
    part.unlink()
    meta = torch.load(path / META, weights_only=True)
    meta["parts"]["sums"] = {file.name: storage.sha256_of(file) for file in part.parent.iterdir()}
    storage.write_checkpoint(meta, path / META)
    with pytest.raises(storage.CheckpointError, match=r"damaged, the parts of state_dict/weight are not those of one "):
        read_any(path)
