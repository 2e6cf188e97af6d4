"""What a training may be told besides its model: schedules, rates by layer, frozen parts, mixtures, loggers."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_callbacks import BATCHES, FIT, UNLOGGED, Step, ended, same, steps  # noqa: F401  (a fixture)

from longseq.arguments import ArgumentError
from longseq.attention import Linformer
from longseq.encoders import ImageEncoder
from longseq.training import Classifier, CutMix, MixUp, MixUpOrCutMix

STEPS = 4 * BATCHES
RISE = 4
SLOW = ["--model.warmup_fraction", str(RISE / STEPS)]


def after_warmup(name: str) -> list[float]:
    """The shares of the peak that the documentation promises, for the steps after the warm-up."""
    shares = [step / (STEPS - RISE) for step in range(STEPS - RISE)]
    if name == "constant":
        return [1.0] * len(shares)
    if name == "linear":
        return [1 - share for share in shares]
    if name == "step":
        return [1.0 if share < 0.5 else 0.1 if share < 0.75 else 0.01 for share in shares]
    turns = 4 if name == "restarts" else 1
    return [(1 + math.cos(math.pi * ((turns * share) % 1))) / 2 for share in shares]


@pytest.mark.parametrize("name", ["cosine", "constant", "linear", "step", "restarts"])
def test_a_schedule_is_what_its_name_promises(name: str, command: Callable, steps: list[Step]) -> None:  # noqa: F811
    assert command(*UNLOGGED, "--model.schedule", name, *SLOW).code == 0
    expected = [(step + 1) / RISE for step in range(RISE)] + after_warmup(name)
    assert [step.rates[0] for step in steps] == pytest.approx([2e-3 * share for share in expected])


def test_a_scheduler_of_torch_runs_by_name_and_goes_on_when_resumed(
    command: Callable,
    steps: list[Step],  # noqa: F811
) -> None:
    halving = ["--model.schedule", "{scheduler: StepLR, step_size: 1, gamma: 0.5}"]
    assert command(*UNLOGGED, *halving).code == 0
    expected = [2e-3 * 0.5**epoch for epoch in range(4) for _ in range(BATCHES)]
    assert [step.rates[0] for step in steps] == pytest.approx(expected)
    steps.clear()
    without_end = ["--trainer.max_epochs", "-1", "--trainer.max_steps", 4 * BATCHES]
    assert command(*UNLOGGED, *halving, *without_end, "--experiment", "y").code == 0
    assert [step.rates[0] for step in steps] == pytest.approx(expected)
    assert command(*UNLOGGED, *halving, "--trainer.max_epochs", "2").code == 0
    assert command(*UNLOGGED, *halving, "--resume", "runs/x/1", "--trainer.max_epochs", "4").code == 0
    assert same(ended("x/0")["state_dict"], ended("x/1")["state_dict"])


def test_a_training_that_max_steps_ended_within_an_epoch_goes_on_with_the_batches_that_it_lacks(
    command: Callable,
    steps: list[Step],  # noqa: F811
) -> None:
    steady = ["--model.schedule", "constant", "--model.warmup_fraction", "0", "--trainer.max_epochs", "-1"]
    last = 2 * BATCHES + 1
    assert command(*UNLOGGED, *steady, "--trainer.max_steps", last).code == 0
    assert command(*UNLOGGED, *steady, "--trainer.max_steps", BATCHES + 1).code == 0
    assert command(*UNLOGGED, "--resume", "runs/x/1", "--trainer.max_steps", last).code == 0
    assert len(steps) == 2 * last
    assert ended("x/0")["global_step"] == ended("x/1")["global_step"] == last
    assert same(ended("x/0")["state_dict"], ended("x/1")["state_dict"])


def test_a_run_that_was_killed_in_its_test_is_tested_with_the_figures_of_its_last_validation(
    command: Callable,
    steps: list[Step],  # noqa: F811
) -> None:
    steady = ["--model.schedule", "constant", "--model.warmup_fraction", "0", "--trainer.max_epochs", "-1"]
    within, whole = BATCHES + 1, 2 * BATCHES
    validated = ["--trainer.check_val_every_n_epoch", "null", "--trainer.val_check_interval", within]
    assert command(*UNLOGGED, *steady, *validated, "--trainer.max_steps", within).code == 0
    written = Path("runs/x/0/metrics.json").read_text()
    assert "val/accuracy" in written
    Path("runs/x/0/metrics.json").unlink()
    assert command(*UNLOGGED, "--resume", "runs/x/0").code == 0
    assert Path("runs/x/0/metrics.json").read_text() == written
    assert command(*UNLOGGED, "--resume", "runs/x/0", "--trainer.max_steps", whole).code == 0
    assert command(*UNLOGGED, *steady, *validated, "--trainer.max_steps", whole).code == 0
    assert len(steps) == 2 * whole
    assert same(ended("x/0")["state_dict"], ended("x/1")["state_dict"])


def test_a_scheduler_may_watch_a_metric_or_go_by_steps(command: Callable, steps: list[Step]) -> None:  # noqa: F811
    plateau = "{scheduler: ReduceLROnPlateau, monitor: val/loss, patience: 0, threshold: 100, factor: 0.1}"
    assert command(*UNLOGGED, "--model.schedule", plateau).code == 0
    assert [step.rates[0] for step in steps[::BATCHES]] == pytest.approx([2e-3, 2e-4, 2e-5, 2e-6])
    steps.clear()
    assert command(*UNLOGGED, "--model.schedule", "{scheduler: ExponentialLR, gamma: 0.9, interval: step}").code == 0
    assert [step.rates[0] for step in steps] == pytest.approx([2e-3 * 0.9**step for step in range(STEPS)])


def test_each_block_has_the_rate_of_the_next_one_times_the_decay(command: Callable, steps: list[Step]) -> None:  # noqa: F811
    deep = ["--model.encoder.depth", "3", "--model.layer_decay", "0.5", "--trainer.max_epochs", "1"]
    assert command(*UNLOGGED, *deep, "--model.schedule", "constant", "--model.warmup_fraction", "0").code == 0
    groups = ended("x/0")["optimizer_states"][0]["param_groups"]
    names = [name for name, weight in steps[0].weights.items()]
    torch_model = Classifier.load_from_checkpoint("runs/x/0/last.ckpt")
    sizes = {name: weight.numel() for name, weight in torch_model.named_parameters()}
    # the embedding lies below block 0, the head above block 2 with the norm behind it
    wanted = {
        "patch_embed": 1 / 16,
        "pos_embed": 1 / 16,
        "blocks.0": 1 / 8,
        "blocks.1": 1 / 4,
        "blocks.2": 1 / 2,
        "norm.": 1 / 2,
        "fc_norm": 1 / 2,
    }
    counted: dict[float, int] = {}
    for name in names:
        scale = next((value for part, value in wanted.items() if f".{part}" in name), 1.0)
        rate = round(2e-3 * scale, 9)
        counted[rate] = counted.get(rate, 0) + sizes[name]
    by_rate: dict[float, int] = {}
    moments = ended("x/0")["optimizer_states"][0]["state"]
    for group in groups:
        size = sum(moments[index]["exp_avg"].numel() for index in group["params"])
        rate = round(group["lr"], 9)
        by_rate[rate] = by_rate.get(rate, 0) + size
    assert by_rate == counted


def test_linear_probing_trains_the_head_alone_on_the_features_of_an_evaluation(
    command: Callable,
    steps: list[Step],  # noqa: F811
) -> None:
    assert command(*UNLOGGED).code == 0
    steps.clear()
    dropout = ["--model.encoder.dropout", "0.5", "--model.encoder.drop_path", "0.5"]
    probe = ["--model.init_from", "runs/x/0/last.ckpt", "--model.freeze", "encoder", *dropout]
    assert command(*UNLOGGED, *probe, "--experiment", "y").code == 0
    before, after = ended("x/0")["state_dict"], ended("y/0")["state_dict"]
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}
    model = Classifier.load_from_checkpoint("runs/y/0/last.ckpt").train()
    images = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(model(images), model(images)) and not model.encoder.training and model.head.training


def test_the_first_blocks_may_be_frozen_and_a_resumed_training_keeps_them_so(command: Callable) -> None:
    flags = ["--model.encoder.depth", "3", "--model.freeze", "2"]
    assert command(*UNLOGGED, *flags, "--trainer.max_epochs", "2").code == 0
    first = ended("x/0")["state_dict"]
    assert command(*UNLOGGED, *flags, "--resume", "runs/x/0", "--trainer.max_epochs", "4").code == 0
    last = ended("x/0")["state_dict"]
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed and all(
        ".blocks.2." in name or ".norm" in name or "fc_norm" in name or "head" in name for name in changed
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.freeze", "2"], "model.freeze: must be encoder, stem, or in 0..1 (the blocks), got 2; choose one"),
        (["--model.layer_decay", "1.5"], "model.layer_decay: must be in 0..1 (0 excluded), got 1.5; 0.75 is usual"),
        (["--model.schedule", "{scheduler: Nothing}"], "model.schedule: must be cosine, constant, linear, step, "),
        (["--model.schedule", "{scheduler: StepLR}"], "model.schedule: must have arguments that StepLR takes, got "),
        (["--model.schedule", "{scheduler: StepLR, step_size: 1, interval: day}"], "model.schedule: must be cosine, "),
        *(
            (["--model.schedule", f"{{scheduler: {scheduler}}}"], f"model.schedule: {said}")
            for scheduler, said in {
                "StepLR, step_size: 0": "must have arguments that StepLR takes, got ",
                "CosineAnnealingLR, T_max: 0, interval: step": "must have arguments that CosineAnnealingLR takes, got ",
                "LRScheduler": "must have arguments that LRScheduler takes, got {'scheduler': 'LRSch",
                "OneCycleLR, max_lr: 1, total_steps: 9, interval: step": "OneCycleLR ends after 9 steps, and the train",
                "OneCycleLR, max_lr: 1, total_steps: 3": "OneCycleLR ends after 3 epochs, and the training has 4; ",
            }.items()
        ),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(command: Callable, flags: list[str], message: str) -> None:
    done = command(*UNLOGGED, *flags)
    assert done.code == 2 and done.err.count("\n") == 1 and message in done.err, done.err


def test_either_mixture_is_drawn_as_often_as_asked() -> None:
    inputs, targets = torch.rand(4, 1, 8, 8), torch.eye(4)
    torch.manual_seed(0)
    both = MixUpOrCutMix(alpha=1.0, cutmix_alpha=1.0, cutmix_share=0.25)
    mixed = [both(inputs, targets)[0] for _ in range(400)]
    copied = sum(torch.isin(each, inputs).all().item() for each in mixed)  # CutMix moves pixels, MixUp averages them
    assert 70 <= copied <= 130
    for share, kind in ((0.0, MixUp), (1.0, CutMix)):
        torch.manual_seed(1)
        found = MixUpOrCutMix(0.4, 0.4, share)(inputs, targets)
        torch.manual_seed(1)
        torch.rand(())  # the draw of the kind
        for one, other in zip(found, kind(0.4)(inputs, targets), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(ArgumentError, match="cutmix_share must be in 0..1"):
        MixUpOrCutMix(cutmix_share=2.0)


def test_a_mixture_of_both_trains_and_sounds_refuse_it(command: Callable) -> None:
    assert command(*UNLOGGED, "--model.mix", "MixUpOrCutMix", "--model.mix.cutmix_alpha", "0.7").code == 0
    done = command("fit", "--config", "audio/vowels", "--model.mix", "MixUpOrCutMix")
    assert done.code == 2 and "model.mix: must suit sounds, got MixUpOrCutMix; use MixUp" in done.err


def test_a_logger_of_the_user_is_added_to_tensorboards(command: Callable) -> None:
    named = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "table", "--trainer.max_epochs", "1"]
    done = command(*FIT, *named)
    assert done.code == 0, done.err
    run = Path("runs/x/0")
    assert list(run.glob("Linformer-k*-seed0/events.out.tfevents.*")) and (run / "config.yaml").is_file()
    (table,) = Path("table").rglob("metrics.csv")
    with open(table, newline="") as file:
        accuracies = [row["val/accuracy"] for row in csv.DictReader(file) if row["val/accuracy"]]
    best = json.loads((run / "metrics.json").read_text())["val/accuracy"]
    assert [float(accuracy) for accuracy in accuracies] == [pytest.approx(best)]


def test_frozen_blocks_of_a_shared_matrix_keep_it() -> None:
    encoder = ImageEncoder((1, 6, 6), Linformer(5, sharing="layerwise"), dim=8, depth=2, heads=2)
    model = Classifier(encoder, 3, freeze=1)
    free = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert not any("project" in name for name in free) and any(".blocks.1." in name for name in free)
