"""docs/stability.md: what an earlier release promised is still there. tests/promised.py records it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promised
import pytest
import yaml

RELEASES = sorted(promised.STABLE.glob("*/names.json"))
CONFIGURATIONS = sorted(promised.STABLE.glob("*/*.yaml"))


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration by their paths."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}")
    else:
        yield key, value


def assert_still_there(earlier: dict[str, list[str]], present: dict[str, list[str]]) -> None:
    for holder, names in earlier.items():
        gone = set(names) - set(present.get(holder, []))
        assert holder in present and not gone, f"{holder}: {gone or 'gone'}; docs/stability.md says how a name may go"


@pytest.mark.parametrize("path", RELEASES, ids=name_of)
def test_every_promised_command_flag_and_class_is_still_there(path: Path) -> None:
    earlier = json.loads(path.read_text())
    assert_still_there(earlier["names"], promised.exported())
    assert_still_there(earlier["commands"], promised.flags())


@pytest.mark.parametrize("path", RELEASES, ids=name_of)
def test_the_promised_columns_of_predictions_come_first(path: Path) -> None:
    columns = json.loads(path.read_text())["columns"]
    assert list(promised.COLUMNS[: len(columns)]) == columns


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=name_of)
def test_every_key_of_an_earlier_configuration_is_read_as_it_stands(path: Path, command: Callable) -> None:
    printed = command("fit", "--config", path, "--print_config")
    assert printed.code == 0, printed.err
    earlier, present = (dict(flat(yaml.safe_load(text))) for text in (path.read_text(), printed.out))
    assert {key: present.get(key, "gone") for key in earlier} == earlier


def test_a_name_that_is_gone_is_told() -> None:
    with pytest.raises(AssertionError, match=r"fit: \{'minutes'\}; docs/stability.md"):
        assert_still_there({"fit": ["folds", "minutes"]}, {"fit": ["folds"]})
