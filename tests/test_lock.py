"""constraints/3.11.txt and 3.12.txt, from which a clone installs."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_lock_file_names_one_release_of_each_library_that_pyproject_asks_for(version: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints" / f"{version}.txt").read_text().splitlines()
    locked = dict(line.split("==") for line in lines)
    asked = [Requirement(each) for part in project["optional-dependencies"].values() for each in part]
    asked += [Requirement(each) for each in project["dependencies"]]
    for requirement in asked:
        if requirement.name != "longseq":
            name = requirement.name.lower().replace("_", "-")
            assert locked.get(name, "none") in requirement.specifier, f"{name}: run make lock"
