import subprocess
import sys
from pathlib import Path

from pages import ROOT


def test_every_link_and_docstring_of_the_site_is_sound(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]

    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert built.returncode == 0, built.stderr
