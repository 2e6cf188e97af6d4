"""The command contract: what a user's mechanism, projection, task or data module breaks is named, with the remedy."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from datamodules import Digits
from longseq.attention import Linear, Mechanism, Projection
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer
from longseq.attention.projection import ProjectionLayer
from longseq.contract import data, mechanism, projection
from longseq.contract.promise import BrokenPromise, Promise

GUIDE = Path(__file__).parents[2] / "docs/guides/add-a-mechanism.md"


def attention(heads: Heads) -> Tensor:
    scores = heads.queries @ heads.keys.mT * heads.queries.shape[-1] ** -0.5
    if heads.key_mask is not None:
        scores = scores.masked_fill(~heads.key_mask, -torch.inf)
    return nn.functional.dropout(scores.softmax(-1), heads.dropout) @ heads.values


def unmasked(heads: Heads) -> Tensor:
    return attention(heads._replace(key_mask=None))


def of_all_queries(heads: Heads) -> Tensor:
    queries, mask = heads.queries, heads.query_mask
    there = torch.ones_like(queries[:, :1, :, :1]) if mask is None else mask.to(queries)
    mean = (queries * there).sum(2, keepdim=True) / there.sum(2, keepdim=True)
    return attention(heads._replace(queries=queries + mean))


def without_dropout(heads: Heads) -> Tensor:
    return attention(heads._replace(dropout=0.0))


def of_all_samples(heads: Heads) -> Tensor:
    mixed = attention(heads)
    return mixed + mixed.mean(0, keepdim=True)


def by_numbers(heads: Heads) -> Tensor:
    return attention(heads) * (1 + 0 * float(heads.values.sum()))


def of_four_heads(heads: Heads) -> Tensor:
    return attention(heads) * torch.ones(4, 1, 1).to(heads.queries)


def by_exponentials(heads: Heads) -> Tensor:
    weights = (heads.queries @ heads.keys.mT * heads.queries.shape[-1] ** -0.5).exp()
    weights = weights if heads.key_mask is None else weights * heads.key_mask
    return nn.functional.dropout(weights / weights.sum(-1, keepdim=True), heads.dropout) @ heads.values


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, heads: Heads) -> Tensor:
        return attention(heads)


@dataclasses.dataclass(frozen=True)
class Own(Mechanism):
    formula: ClassVar[Callable[[], Any]] = lambda: attention

    @classmethod
    def examples(cls) -> list["Own"]:
        return [cls()]

    def layers(self, stack: Any, grid: Any) -> list[Any]:
        return [AttentionLayer(trained, type(self).formula(), independent_queries=True) for trained in stack]


def own(formula: Any) -> Mechanism:
    return type("Own", (Own,), {"formula": staticmethod(lambda: formula)})()


class Nameless(Own):
    def __init__(self, size: int = 3) -> None:
        pass


class Lazy(Own):
    def layers(self, stack: Any, grid: Any) -> list[Any]:
        return list(stack)


def broken(promises: Any, subject: Callable[[], Any]) -> dict[str, str]:
    """What is seen of the promises that are broken, by their functions' names."""
    seen = {}
    for promise in promises:
        try:
            promise(subject())
        except BrokenPromise as error:
            seen[promise.test.__name__] = str(error)
    return seen


def test_a_sound_mechanism_keeps_every_promise() -> None:
    assert broken(mechanism.PROMISES, lambda: own(attention)) == {}


@pytest.mark.parametrize(
    ("subject", "promise", "said"),
    [
        (own(unmasked), mechanism.padding_changes_nothing, "tokens before padding and tokens alone differ by up to"),
        (own(of_all_queries), mechanism.fewer_queries_have_the_same_outcome, "leave independent_queries out if"),
        (own(without_dropout), mechanism.dropout_falls_in_training_only, "two passes in training are equal"),
        (own(of_all_samples), mechanism.samples_do_not_mix, "logits of a batch and of its images alone differ"),
        (own(by_numbers), mechanism.it_has_shapes_on_the_meta_device, "let no shape depend on the values of a tensor"),
        (own(of_four_heads), mechanism.it_takes_any_number_of_heads, "RuntimeError mat1 and mat2 shapes"),
        (own(by_exponentials), mechanism.gradients_of_large_tokens_are_finite, "the outcome is not finite"),
        (own(Unused()), mechanism.every_weight_gets_a_gradient, "blocks.0.attn.formula.scale gets none; use"),
        (Nameless(), mechanism.plain_values_describe_it, "TypeError Nameless must keep its argument size"),
        (Lazy(), mechanism.a_layer_for_each_block, "a block holds Attention; return one TokenMixer"),
    ],
    ids=lambda value: value.test.__name__ if isinstance(value, Promise) else "",
)  # fmt: skip
def test_a_mechanism_that_breaks_a_promise_fails_it_with_the_remedy(
    subject: Mechanism, promise: Promise, said: str
) -> None:
    with pytest.raises(BrokenPromise, match=re.escape(said)) as error:
        promise(subject)
    assert "\n" not in str(error.value) and promise.remedy in str(error.value)


