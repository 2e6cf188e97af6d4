"""Encodes with tokens on several processes, and writes what each finds: python shared_by_processes.py SIZE FOLDER."""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longseq.arguments import SettingError
from longseq.attention import (
    Conv,
    Dynamic,
    EfficientAttention,
    Gaussian,
    Linear,
    Linformer,
    Max,
    Mean,
    NoAttention,
    Separable,
    Verma,
)
from longseq.attention.mechanism import Mechanism
from longseq.attention.shard import Split
from longseq.encoders import Conv1d, Conv2d, Encoder, ImageEncoder, SpectrogramEncoder, WaveformEncoder
from longseq.encoders.sharding import Sharding
from longseq.tasks import Masked
from longseq.tasks.pooling import make_pooling
from longseq.training import Classifier

SMALL: dict[str, Any] = {"dim": 8, "depth": 2, "heads": 2}
MECHANISMS: dict[str, Mechanism] = {
    "linformer": Linformer(6),
    "linformer none": Linformer(6, sharing="none"),
    "linformer ragged": Linformer([[6, 3], [4, 2]], sharing="none"),
    "linformer by layer": Linformer([6, 3]),
    "linformer headwise": Linformer(6, sharing="headwise"),
    "linformer layerwise": Linformer(6, sharing="layerwise"),
    "separable": Linformer(6, projection=Separable()),
    "separable none": Linformer(6, sharing="none", projection=Separable()),
    "dynamic": Linformer(6, projection=Dynamic(length_scaling=1.0)),
    "dynamic none norm": Linformer(6, sharing="none", projection=Dynamic(norm=True)),
    "gaussian": Linformer(6, projection=Gaussian()),
    "mean": Linformer(6, projection=Mean()),
    "max": Linformer(6, projection=Max()),
    "conv": Linformer(6, projection=Conv()),
    "verma max none": Verma(6, sharing="none", projection=Max()),
    "verma": Verma(),
    "verma scaled": Verma(length_scaling=1.5),
    "verma k": Verma(6, projection=Linear("mean")),
    "verma k by layer": Verma([6, 3]),
    "verma k headwise": Verma(6, sharing="headwise"),
    "verma k layerwise": Verma(6, sharing="layerwise"),
    "verma k none": Verma(6, sharing="none"),
    "verma k ragged": Verma([[6, 3], [4, 2]], sharing="none"),
    "verma columns": Verma(normalize="columns"),
    "verma k columns": Verma(6, normalize="columns"),
    "verma k by scaling": Verma(6, normalize="scaling"),
    "efficient": EfficientAttention(),
    "efficient by scaling": EfficientAttention("scaling"),
    "none": NoAttention(),
}


class Pooled(nn.Module):
    """An encoder whose tokens are scored, and their scores pooled."""

    def __init__(self, encoder: Encoder, pool: Any) -> None:
        super().__init__()
        pooling = make_pooling(pool, encoder.dim)
        assert pooling is not None
        self.encoder, self.head, self.pooling = encoder, nn.Linear(encoder.dim, 3), pooling

    def forward(self, inputs: Any) -> Tensor:
        tokens, present = self.encoder.token_features(inputs)
        return self.pooling(tokens, self.head(tokens), present)

    def measure(self, batches: list[Any]) -> None:
        self.encoder.measure(batches)


