"""Read a checkpoint of transformers' Audio Spectrogram Transformer, without transformers: JSON and safetensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention.plug import token_grid

_QKV = ("query", "key", "value")
_BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


@dataclass(frozen=True)
class ASTConfig:
    """The settings in config.json and preprocessor_config.json, under the names of ASTEncoder's arguments."""

    weights: Path
    num_mels: int
    patch_size: int
    stride_mels: int
    stride_frames: int
    max_frames: int
    dim: int
    depth: int
    heads: int
    mlp_ratio: float
    sample_rate_hz: int
    mean: float
    std: float


def read_config(pretrained: str) -> ASTConfig:
    """Read the sizes of a checkpoint.

    Args:
        pretrained: Its folder, or its safetensors file.

    Raises:
        ValueError: If there is none, or it is of another model.
    """
    path = Path(pretrained)
    weights = path / "model.safetensors" if path.is_dir() else path
    if not weights.is_file():
        raise _refusal(f"got {str(weights)!r}: no such file; save the model with transformers' save_pretrained")
    if weights.suffix != ".safetensors":
        raise _refusal(f"got {pretrained!r}: pickled weights may run code; save them with save_pretrained")
    config = _read_json(weights.with_name("config.json"))
    if config.get("model_type") != "audio-spectrogram-transformer":
        raise _refusal(f"got a {config.get('model_type')!r} in {pretrained!r}; give another, or another encoder")
    usual = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    for name, value in usual.items():
        if config.get(name, value) != value:
            raise _refusal(f"got {name} {config[name]!r} in {pretrained!r}; only {value!r} is supported")
    features = weights.with_name("preprocessor_config.json")
    of_features = _read_json(features) if features.is_file() else {}
    try:
        return ASTConfig(
            weights=weights,
            num_mels=int(config.get("num_mel_bins", 128)),
            patch_size=int(config.get("patch_size", 16)),
            stride_mels=int(config.get("frequency_stride", 10)),
            stride_frames=int(config.get("time_stride", 10)),
            max_frames=int(config.get("max_length", 1024)),
            dim=int(config.get("hidden_size", 768)),
            depth=int(config.get("num_hidden_layers", 12)),
            heads=int(config.get("num_attention_heads", 12)),
            mlp_ratio=config.get("intermediate_size", 3072) / config.get("hidden_size", 768),
            sample_rate_hz=int(of_features.get("sampling_rate", 16000)),
            mean=float(of_features.get("mean", -4.2677393)),
            std=float(of_features.get("std", 4.5689974)),
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise _refusal(f"got sizes in {str(weights.with_name('config.json'))!r} that are none ({error})") from error


def read_weights(config: ASTConfig, trunk: nn.Module) -> dict[str, Tensor]:
    """The weights of a checkpoint under timm's names, for a trunk whose tokens are in the order of time.

    Raises:
        ValueError: If the file cannot be read, lacks a weight, or has one of another shape.
    """
    try:
        theirs = load_file(config.weights)
    except (SafetensorError, OSError) as error:
        raise _refusal(f"got {str(config.weights)!r}, which cannot be read ({error}); copy it again") from error
    theirs = {name.removeprefix("audio_spectrogram_transformer."): weight.float() for name, weight in theirs.items()}
    mels, frames = (
        (length - config.patch_size) // stride + 1
        for length, stride in ((config.num_mels, config.stride_mels), (config.max_frames, config.stride_frames))
    )
    try:
        positions = theirs["embeddings.position_embeddings"]
        expected = (1, 2 + mels * frames, config.dim)
        if tuple(positions.shape) != expected:
            raise _refusal(f"got position_embeddings of {tuple(positions.shape)}, but config.json says {expected}")
        ours = {
            "cls_token": theirs["embeddings.cls_token"],
            "reg_token": theirs["embeddings.distillation_token"],
            "pos_embed": _in_time(positions, mels, frames, token_grid(trunk).size[0]),  # type: ignore[arg-type]
            "patch_embed.proj.weight": theirs["embeddings.patch_embeddings.projection.weight"].mT,
            "patch_embed.proj.bias": theirs["embeddings.patch_embeddings.projection.bias"],
        }
        for kind in ("weight", "bias"):
            ours[f"norm.{kind}"] = theirs[f"layernorm.{kind}"]
            fresh = trunk.get_parameter(f"fc_norm.{kind}")  # a model without a classifier has none
            ours[f"fc_norm.{kind}"] = theirs.get(f"classifier.layernorm.{kind}", fresh)
        for depth in range(config.depth):
            block, name = f"blocks.{depth}", f"encoder.layer.{depth}"
            for kind in ("weight", "bias"):
                ours |= {f"{block}.{part}.{kind}": theirs[f"{name}.{named}.{kind}"] for part, named in _BLOCK.items()}
            attention = f"{name}.attention.attention"
            matrices = [theirs[f"{attention}.{part}.weight"] for part in _QKV]
            biases = [theirs.get(f"{attention}.{part}.bias", matrices[0].new_zeros(config.dim)) for part in _QKV]
            ours |= {f"{block}.attn.qkv.weight": torch.cat(matrices), f"{block}.attn.qkv.bias": torch.cat(biases)}
    except KeyError as error:
        raise _refusal(f"got {str(config.weights)!r}, which lacks {error.args[0]}; give that of an AST") from error
    for name, weight in trunk.state_dict().items():
        if ours[name].shape != weight.shape:
            shapes = f"{tuple(ours[name].shape)}, but config.json says {tuple(weight.shape)}"
            raise _refusal(f"got {name} of {shapes}; give the config.json that was saved with it")
    return ours


def _in_time(positions: Tensor, mels: int, frames: int, rows: int) -> Tensor:
    """Position embeddings in the order of frames: those of the first rows, or resampled if there are too few."""
    prefix, grid = positions[:, :2], positions[:, 2:].unflatten(1, (mels, frames)).transpose(1, 2)
    in_time = torch.cat([prefix, grid[:, :rows].flatten(1, 2)], dim=1)
    return in_time if rows <= frames else resample_abs_pos_embed(in_time, [rows, mels], [frames, mels], 2)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _refusal(f"got {str(path)!r}, which cannot be read ({error}); it must be next to the weights") from error
    if not isinstance(content, dict):
        raise _refusal(f"got {str(path)!r}, which has no settings; it must be next to the weights")
    return content


def _refusal(what: str) -> ArgumentError:
    return ArgumentError("pretrained", f"must be a checkpoint of transformers' AST, {what}")
