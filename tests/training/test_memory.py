"""The advice after a training ran out of memory: only changes that were tried, and none that cannot be built. Memory
that a step frees: a training keeps it for the next step."""

import json
from contextlib import nullcontext
from pathlib import Path

import forked
import pytest
import torch

from longseq import ImageEncoder, Linear, Linformer, Verma
from longseq.encoders import FeatureEncoder
from longseq.training import Classifier
from longseq.training.fitting import what_fits

BATCH = torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.zeros(6, dtype=torch.long)


def a_model() -> Classifier:
    attention = Linformer(8, projection=Linear("mean"))  # "mean" needs a k above the number of prefix tokens
    return Classifier(ImageEncoder((1, 8, 8), attention, dim=16, depth=1, heads=2, pool="token"), 3)


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def test_where_nothing_fits_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    monkeypatch.setattr(Classifier, "forward", lambda *_: (_ for _ in ()).throw(MemoryError))
    assert what_fits(model, BATCH, nullcontext) == []


def test_where_all_fits_the_least_change_of_each_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longseq.training.fitting.has_bfloat16", lambda: True)
    changes = ["--data.batch_size 3 --trainer.accumulate_grad_batches 2", "--model.encoder.checkpointing true"]
    smaller = ["--model.encoder.attention.k 4"]
    assert what_fits(a_model(), BATCH, nullcontext) == [
        *changes,
        "--trainer.precision bf16-mixed",
        *smaller,
    ]
    assert what_fits(a_model(), BATCH, bf16) == [*changes, *smaller]  # bf16 is already on, so it is not named
    monkeypatch.setattr("longseq.training.fitting.has_bfloat16", lambda: False)  # it would take ten times as long
    assert what_fits(a_model(), BATCH, nullcontext) == [*changes, *smaller]


def test_a_smaller_batch_keeps_the_samples_of_a_step_where_gradients_accumulate_already() -> None:
    named = what_fits(a_model(), BATCH, nullcontext, accumulated=4)
    assert named[0] == "--data.batch_size 3 --trainer.accumulate_grad_batches 8"


def test_a_smaller_batch_of_bags_is_one_of_fewer_tokens() -> None:
    model = Classifier(FeatureEncoder(4, 50, Verma(), dim=16, depth=1, heads=2), 3)
    batch = {"features": torch.zeros(6, 50, 4), "lengths": torch.full((6,), 50)}, torch.zeros(6, dtype=torch.long)
    named = what_fits(model, batch, nullcontext, has_max_tokens=True)
    assert named[0] == "--data.max_tokens 150 --trainer.accumulate_grad_batches 2"
    assert what_fits(model, batch, nullcontext)[0] == "--data.batch_size 3 --trainer.accumulate_grad_batches 2"


def test_room_is_kept_for_the_moments_of_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    made: list[int] = []
    zeros_like = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x, **kwargs: made.append(x.numel()) or zeros_like(x, **kwargs))
    monkeypatch.setattr(Classifier, "forward", lambda *_: (_ for _ in ()).throw(MemoryError))
    what_fits(model, BATCH, nullcontext)
    assert sum(made) == 2 * sum(weight.numel() for weight in model.parameters())
    made.clear()
    what_fits(model, BATCH, nullcontext, has_moments=True)
    assert made == []


@pytest.mark.parametrize("own_setting", [None, "MALLOC_TRIM_THRESHOLD_"])
def test_a_fit_from_python_keeps_freed_memory_to_its_end_unless_the_user_has_set_glibc(
    own_setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own_setting is not None:
        monkeypatch.setenv(own_setting, "1000000")
    done = forked.run(Path(__file__).with_name("freed_memory.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, during, after = json.loads(done.stdout.splitlines()[-1])
    # 16,384 pages of 4 KiB, or 32 of 2 MiB if the system makes them huge
    assert before >= 32
    assert after >= 32
    assert (during < 32) == (own_setting is None)
