"""Measure what pretrained models keep of their accuracy with another attention.

    python docs/pretrained_accuracy.py MODEL --root DIR

MODEL is a small model that timm (vit, eva02, dinov3; MNIST, 49 patches) or transformers (ast; spoken digits, 108
patches) makes and that is trained here with its own exact attention, seed by seed. AST goes through save_pretrained, as
a checkpoint from elsewhere. The table says how accurate the model is with another attention at once, and after some
fine-tuning.
"""

import copy
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterable
from statistics import mean
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from datamodules import FSDD, MNIST
from longseq import ASTEncoder, Dynamic, Linear, Linformer, Mean, Mechanism, Softmax, Verma, plug
from longseq.reports.plots import markdown

WIDTH, DEPTH, HEADS = 64, 4, 4
IMAGES = {"vit": "vit_tiny_patch16_224", "eva02": "eva02_tiny_patch14_224", "dinov3": "vit_small_patch16_dinov3"}
Batches = list[tuple[Any, torch.Tensor]]


def train(model: nn.Module, batches: Batches, epochs: int, learning_rate: float) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.03)
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=0.1)
    model.train()
    for _ in range(epochs):
        for number in torch.randperm(len(batches)).tolist():
            inputs, labels = batches[number]
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    right = [model.eval()(inputs).argmax(1) == labels for inputs, labels in batches]
    return torch.cat(right).float().mean().item()


def attentions(k: int) -> dict[str, Mechanism]:
    return {
        "Softmax": Softmax(),
        f"Linformer, k = {k}, E starts as means": Linformer(k, projection=Linear("mean")),
        f"Linformer, k = {k}, E starts random": Linformer(k),
        f"Linformer, k = {k}, Mean": Linformer(k, projection=Mean()),
        f"Linformer, k = {k}, Dynamic": Linformer(k, projection=Dynamic()),
        "Verma without E": Verma(),
        f"Verma, k = {k}, E starts as means": Verma(k, projection=Linear("mean")),
    }


class Logits(nn.Module):
    """A model of transformers as one that gives logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs).logits


def images(name: str, root: str, epochs: int, rate: float) -> tuple[Any, Batches, Batches]:
    data = MNIST(root, batch_size=64)
    data.setup()
    train_set, test_set = (
        [((inputs.float() - 33) / 79, labels) for inputs, labels in loader]
        for loader in (data.train_dataloader(), data.test_dataloader())
    )
    train_set = train_set[:300]  # 19,200 images
    vit = timm.create_model(
        IMAGES[name], img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=WIDTH, depth=DEPTH,
        num_heads=HEADS,
    )  # fmt: skip
    exact = train(vit, train_set, epochs, rate)
    return lambda mechanism: plug(copy.deepcopy(exact), mechanism), train_set, test_set


def sounds(fills: bool, root: str, epochs: int, rate: float) -> tuple[Any, Batches, Batches]:
    from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification

    data = FSDD(root, sample_rate_hz=16000, batch_size=32)
    data.setup()
    raw_train, raw_test = (list(loader) for loader in (data.train_dataloader(), data.test_dataloader()))
    extract = ASTFeatureExtractor(max_length=100)

    def theirs(batches: Iterable[tuple[Any, torch.Tensor]]) -> Batches:
        extracted = []
        for inputs, labels in batches:
            clips = [clip[:length].numpy() for clip, length in zip(*inputs.values(), strict=True)]
            extracted.append((extract(clips, sampling_rate=16000, return_tensors="pt")["input_values"], labels))
        return extracted

    config = ASTConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        max_length=100, num_labels=10, initializer_range=WIDTH**-0.5,
    )  # fmt: skip
    model = ASTForAudioClassification(config)
    train(Logits(model), theirs(raw_train), epochs, rate)

    def plugged(mechanism: Mechanism) -> nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            extract.save_pretrained(folder)
            encoder = ASTEncoder(16000, 1.0, mechanism, pretrained=folder, fills=fills)
        return nn.Sequential(encoder, copy.deepcopy(model.classifier.dense))

    print(f"with transformers: {accuracy(Logits(model), theirs(raw_test)):.4f}", flush=True)
    return plugged, raw_train, raw_test


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=[*IMAGES, "ast"])
    parser.add_argument("--root", required=True, help="where the data is")
    parser.add_argument("--fills", action="store_true", help="AST hears what fills a clip, as with transformers")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--more", type=int, default=1, help="epochs of fine-tuning")
    parser.add_argument("--more_rate", type=float, help="learning rate of the fine-tuning; a quarter of the other")
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    accuracies: dict[str, list[tuple[float, float]]] = {}
    for seed in range(asked.seeds):
        torch.manual_seed(seed)
        how = asked.root, asked.epochs, asked.learning_rate
        made = sounds(asked.fills, *how) if asked.model == "ast" else images(asked.model, *how)
        plugged, train_set, test_set = made
        for name, mechanism in attentions(k=27 if asked.model == "ast" else 12).items():
            torch.manual_seed(seed)
            model = plugged(mechanism)
            before = accuracy(model, test_set)
            train(model, train_set, asked.more, asked.more_rate or asked.learning_rate / 4)
            accuracies.setdefault(name, []).append((before, accuracy(model, test_set)))
            print(seed, name, accuracies[name][-1], flush=True)
    rows = [[name, *(f"{mean(own):.3f}" for own in zip(*pairs, strict=True))] for name, pairs in accuracies.items()]
    print("\n" + markdown([asked.model, "at once", "after fine-tuning"], rows), end="")


if __name__ == "__main__":
    main()
