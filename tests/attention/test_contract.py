"""What every mechanism must do, tested on all that longseq.attention exports, so a new one is tested once exported."""

import dataclasses
from pathlib import Path

import forked
import pytest
import torch
from small_vit import ATTENTION, COMPILED, MECHANISMS, gradients, images, model

import longseq.attention
from longseq.attention import Mechanism, Nystromformer, Softmax, Verma, carry
from longseq.attention.examples import every_mechanism
from longseq.attention.layer import AttentionLayer
from longseq.contract.mechanism import PROMISES
from longseq.contract.promise import Promise

EVERY = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)


@dataclasses.dataclass(frozen=True)
class Untried(Softmax):
    @classmethod
    def examples(cls):
        return []


def test_a_mechanism_that_is_exported_without_an_example_fails(monkeypatch):
    monkeypatch.setattr(longseq.attention, "Softmax", Untried)
    with pytest.raises(TypeError, match=r"^Untried must have an example, or no test would try it"):
        every_mechanism()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.test.__name__)
@EVERY
def test_every_mechanism_keeps_every_promise(mechanism: Mechanism, promise: Promise) -> None:
    promise(mechanism)


def test_only_mechanisms_whose_queries_meet_each_other_get_all_of_them():
    """A promise shows that each other claim is true; without the claim, the class token's block would be slow."""
    needing_all = [candidate for candidate in ATTENTION if not model(candidate).blocks[0].attn.independent_queries]
    by_columns = [Verma(7, normalize="columns")]
    assert needing_all == [
        candidate for candidate in ATTENTION if isinstance(candidate, Nystromformer) or candidate in by_columns
    ]


@pytest.mark.parametrize(
    ("script", "mechanisms"),
    [pytest.param("compile_every.py", COMPILED, marks=pytest.mark.thorough), ("ddp_every.py", MECHANISMS)],
)
def test_every_one_compiles_in_one_graph_and_trains_on_two_processes(script, mechanisms, tmp_path):
    """The scripts run in separate processes: a compiler cannot follow the shape checks of `make thorough`."""
    done = forked.run(Path(__file__).with_name(script), tmp_path, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(map(repr, mechanisms))


@EVERY
def test_its_description_rebuilds_it(mechanism):
    assert eval(repr(mechanism), vars(longseq.attention)) == mechanism


class Scaled(torch.nn.Module):
    """A formula with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, heads):
        queries, keys, values, _, key_mask, _ = heads
        return self.scale * torch.nn.functional.scaled_dot_product_attention(queries, keys, values, key_mask)


@dataclasses.dataclass(frozen=True)
class WithScale(Softmax):
    def layers(self, stack, grid):
        return [AttentionLayer(trained, Scaled()) for trained in stack]


def test_a_formula_may_be_a_module():
    """Its weights are trained, saved and carried with the layer's."""
    vit = model(WithScale())
    assert torch.equal(vit.eval()(images()), model(Softmax()).eval()(images()))
    assert gradients(vit)["blocks.1.attn.formula.scale"] != 0
    vit.blocks[0].attn.formula.scale.data.fill_(2.0)
    twin = model(WithScale())
    assert carry(vit, twin) == []
    assert twin.blocks[0].attn.formula.scale == 2
    assert carry(model(Softmax()), model(WithScale())) == [f"blocks.{n}.attn.formula.scale" for n in (0, 1)]
