"""Trains with sharded weights on two processes, and with whole ones on the first: python sharded_weights.py FOLDER.

differences.json gets the largest difference between the weights of the two, for every mechanism and some encoders;
mixed.json that in bf16-mixed; started.json that between a model built on the meta device and one that was not, for
every encoder. Sums in another order are other numbers in float32, so the precision is float64 but for bf16-mixed.
"""

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from longseq import Linformer, Verma
from longseq.attention import Linear, Mechanism, Softmax
from longseq.attention.examples import every_mechanism
from longseq.encoders import ASTEncoder, Conv2d, Encoder, ImageEncoder, SpectrogramEncoder, WaveformEncoder
from longseq.training import Classifier
from longseq.training.devices.fully_sharded import shard_weights

SMALL: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 4, "mlp_ratio": 2.0}
SHARED = Linformer(7, sharing="layerwise")


def cases() -> Iterator[tuple[str, Classifier, Any]]:
    """Classifiers with a batch of four inputs."""
    images = torch.randint(256, (4, 1, 4, 6))
    clips = {"waveforms": torch.randn(4, 800), "lengths": torch.tensor([800, 300, 90, 500])}
    for mechanism in every_mechanism():
        if isinstance(mechanism, Verma) and not isinstance(mechanism.projection, Linear):
            continue  # Linformer's cases have every projection
        k = 6 if "Separable" in repr(mechanism) else getattr(mechanism, "k", None)
        if k == 6:
            mechanism = type(mechanism)(6, projection=mechanism.projection)  # type: ignore[call-arg]
        encoder = ImageEncoder((1, 4, 6), mechanism, **SMALL)
        yield repr(mechanism), Classifier(encoder, 3), images
    free = {"positions": "none", "any_length": True, **SMALL}
    encoders: dict[str, Encoder] = {
        "recomputed": ImageEncoder((1, 4, 6), SHARED, checkpointing=True, pool="token", **SMALL),
        "other columns": ImageEncoder((1, 5, 5), Verma(), local=Conv2d(3), **free),
    }
    for name, encoder in encoders.items():
        yield name, Classifier(encoder, 3), images
    yield "pooled", Classifier(ImageEncoder((1, 4, 6), SHARED, **SMALL), 3, pool="attention"), images
    yield "padded", Classifier(SpectrogramEncoder(8000, 0.1, SHARED, num_mels=8, **SMALL), 3), clips


def difference(sharded: torch.nn.Module, whole: torch.nn.Module) -> float:
    ours, theirs = sharded.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    parts = [value.full_tensor() if isinstance(value, DTensor) else value for value in ours.values()]
    return max(float((a - b).abs().max()) for a, b in zip(parts, theirs.values(), strict=True))


def trained_apart(model: Classifier, inputs: Any, mesh: Any, rank: int) -> float:
    """The difference after three steps, as a share of how far the weights have come."""
    with torch.no_grad():
        for weight in model.parameters():  # local mixing starts at zero
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model.encoder.measure([inputs])
    begun, sharded = copy.deepcopy(model), copy.deepcopy(model)
    shard_weights(sharded, mesh)
    assert all(isinstance(weight, DTensor) for weight in sharded.parameters())
    labels = torch.tensor([0, 1, 2, 1])
    own = slice(2 * rank, 2 * rank + 2)
    shares = [(sharded, tree_map(lambda part: part[own], inputs), labels[own])]
    if not rank:
        shares.append((model, inputs, labels))
    for trainee, batch, targets in shares:
        optimizer = torch.optim.SGD(trainee.parameters(), 0.05, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(trainee(batch), targets).backward()
            optimizer.step()
    return difference(sharded, model) / difference(begun, model) if not rank else difference(sharded, model)


def trained_in_bfloat16(mechanism: Mechanism, mesh: Any, rank: int) -> float:
    """The difference after ten steps in bf16-mixed, as a share of how far the weights have come.

    One process computes the same as two do if it takes their shares of a batch one after the other: products in
    bfloat16 round the gradients of each share, and all else is float32.
    """
    begun = Classifier(ImageEncoder((1, 4, 6), mechanism, **SMALL), 3).float()
    images, labels = torch.randint(256, (4, 1, 4, 6)), torch.tensor([0, 1, 2, 1])
    begun.encoder.measure([images])
    whole, sharded = copy.deepcopy(begun), copy.deepcopy(begun)
    shard_weights(sharded, mesh)
    shares = [slice(0, 2), slice(2, 4)]
    for trainee, own in ((sharded, shares[rank : rank + 1]), (whole, shares)):
        optimizer = torch.optim.AdamW(trainee.parameters(), 1e-3)
        for _ in range(10):
            optimizer.zero_grad()
            for share in own:
                with torch.autocast("cpu", torch.bfloat16):
                    scores = trainee(images[share])
                assert scores.dtype == torch.bfloat16
                (cross_entropy(scores.float(), labels[share]) / len(own)).backward()
            optimizer.step()
    return difference(sharded, whole) / difference(begun, whole)


def started_apart(mesh: Any, rank: int) -> dict[str, float]:
    """The differences between models that were built on the meta device and such that were not."""
    ast = {"num_mels": 24, "patch_size": 8, "stride_mels": 6, "stride_frames": 5}
    kinds: list[Callable[[], Encoder]] = [
        lambda: ImageEncoder((1, 4, 6), SHARED, local=Conv2d(3), **SMALL),
        lambda: SpectrogramEncoder(8000, 0.1, SHARED, num_mels=8, **SMALL),
        lambda: WaveformEncoder(8000, 0.004, SHARED, pool="token", **SMALL),
        lambda: ASTEncoder(8000, 0.4, SHARED, dim=16, depth=2, heads=4, **ast),
    ]
    found = {}
    for kind in kinds:
        made = []
        for place in ("cpu", "meta"):
            torch.manual_seed(5)
            with torch.device(place):
                made.append(Classifier(kind(), 3, pool="attention"))
        whole, model = made
        assert model.encoder.mean.is_meta
        if not rank:
            model._draw_weights()
        shard_weights(model, mesh)
        found[type(whole.encoder).__name__] = difference(model, whole)
    return found


def run(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    differences = {name: trained_apart(model, inputs, mesh, rank) for name, model, inputs in cases()}
    mixed = {repr(mechanism): trained_in_bfloat16(mechanism, mesh, rank) for mechanism in (SHARED, Verma(), Softmax())}
    started = started_apart(mesh, rank)
    if not rank:
        (folder / "differences.json").write_text(json.dumps(differences))
        (folder / "mixed.json").write_text(json.dumps(mixed))
        (folder / "started.json").write_text(json.dumps(started))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    child = os.fork()
    run(int(child == 0), folder)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
