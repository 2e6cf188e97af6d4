"""The example mechanism in docs/guides/add-a-mechanism.md fulfils the whole contract of a mechanism."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from longseq.attention import Mechanism
from longseq.attention.examples import exported
from longseq.contract.mechanism import PROMISES
from longseq.contract.promise import Promise

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Mechanism:
    code = re.findall(r"```python\n(.*?)```", (DOCS / "guides/add-a-mechanism.md").read_text(), re.DOTALL)[0]
    path = tmp_path_factory.mktemp("design") / "pooled.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("pooled", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pooled"] = module
    spec.loader.exec_module(module)
    (example,) = module.Pooled.examples()
    return example


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.test.__name__)
def test_the_mechanism_of_the_page_fulfils_the_contract(promise: Promise, shown: Mechanism) -> None:
    promise(shown)


def test_the_table_of_costs_has_every_mechanism_as_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    table = importlib.import_module("costs").table()
    assert table in (DOCS / "attention.md").read_text(), "put in what python docs/costs.py prints"
    for mechanism in exported(Mechanism):
        assert f"`{mechanism.__name__}(" in table
