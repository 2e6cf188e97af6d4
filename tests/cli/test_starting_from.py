"""Trainings that start from another model: a checkpoint of another length, or a pretrained ViT; and compiled ones."""

from pathlib import Path

import pytest
import timm
import torch
import yaml

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
SHORT = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.fixture
def trained(train_py, tmp_path: Path) -> str:
    """The checkpoint of a short run on 8x8 digits."""
    train_py("fit", "--config", DIGITS, "--experiment", "first", *SHORT)
    return str(tmp_path / "runs/first/0/last.ckpt")


def test_a_training_starts_from_a_checkpoint_of_smaller_images(train_py, trained, tmp_path: Path) -> None:
    stdout = train_py(
        "fit", "--config", DIGITS, "--experiment", "second", "--data.size", "12", "--model.init_from", trained,
        "--model.learning_rate", "1e-9", *SHORT,
    ).stdout  # fmt: skip
    assert f"started from {trained}; tokens 8 x 8 before, 12 x 12 now: position embeddings resampled, projec" in stdout
    before, after = weights(Path(trained)), weights(tmp_path / "runs/second/0/last.ckpt")
    E = "encoder.trunk.blocks.0.attn.project_keys.weight"
    assert after[E].shape == (16, 144)
    torch.testing.assert_close(after[E].sum(1), before[E].sum(1), rtol=1e-3, atol=1e-4)
    for name in ("head.weight", "encoder.trunk.blocks.3.mlp.fc1.weight"):
        torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-6)


def test_the_head_starts_anew_when_the_classes_differ(train_py, trained, tmp_path: Path) -> None:
    checkpoint = torch.load(trained, weights_only=True)
    checkpoint["hyper_parameters"]["class_names"] = [f"was {digit}" for digit in range(10)]
    other = tmp_path / "other.ckpt"
    torch.save(checkpoint, other)
    stdout = train_py("fit", "--config", DIGITS, "--model.init_from", str(other), *SHORT).stdout
    assert "the head starts anew: 10 classes before, 10 now" in stdout


def test_projections_that_the_checkpoint_lacks_start_anew(train_py, trained) -> None:
    stdout = train_py(
        "fit", "--config", DIGITS, "--model.init_from", trained, "--model.encoder.attention.k", "9", *SHORT
    ).stdout
    assert "8 projections start anew: their class or k differs" in stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.init_from", "no/such.ckpt"], "error: no/such.ckpt: no such file"),
        (["--model.init_from", "TRAINED", "--model.encoder.dim", "32"], "must have one shape"),
    ],
)
def test_a_checkpoint_that_cannot_be_started_from_is_one_line(train_py, trained, flags, said) -> None:
    flags = [trained if flag == "TRAINED" else flag for flag in flags]
    result = train_py("fit", "--config", DIGITS, *flags, *SHORT, expect=4)
    last = result.stderr.strip().split("\n")[-1]
    assert last.startswith("error: ") and said in last
    assert "Traceback" not in result.stderr


def test_a_compiled_training_leaves_checkpoints_as_they_are(train_py, trained, tmp_path: Path) -> None:
    train_py("fit", "--config", DIGITS, "--experiment", "compiled", "--model.compile", "true", *SHORT)
    compiled = tmp_path / "runs/compiled/0/last.ckpt"
    plain, ours = weights(Path(trained)), weights(compiled)
    assert list(plain) == list(ours)
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-3, atol=1e-4, msg=name)
    assert torch.load(compiled, weights_only=True)["hyper_parameters"]["compile"] is True


def test_a_pretrained_vit_from_yaml_trains_and_its_checkpoint_is_enough(train_py, tmp_path: Path) -> None:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224")
    torch.save(vit.state_dict(), tmp_path / "vit.pt")
    config = {
        "model": {
            "encoder": {
                "class_path": "TimmEncoder",
                "init_args": {
                    "model": "vit_tiny_patch16_224",
                    "pretrained": str(tmp_path / "vit.pt"),
                    "attention": {
                        "class_path": "Linformer",
                        "init_args": {
                            "k": 3,
                            "projection": {"class_path": "Linear", "init_args": {"start": "singular"}},
                        },
                    },
                },
            }
        },
        "data": {"class_path": "Digits", "init_args": {"size": 32, "batch_size": 8}},
    }
    (tmp_path / "vit.yaml").write_text(yaml.safe_dump(config))
    train_py("fit", "--config", str(tmp_path / "vit.yaml"), "--model.learning_rate", "1e-9", *SHORT)
    (tmp_path / "vit.pt").unlink()
    checkpoint = tmp_path / "runs/vit/0/last.ckpt"
    blocks = "encoder.trunk.blocks.1.mlp.fc1.weight"
    torch.testing.assert_close(weights(checkpoint)[blocks], vit.blocks[1].mlp.fc1.weight, rtol=1e-4, atol=1e-6)
    E = weights(checkpoint)["encoder.trunk.blocks.0.attn.project_keys.weight"]
    torch.testing.assert_close(E @ E.T, torch.eye(3), atol=1e-4, rtol=0)  # singular vectors
    train_py("test", "--ckpt_path", str(checkpoint), "--trainer.limit_test_batches", "1")
