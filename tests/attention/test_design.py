"""The example mechanism in docs/guides/add-a-mechanism.md fulfils the whole contract of a mechanism."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import test_contract as contract

from longseq.attention import Mechanism, Softmax
from longseq.attention.examples import exported

DOCS = Path(__file__).parents[2] / "docs"
CLAIMS = [
    contract.test_every_parameter_has_a_gradient,
    contract.test_dropout_falls_in_training_only_and_changes_something,
    contract.test_a_key_padding_mask_hides_what_is_behind_it,
    contract.test_bfloat16_and_autocast_stay_near_float32,
    contract.test_activation_checkpointing_changes_no_gradient,
    contract.test_a_deep_copy_is_equal_and_its_own_and_shares_what_was_shared,
    contract.test_on_the_meta_device_it_has_the_shapes_of_its_outcome,
]


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


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_the_mechanism_of_the_page_fulfils_the_contract(claim, shown: Mechanism) -> None:
    claim(shown)


def test_it_is_carried_and_short_cuts_give_its_formula(shown: Mechanism) -> None:
    contract.test_it_is_carried_to_and_from_every_other(shown, Softmax())
    for is_padded in (False, True):
        contract.test_short_cuts_and_fewer_queries_give_what_the_formula_gives(shown, {"qkv_bias": True}, is_padded)


def test_the_table_of_costs_has_every_mechanism_as_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    table = importlib.import_module("costs").table()
    assert table in (DOCS / "attention.md").read_text(), "put in what python docs/costs.py prints"
    for mechanism in exported(Mechanism):
        assert f"`{mechanism.__name__}(" in table