class Masking(nn.Module):
    """Hidden tokens are rebuilt: the loss of the batch, and that of each sample."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder, self.task = encoder, Masked(0.4, span=3)
        self.head, self.metric = self.task.head(encoder, 3), self.task.own_metrics(3)["l1"]

    def forward(self, inputs: Any) -> Tensor:
        torch.manual_seed(0)  # what is hidden is drawn
        outputs = self.task.outputs(self.encoder, self.head, inputs)
        losses = self.task.losses(outputs, outputs)
        loss = self.task.loss(outputs, outputs, losses, 0.0)
        self.metric.update(outputs.detach(), outputs)
        mean: Any = self.metric.total / self.metric.num_samples  # compute() would sum over processes once more
        assert abs(mean - loss) < 1e-5  # it counts in float32
        return torch.cat([loss[None], losses])

    def measure(self, batches: list[Any]) -> None:
        self.encoder.measure(batches)


def cases() -> dict[str, tuple[Any, Any]]:
    """Encoders in float64, with inputs whose rows cannot be divided equally; the same in every process."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (3, 1, 7, 5))
    lengths = torch.tensor([2000, 1100, 90])
    clips = {"waveforms": torch.randn(3, 2000, dtype=torch.float64), "lengths": lengths}
    made: dict[str, tuple[Any, Any]] = {}
    for name, mechanism in MECHANISMS.items():
        pool = "token" if mechanism.mixes_tokens else "avg"
        made[f"{name} image"] = ImageEncoder((1, 7, 5), mechanism, pool=pool, local=Conv2d(3), **SMALL), images
        made[f"{name} sound"] = SpectrogramEncoder(8000, 0.3, mechanism, num_mels=12, local=Conv1d(5), **SMALL), clips
    made["patches of sound"] = SpectrogramEncoder(8000, 0.3, Verma(), num_mels=16, tokens=[8, 3], **SMALL), clips
    free = {"positions": "none", "any_length": True, **SMALL}
    made["any length"] = SpectrogramEncoder(8000, 1.0, Verma(length_scaling=1.0), num_mels=12, **free), clips
    made["any size"] = ImageEncoder((1, 9, 9), Verma(), local=Conv2d(3), **free), images
    made["waveforms"] = WaveformEncoder(8000, 0.3, Linformer(6), patch_size=50, **SMALL), clips
    made["recomputed"] = ImageEncoder((1, 7, 5), Linformer(6), checkpointing=True, **SMALL), images
    for pool in ("avg", "max", "linear_softmax", "attention"):
        made[f"pool {pool} image"] = Pooled(ImageEncoder((1, 7, 5), Linformer(6), pool="token", **SMALL), pool), images
        made[f"pool {pool} sound"] = Pooled(SpectrogramEncoder(8000, 0.3, Verma(), num_mels=12, **SMALL), pool), clips
    made["gated image"] = ImageEncoder((1, 7, 5), Linformer(6), pool="gated", **SMALL), images
    made["gated sound"] = SpectrogramEncoder(8000, 0.3, Verma(), num_mels=12, pool="gated", **SMALL), clips
    made["masked image"] = Masking(ImageEncoder((1, 7, 5), Linformer(6), pool="token", **SMALL)), images
    made["masked sound"] = Masking(SpectrogramEncoder(8000, 0.3, Verma(), num_mels=12, **SMALL)), clips
    made["masked any length"] = Masking(SpectrogramEncoder(8000, 1.0, Verma(), num_mels=12, **free)), clips
    made["masked patches"] = (
        Masking(SpectrogramEncoder(8000, 0.3, Verma(), num_mels=16, tokens=[8, 3], **SMALL)),
        clips,
    )
    for encoder, inputs in made.values():
        encoder.double()
        for parameter in encoder.parameters():  # local mixing starts at zero
            nn.init.normal_(parameter, std=0.3)
        encoder.measure([inputs])
    return made


def loss_of(features: Tensor) -> Tensor:
    return (features * torch.arange(features.numel()).view(features.shape)).sum()


def mixed_features(group: Any) -> dict[str, Tensor]:
    """Features and a gradient in bf16-mixed; of one process without a group."""
    outcomes = {}
    for mechanism in (MECHANISMS["linformer"], MECHANISMS["verma"]):
        torch.manual_seed(0)
        encoder = ImageEncoder((1, 7, 5), mechanism, local=Conv2d(3), checkpointing=True, **SMALL)
        images = torch.randint(0, 256, (3, 1, 7, 5))
        encoder.measure([images])
        if group is not None:
            Sharding(encoder, group)
        with torch.autocast("cpu", torch.bfloat16):
            features = encoder(images)
        loss_of(features.float()).backward()
        gradient = encoder.trunk.blocks[0].attn.qkv.weight.grad  # type: ignore[union-attr]
        if group is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size(group)
        outcomes |= {f"{mechanism} features": features.detach().float(), f"{mechanism} gradient": gradient}
    return outcomes


