import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """How the site was built, and its folder."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True), site


def test_every_link_and_docstring_of_the_site_is_sound(
    built: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    assert built[0].returncode == 0, built[0].stderr


def test_no_table_of_the_site_shows_a_backslash_before_a_bar(
    built: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    r"""Code in a cell needs `\|` for a bar on GitHub, and mkdocs shows it as it is: such cells need other words."""
    pages = sorted(built[1].rglob("*.html"))
    assert built[1] / "training.html" in pages
    shown = [
        f"{page.name}: {cell}"
        for page in pages
        for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page.read_text(), re.DOTALL)
        if "\\|" in cell
    ]
    assert shown == []
