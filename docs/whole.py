"""The main path of longseq in one file, with only torch, from image to logits, loss and step: python docs/whole.py

It is a small vision transformer (arXiv:2010.11929) with a token for each pixel, and with the attention of Linformer
(arXiv:2006.04768) or of Verma (arXiv:2101.10277). The package computes the same, faster: tests/docs/test_whole.py loads
its weights into this file, and compares logits, loss, gradients and trained weights. Weights have the package's names.

b images, n tokens (one for each pixel), k shortened tokens, d width, h heads, c = d / h channels of a head.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def linformer(queries, keys, values, E, F):  # (b, h, n, c) three times, (k, n), (k, n)
    """Softmax attention over k tokens (Linformer, equation 7). Time and memory grow with n k, and not with n^2."""
    keys, values = E @ keys, F @ values  # (b, h, k, c): each of the k tokens is a learned sum over all n
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5  # (b, h, n, k)
    return scores.softmax(-1) @ values  # (b, h, n, c)


def verma(queries, keys, values, E, F):  # (b, h, n, c) three times, (k, n), (k, n)
    """Y = H (L V): two softmaxes, so that the product of H and L, n x k, is never made."""
    scale = queries.shape[-1] ** -0.5
    keys, values = E @ keys, F @ values  # (b, h, k, c)
    H = (queries * scale).softmax(-1)  # (b, h, n, c): over the channels
    L = (keys.mT * scale).softmax(-1)  # (b, h, c, k): over the tokens
    return H @ (L @ values)  # (b, h, n, c)


class Attention(nn.Module):
    def __init__(self, n, d, h, k, formula):
        super().__init__()
        self.h, self.formula = h, formula
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.E = nn.Parameter(torch.randn(k, n) * n**-0.5)  # fan-in: the shortened keys vary as the keys do
        self.F = nn.Parameter(torch.randn(k, n) * n**-0.5)

    def forward(self, x):  # (b, n, d)
        queries, keys, values = self.qkv(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)  # (b, h, n, c) each
        mixed = self.formula(queries, keys, values, self.E, self.F)  # (b, h, n, c)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # (b, n, d)


class Block(nn.Module):
    def __init__(self, n, d, h, k, formula):
        super().__init__()
        self.norm1 = nn.LayerNorm(d, eps=1e-6)
        self.attn = Attention(n, d, h, k, formula)
        self.norm2 = nn.LayerNorm(d, eps=1e-6)
        self.fc1 = nn.Linear(d, 4 * d)
        self.fc2 = nn.Linear(4 * d, d)

    def forward(self, x):  # (b, n, d)
        x = x + self.attn(self.norm1(x))  # tokens see each other
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # each token by itself


class Classifier(nn.Module):
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, shape, num_classes, d=64, depth=4, h=4, k=16, formula=linformer):
        super().__init__()
        channels, height, width = shape
        n = height * width
        self.register_buffer("mean", torch.zeros(channels, 1, 1))  # of the training set, for each channel
        self.register_buffer("std", torch.ones(channels, 1, 1))
        self.patch_embed = nn.Linear(channels, d)
        self.pos_embed = nn.Parameter(torch.randn(1, n, d))  # a pixel means little without its place: deviation 1
        self.blocks = nn.ModuleList(Block(n, d, h, k, formula) for _ in range(depth))
        self.fc_norm = nn.LayerNorm(d, eps=1e-6)
        self.head = nn.Linear(d, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, images):  # (b, channels, height, width), 0 to 255
        pixels = (images - self.mean) / self.std
        x = self.patch_embed(pixels.flatten(2).mT) + self.pos_embed  # (b, n, d)
        for block in self.blocks:
            x = block(x)
        return self.head(self.fc_norm(x.mean(1)))  # (b, classes): the head sees the mean token


def make_optimizer(model, weight_decay=0.05):
    """AdamW, which decays matrices, but no biases, norms and positions."""
    decayed, others = [], []
    for name, weight in model.named_parameters():
        (others if weight.ndim == 1 or name == "pos_embed" else decayed).append(weight)
    return torch.optim.AdamW([{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0}])


def learning_rate(step, num_steps, peak=1e-3, warmup_fraction=0.1):
    """It rises linearly to its peak, then falls along a cosine to 0."""
    num_warmup = max(1, round(num_steps * warmup_fraction))
    if step < num_warmup:
        return peak * (step + 1) / num_warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))


def train_step(model, optimizer, images, labels, rate):
    """One step: the loss of a batch, its gradients, and new weights."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    """Learn whether the left or the right half of a noisy image is brighter."""
    torch.manual_seed(0)
    labels = torch.randint(2, (64,))
    images = torch.randint(128, (64, 3, 8, 8)).float()
    images[labels == 0, :, :, :4] += 64
    images[labels == 1, :, :, 4:] += 64
    model = Classifier((3, 8, 8), num_classes=2)
    model.mean.copy_(images.mean((0, 2, 3))[:, None, None])
    model.std.copy_(images.std((0, 2, 3))[:, None, None])
    optimizer = make_optimizer(model)
    for step in range(20):
        loss = train_step(model, optimizer, images, labels, learning_rate(step, num_steps=20, peak=5e-3))
        print(f"step {step:2d}  loss {loss:.3f}")


if __name__ == "__main__":
    main()
