"""The command ``embed``: runs files of sounds or images through a frozen network, and writes its tokens."""

import importlib
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

import longseq
from longseq.cli.errors import UserError
from longseq.cli.names import shown
from longseq.cli.predict.input_files import files_of
from longseq.deploy.trained import Trained
from longseq.files.description import build
from longseq.files.storage import replacing, sha256_of

_SUFFIX = ".safetensors"
_BAR = "{desc}: {percentage:3.1f}%|{bar}| {elapsed}<{remaining}"


def embed(network: Any, input: str, out: str, on_error: Literal["raise", "skip"] = "raise") -> None:
    """Run all files below a folder through a frozen network, and write the tokens of each as a .safetensors file.

    The file has the same path in ``out``. It holds features (n, f), and times (n, 2), the start and the end of each
    token in seconds; or for images coords (n, 2), x and y of its centre in pixels. Its metadata say which network and
    which source it is of: a file that is of these already is left as it is, so a command that was stopped goes on.

    Args:
        network: A file (.onnx, .tflite, .pt2, or a checkpoint of longseq), or a class: BirdNET, Timm, Onnx, ...
        input: A folder of sounds or images, or one file. The network decides which of the two.
        out: The folder to write into.
        on_error: What happens if a file cannot be read: "raise" ends the command, "skip" leaves the file out.

    Raises:
        UserError: If there is no file, or a file would replace one of another program.
    """
    network.key = "network"
    data = _reader(network, on_error)
    paths = files_of(input, data.predict_suffixes)
    targets = _targets(paths, Path(input), Path(out).expanduser())
    written, found, tokens, left_out = 0, 0, 0, 0
    with tqdm(total=len(paths), desc="embedding", bar_format=_BAR, delay=2, leave=False, disable=None) as bar:
        for path, target in zip(paths, targets, strict=True):
            before = bar.n
            try:
                facts = _facts(network, path)
                if _is_there(target, facts):
                    found += 1
                else:
                    made = _tokens_of(network, data, path, bar.update)
                    tokens, written = tokens + len(made["features"]), written + 1
                    _write(target, made, facts)
            except Exception as error:
                if on_error != "skip" or getattr(error, "exit_code", None) != 3:  # 3 is broken data
                    raise
                left_out += 1
                print(shown(f"left out: {error}"), file=sys.stderr)
            bar.update(before + 1 - bar.n)
    if left_out == len(paths):
        raise UserError(f"{input}: none of its files can be read; give others", exit_code=3)
    already = f", {found} were there already" if found else ""
    print(shown(f"embedded: {written} files, {tokens} tokens of {network.num_features} features, in {out}{already}"))


# A class of datamodules, which longseq names by its path alone, and the same for longseq's own models.
embed.__annotations__["network"] = importlib.import_module("datamodules").Network | Trained


def _reader(network: Any, on_error: str) -> Any:
    """The data module that reads what the network takes."""
    if network.kind == "sounds":
        seconds = network.window / network.rate_hz
        kind, arguments = "AudioFolder", {"sample_rate_hz": network.rate_hz, "seconds": seconds}
    elif network.kind == "images":
        kind, arguments = "ImageFolder", {"grayscale": network.channels == 1}
    else:
        raise UserError(f"network: takes {network.kind}; embed is for networks of sounds or images")
    arguments |= {"root": ".", "on_error": on_error}
    data = build({"class_path": f"datamodules.{kind}", "init_args": arguments}, pl.LightningDataModule)
    data.network = network
    return data


def _targets(paths: Sequence[str], source: Path, out: Path) -> list[Path]:
    """Where the tokens of each file are written: at its path, with another suffix; of files whose names differ in the
    suffix alone, with both."""
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    below = [Path(path).relative_to(source) if source.is_dir() else Path(Path(path).name) for path in paths]
    counts = Counter(path.with_suffix("") for path in below)
    return [
        out / (path.with_suffix(_SUFFIX) if counts[path.with_suffix("")] == 1 else f"{path}{_SUFFIX}") for path in below
    ]


def _facts(network: Any, path: str) -> dict[str, str]:
    """The metadata of a file of tokens."""
    try:
        source_sha256 = sha256_of(Path(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions", exit_code=3) from error
    facts = {"longseq": longseq.__version__, "network": network.identity, "network_sha256": network.digest}
    facts |= {"source": Path(path).name, "source_sha256": source_sha256}
    return facts if network.token_seconds is None else facts | {"token_seconds": repr(network.token_seconds)}


def _is_there(target: Path, facts: dict[str, str]) -> bool:
    """Whether a file of tokens is of this network and this source.

    Raises:
        UserError: If there is a file that embed has not written.
    """
    if not target.exists():
        return False
    try:
        with safe_open(target, "pt") as file:
            present = file.metadata() or {}
    except (SafetensorError, OSError):
        present = {}
    if "source_sha256" not in present:
        raise UserError(f"out: {target} is not a file of longseq embed; give another folder")
    return all(present.get(name) == facts[name] for name in ("network", "source_sha256"))


def _tokens_of(network: Any, data: Any, path: str, done: Any) -> dict[str, Tensor]:
    """The tensors of a file of tokens.

    Args:
        network: The network.
        data: Reads the file.
        path: The file.
        done: Called with the part of the file that was embedded, from 0 to 1, as often as there is one.
    """
    if network.kind == "images":
        tokens = network(data.read_whole(path))
        return {"features": tokens[:, :-2].contiguous(), "coords": tokens[:, -2:].contiguous()}
    ((_, _, seconds),) = data.parts(path, any_length=True)
    total = network.num_tokens(math.ceil(seconds * network.rate_hz - 1e-6))
    blocks = []
    for tokens in data.token_blocks((path, 0.0, seconds)):
        blocks.append(tokens)
        done(len(tokens) / total)
    features = torch.cat(blocks)
    starts = torch.arange(len(features), dtype=torch.float64) * network.token_seconds
    ends = (starts + network.window / network.rate_hz).clamp(max=seconds)
    return {"features": features, "times": torch.stack([starts, ends], dim=1)}


def _write(target: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as part:
        part.write_bytes(save(tensors, facts))
