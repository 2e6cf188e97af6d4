"""A page of measurements in turns keeps what was written by hand."""

import importlib
from pathlib import Path


def test_a_page_that_is_measured_again_keeps_what_stands_above_its_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    in_turns, page = importlib.import_module("in_turns"), tmp_path / "page.md"
    in_turns.write_page(page, "Title", "    python first.py\n\n| 1 |\n")
    assert page.read_text() == "# Title\n\n    python first.py\n\n| 1 |\n"
    page.write_text(page.read_text().replace("# Title\n", "# Another\n\nAn answer.\n"))
    in_turns.write_page(page, "Title", "    python second.py\n\n| 2 |\n")
    assert page.read_text() == "# Another\n\nAn answer.\n\n    python second.py\n\n| 2 |\n"
