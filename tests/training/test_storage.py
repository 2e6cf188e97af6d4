from pathlib import Path

import pytest

from longseq.training import storage


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