def of_many_tokens(group: Any) -> dict[str, Tensor]:
    """Features in 16-mixed of more tokens than float16 can count; of one process without a group."""
    outcomes = {}
    for name in ("verma", "dynamic", "efficient by scaling"):
        torch.manual_seed(0)
        encoder = ImageEncoder((1, 360, 400), MECHANISMS[name], dim=8, depth=1, heads=2, positions="none").eval()
        for parameter in encoder.parameters():
            nn.init.normal_(parameter, std=0.1)
        images = torch.randint(0, 256, (1, 1, 360, 400))
        encoder.measure([images])
        if group is not None:
            Sharding(encoder, group)
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            outcomes[name] = encoder(images).float()
    return outcomes


def bytes_of_a_step(height: int, group: Any) -> int:
    """How many bytes of collectives a forward and a backward pass of a process send."""
    sent: list[int] = []
    collect, exchange = dist.all_reduce, dist.batch_isend_irecv

    def counted(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(values.nbytes)
        return collect(values, *args, **kwargs)

    def counted_exchange(requests: list[Any]) -> Any:
        sent.extend(request.tensor.nbytes for request in requests if request.op is dist.isend)
        return exchange(requests)

    encoder = ImageEncoder((1, height, 4), Linformer(6, projection=Separable()), local=Conv2d(3), **SMALL)
    image = torch.zeros(1, 1, height, 4)
    encoder.measure([torch.rand(4, 1, height, 4) * 255])
    Sharding(encoder, group)
    dist.all_reduce, dist.batch_isend_irecv = counted, counted_exchange
    try:
        encoder(image).sum().backward()
    finally:
        dist.all_reduce, dist.batch_isend_irecv = collect, exchange
    return sum(sent)


def run(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    results = {}
    made = cases()
    whole = copy.deepcopy(made["linformer image"][0])
    for name, (encoder, inputs) in made.items():
        sharding = Sharding(getattr(encoder, "encoder", encoder), dist.group.WORLD)
        for part in encoder.modules():
            if isinstance(part, Split):
                part.shard = sharding.shard
        if isinstance(encoder, Masking):
            encoder.task.shard = sharding.shard
        features = encoder(inputs)
        loss_of(features).backward()
        gradients = {
            weight: parameter.grad.clone() for weight, parameter in encoder.named_parameters(remove_duplicate=False)
        }
        ours = set(sharding.names(encoder))
        common = [gradient for weight, gradient in gradients.items() if weight not in ours]
        sums = nn.utils.parameters_to_vector(common)  # one message and not one for each weight
        dist.all_reduce(sums)
        nn.utils.vector_to_parameters(sums, common)
        gradients = {
            weight: (sharding.whole(gradient) if weight in ours else gradient) / size
            for weight, gradient in gradients.items()
        }
        results[name] = {"features": features.detach(), "gradients": gradients}
        if name == "linformer image":
            held = sum(weight.numel() for weight in sharding.weights)
            results[name] |= {"held": held, "state": sharding.whole_state(encoder)}
    results["refused"] = []
    model = Classifier(whole.float(), 3).eval()
    images = torch.zeros(1, 1, 7, 5)
    Sharding(model.encoder, dist.group.WORLD)
    for asked in (model.scores, lambda inputs: model.predict_step(inputs, 0, scores=True)):
        try:
            asked(images)
        except SettingError as error:
            results["refused"].append(str(error))
    results["bytes"] = [bytes_of_a_step(height, dist.group.WORLD) for height in (8, 80)]
    results["mixed"] = mixed_features(dist.group.WORLD)
    results["many"] = of_many_tokens(dist.group.WORLD)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    children = []
    for rank in range(1, size):
        child = os.fork()
        if not child:
            run(rank, size, folder)
            os._exit(0)
        children.append(child)
    run(0, size, folder)
    for child in children:
        os.waitpid(child, 0)
