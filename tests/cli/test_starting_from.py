"""Trainings that start from another model: a checkpoint of another length, or a pretrained ViT; and compiled ones."""

from pathlib import Path

import forked
import pytest
import timm
import torch
import yaml

from longseq.attention.grid import TokenGrid
from longseq.encoders.positions import sincos

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
SHORT = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint of a short run on 8x8 digits."""
    folder = tmp_path_factory.mktemp("first")
    command = [ROOT / "train.py", "fit", "--config", DIGITS, *SHORT]
    forked.run(*command, cwd=folder).check_returncode()
    return str(folder / "runs/digits/0/last.ckpt")


def test_a_training_starts_from_a_checkpoint_of_smaller_images(command, trained, tmp_path: Path) -> None:
    done = command(
        "fit", "--config", DIGITS, "--experiment", "second", "--data.size", "12", "--model.init_from", trained,
        "--model.learning_rate", "1e-9", *SHORT,
    )  # fmt: skip
    assert (
        f"started from {trained}; tokens 8 x 8 before, 12 x 12 now: position embeddings resampled, projec" in done.out
    )
    before, after = weights(Path(trained)), weights(tmp_path / "runs/second/0/last.ckpt")
    E = "encoder.trunk.blocks.0.attn.project_keys.weight"
    assert after[E].shape == (16, 144)
    torch.testing.assert_close(after[E].sum(1), before[E].sum(1), rtol=1e-3, atol=1e-4)
    for name in ("head.weight", "encoder.trunk.blocks.3.mlp.fc1.weight"):
        torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-6)


def test_the_head_starts_anew_when_the_classes_differ(command, trained, tmp_path: Path) -> None:
    checkpoint = torch.load(trained, weights_only=True)
    checkpoint["hyper_parameters"]["class_names"] = [f"was {digit}" for digit in range(10)]
    other = tmp_path / "other.ckpt"
    torch.save(checkpoint, other)
    done = command("fit", "--config", DIGITS, "--model.init_from", other, *SHORT)
    assert "the head gets new weights: 10 classes before, 10 now, such as was 0 and 0" in done.out


def test_projections_that_the_checkpoint_lacks_start_anew(command, trained) -> None:
    done = command("fit", "--config", DIGITS, "--model.init_from", trained, "--model.encoder.attention.k", "9", *SHORT)
    assert "new weights, because the checkpoint has none like them: 8" in done.out


def test_trained_weights_that_the_model_has_no_place_for_are_said(command, trained) -> None:
    done = command("fit", "--config", DIGITS, "--model.init_from", trained, "--model.encoder.positions", "none", *SHORT)
    assert done.code == 0, done.err
    assert "left behind, because this model has none like them: 1, such as pos_embed" in done.out


def test_fixed_positions_stay_as_they_are(command, trained, tmp_path: Path) -> None:
    fixed = ["--model.encoder.positions", "sincos"]
    done = command("fit", "--config", DIGITS, *SHORT, *fixed, "--model.init_from", trained)
    assert done.code == 0, done.err
    found = weights(tmp_path / "runs/digits/0/last.ckpt")["encoder.trunk.pos_embed"]
    assert torch.equal(found, sincos(TokenGrid((8, 8), 0), found.shape[-1]))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.init_from", "TRAINED", "--model.encoder.pool", "token"], "pool must be that of the trained model"),
        (["--model.init_from", "no/such.ckpt"], "error: no/such.ckpt: no such file"),
        (["--model.init_from", "TRAINED", "--model.encoder.dim", "32"], "must have one shape"),
    ],
)
def test_a_checkpoint_that_cannot_be_started_from_is_one_line(command, trained, flags, said) -> None:
    flags = [trained if flag == "TRAINED" else flag for flag in flags]
    done = command("fit", "--config", DIGITS, *flags, *SHORT)
    assert done.code == 4
    assert done.error.startswith("error: ") and said in done.error


@pytest.mark.thorough
def test_a_compiled_training_leaves_checkpoints_as_they_are(train_py, tmp_path: Path) -> None:
    """The model has one block and is not evaluated, because every graph takes ten seconds to compile."""
    small = ["--model.encoder.depth", "1", "--model.encoder.dim", "8", "--trainer.max_steps", "2"]
    small += ["--trainer.limit_val_batches", "0", "--trainer.limit_test_batches", "0"]
    for name in ("plain", "compiled"):
        train_py("fit", "--config", DIGITS, "--experiment", name, *small, "--model.compile", str(name == "compiled"))
    plain, compiled = (tmp_path / f"runs/{name}/0/last.ckpt" for name in ("plain", "compiled"))
    expected, found = weights(plain), weights(compiled)
    assert list(found) == list(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)
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
    torch.testing.assert_close(E @ E.T, torch.eye(3), atol=1e-4, rtol=0)  # the rows of E are singular vectors
    train_py("test", "--ckpt_path", str(checkpoint), "--trainer.limit_test_batches", "1")