class Squares(ProjectionLayer):
    """Sums of squares over windows of five: it does not commute, and counts padding."""

    commutes = True

    def forward(self, tokens: Tensor, present: Tensor | None = None) -> Tensor:
        padded = nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[1] % 5))
        return padded.unflatten(1, (-1, 5)).square().sum(2) + 1


class Square(Projection):
    def build(self, grid: Any, k: int, dim: int, heads: int | None = None) -> ProjectionLayer:
        return Squares()


def test_a_projection_that_breaks_promises_fails_them_and_a_sound_one_keeps_all() -> None:
    assert broken(projection.PROMISES, Linear) == {}
    seen = broken(projection.OWN, Square)
    assert set(seen) == {"it_says_whether_it_commutes", "padding_counts_for_nothing"}
    assert "commutes is True" in seen["it_says_whether_it_commutes"]


class Forgetful(Digits):
    def __init__(self, colour: str = "grey") -> None:
        super().__init__(batch_size=64)


class Partial(Digits):
    def val_dataloader(self) -> Any:
        return super().train_dataloader()


class Bare(pl.LightningDataModule):
    class_names = ("a", "b")
    num_classes, shape = 2, (1, 8, 8)


def test_a_data_module_that_breaks_promises_fails_them_and_a_sound_one_keeps_all() -> None:
    assert broken(data.PROMISES, Digits) == {}
    assert broken(data.PROMISES, Forgetful) == {
        "its_arguments_make_it_again": "TypeError Forgetful must keep its argument colour as an attribute; "
        + data.its_arguments_make_it_again.remedy
    }
    assert "val: its batches have other labels" in broken(data.PROMISES, Partial)["batches_have_all_samples"]
    assert "it lacks bad_files, identity, " in broken(data.PROMISES, Bare)["nothing_is_lacking"]


@pytest.fixture
def own_module(tmp_path: Path) -> Iterator[str]:
    """The guide's mechanism in a file of the working folder, and one beside it that ignores the mask of the keys."""
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    (tmp_path / "pooled_by_me.py").write_text(code)
    leaky = code.replace("    if key_mask is not None:\n", "    if False:\n")
    (tmp_path / "leaky_by_me.py").write_text(leaky)
    yield "pooled_by_me.Pooled"
    for name in ("pooled_by_me", "leaky_by_me"):
        sys.modules.pop(name, None)


def test_the_command_prints_a_line_for_each_promise_and_ends_with_2_if_one_is_broken(command, own_module: str) -> None:
    done = command("contract", own_module, "--allow_class", "pooled_by_me")
    assert done.code == 0, done.err
    *lines, last = done.out.splitlines()
    assert lines == [f"ok: {promise.says}" for promise in mechanism.PROMISES]
    assert last == f"{own_module} keeps all {len(lines)} promises"

    done = command("contract", "leaky_by_me.Pooled", "--allow_class", "leaky_by_me")
    fails = [line for line in done.out.splitlines() if not line.startswith("ok: ")]
    assert done.code == 2 and fails[0].startswith("fails: padding changes nothing: tokens before padding"), done.out
    assert done.error.startswith(f"error: leaky_by_me.Pooled: breaks {len(fails)} of {len(lines)} promises; ")


def test_a_data_module_gets_its_arguments_by_name_and_missing_data_is_the_usual_line(command, tmp_path: Path) -> None:
    done = command("contract", "datamodules.Digits", "--init_args.size", "6", "--init_args.batch_size", "9")
    assert (done.code, done.out.splitlines()[-1]) == (0, f"datamodules.Digits keeps all {len(data.PROMISES)} promises")
    done = command("contract", "datamodules.MNIST", "--init_args.root", tmp_path)
    assert done.code == 3 and str(tmp_path) in done.error and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine.Pooled"], "class_path: mine.Pooled may not be named; --allow_class mine if you trust it"),
        (["mine.Pooled", "--allow_class", "mine"], "class_path: mine.Pooled is no Mechanism or Projection or "),
        (["Linformer"], "class_path: must name the package too, got Linformer; give one such as longseq.attention.L"),
        (["datamodules.FSDD"], "init_args: FSDD.__init__() missing 1 required positional argument: 'root'; give"),
        (["datamodules.Digits", "--init_args.size", "0"], "init_args.size: must be in 1..1024, got 0; 8 is"),
        ([], "class_path: "),
    ],
)  # fmt: skip
def test_what_cannot_be_tested_is_one_line(command, words: list[str], said: str) -> None:
    done = command("contract", *words)
    assert done.code == 2 and done.error.startswith(f"error: {said}") and done.err.count("\n") == 1, done.err
