"""What a release is made of: the version, the CHANGELOG, the workflow that publishes it, and the Dockerfile."""

import re
import subprocess
from pathlib import Path

import yaml

import longseq

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github/workflows/publish.yml"
NEWEST = re.compile(r"^## (\S+), (not released yet|\d{4}-\d\d-\d\d)\n\n### Breaks\n", re.MULTILINE)


def test_the_changelog_begins_with_what_breaks_in_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = NEWEST.search(text)
    assert first and first.start() == text.index("\n## ") + 1 and first[1] == longseq.__version__


def test_the_version_is_in_one_place() -> None:
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()
    assert '\nversion = "' not in (ROOT / "pyproject.toml").read_text()


def release_of(folder: Path, tag: str, heading: str) -> subprocess.CompletedProcess[str]:
    (folder / ".ci").mkdir(exist_ok=True)
    (folder / "longseq").mkdir(exist_ok=True)
    (folder / "longseq/__init__.py").write_text((ROOT / "longseq/__init__.py").read_text())
    (folder / "CHANGELOG.md").write_text(f"# Changes\n\n## {heading}\n")
    script = folder / ".ci/release-version"
    script.write_text((ROOT / ".ci/release-version").read_text())
    return subprocess.run(["bash", script, tag], capture_output=True, text=True)


def test_only_a_tag_of_this_version_with_a_date_is_published(tmp_path: Path) -> None:
    version = longseq.__version__
    dated = f"{version}, 2026-12-01"
    assert release_of(tmp_path, f"v{version}", dated).returncode == 0
    other = release_of(tmp_path, "v9.9.9", dated)
    assert (other.returncode, other.stderr.startswith("error: v9.9.9: ")) == (2, True)
    undated = release_of(tmp_path, f"v{version}", f"{version}, not released yet")
    assert (undated.returncode, undated.stderr.startswith("error: CHANGELOG.md: ")) == (2, True)


def test_the_workflow_publishes_after_its_checks_without_a_password() -> None:
    text = WORKFLOW.read_text()
    workflow = yaml.safe_load(text)
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}  # YAML 1.1 reads on: as true
    assert (jobs["check"]["needs"], jobs["publish"]["needs"]) == ("build", "check")
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "secrets." not in text
    for version in jobs["check"]["strategy"]["matrix"]["python"]:
        assert (ROOT / f"constraints/{version}.txt").is_file()
    for script in set(re.findall(r"\.ci/[\w-]+", text)):
        assert (ROOT / script).stat().st_mode & 0o100, script


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    text = (ROOT / "Dockerfile").read_text()
    python = re.search(r"^FROM python:([\d.]+)-slim", text, re.MULTILINE)
    assert python and f"--constraint constraints/{python[1]}.txt" in text
    sources = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == allowed and all((ROOT / name).exists() for name in sources)
