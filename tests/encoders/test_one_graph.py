"""Every encoder compiles into one graph."""

from typing import Any

import pytest
import torch
from encoder_kinds import KINDS
from torch._dynamo.utils import counters

from longseq import Linformer, Verma
from longseq.encoders import ASTEncoder, Encoder, SpecAugment, SpectrogramEncoder, TimmEncoder, WaveformEncoder

SMALL = {"attention": Linformer(7), "depth": 1}
FREE = {"attention": Verma(), "any_length": True, "positions": "none", "depth": 1}
FORMS = [
    *((kind, SMALL) for kind in KINDS if kind is not TimmEncoder),
    (TimmEncoder, {"attention": Linformer(7)}),
    (SpectrogramEncoder, FREE),
    (WaveformEncoder, FREE),
    (ASTEncoder, SMALL | {"spec_augment": SpecAugment(), "fills": True}),
]
EXAMPLES = [
    pytest.param(
        *kind.examples(**options)[number],
        id=f"{kind.__name__} {number} {sorted(options)}",
        marks=[pytest.mark.thorough] if number and kind.kind != "sounds" else [],
    )
    for kind, options in FORMS
    for number in range(len(kind.examples(**options)))
]


def first_of(inputs: Any) -> Any:
    """A batch of its first sample."""
    return {key: part[:1] for key, part in inputs.items()} if isinstance(inputs, dict) else inputs[:1]


@pytest.mark.parametrize(("encoder", "inputs"), EXAMPLES)
def test_it_is_one_graph_in_training_and_in_an_evaluation_of_a_single_sample(encoder: Encoder, inputs: Any) -> None:
    encoder.set_statistics(encoder.mean, encoder.std)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(encoder, backend=backend, dynamic=False)
    compiled(inputs).sum().backward()
    assert len(graphs) == 1
    encoder.eval()
    single = first_of(inputs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(single), encoder(single), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2
    assert not counters["graph_break"]
