"""A layer without queries, keys and values can replace attention: it only needs to be a TokenMixer."""

import dataclasses

import pytest
import torch
from small_vit import vit
from torch import nn

from longseq import ImageEncoder, Linformer, Softmax, resize
from longseq.attention import Mechanism, TokenMixer, carry, plug
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample
from longseq.training.optimizer import Optimization


class ConvolutionLayer(TokenMixer):
    """Convolve every channel along the tokens, and gate the result."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
        self.gate = nn.Parameter(torch.ones(1, dim))

    def forward(self, x, attn_mask=None, is_causal=False, num_queries=None):
        if attn_mask is not None:
            x = x.masked_fill(~attn_mask[:, 0, 0, :, None], 0)
        return (self.gate * self.kernel(x.mT).mT)[:, :num_queries]

    def no_weight_decay(self):
        return {"gate"}


@dataclasses.dataclass(frozen=True)
class Convolution(Mechanism):
    @classmethod
    def examples(cls):
        return [cls()]

    def layers(self, stack, grid):
        return [ConvolutionLayer(trained.qkv.in_features) for trained in stack]


def encoder(mechanism: Mechanism, side: int = 8, pool: str = "avg") -> ImageEncoder:
    torch.manual_seed(0)
    return ImageEncoder((1, side, side), mechanism, dim=16, depth=2, heads=2, pool=pool)


def test_it_trains_and_its_flops_are_counted():
    model = Classifier(encoder(Convolution()), 3)
    model.encoder.set_statistics(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    nn.init.normal_(model.head.weight)
    model(torch.randn(2, 1, 8, 8)).square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
    assert 0 < flops_per_sample(model).forward < flops_per_sample(Classifier(encoder(Softmax()), 3)).forward


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_a_shorter_picture_is_encoded_as_if_it_were_alone(pool):
    whole = encoder(Convolution(), pool=pool).double().eval()
    picture = torch.randn(2, 1, 8, 8, dtype=torch.float64)

    def rows(count):
        from longseq.encoders.forward_pass import encode

        return encode(whole.trunk, picture[:, :, :count], torch.tensor([5, 5]))

    torch.testing.assert_close(rows(8), rows(5))


def test_it_is_carried_to_another_size_and_to_and_from_attention():
    trained = encoder(Convolution())
    nn.init.normal_(trained.trunk.blocks[0].attn.gate)
    assert torch.equal(resize(trained, (1, 12, 12)).trunk.blocks[0].attn.gate, trained.trunk.blocks[0].attn.gate)
    fresh = carry(encoder(Linformer(4)).trunk, trained.trunk)
    weights = ("gate", "kernel.weight", "kernel.bias")
    assert sorted(fresh) == sorted(f"blocks.{depth}.attn.{name}" for depth in (0, 1) for name in weights)
    fresh = carry(trained.trunk, encoder(Linformer(4)).trunk)
    assert {"blocks.0.attn.qkv.weight", "blocks.1.attn.proj.bias", "blocks.1.attn.project_keys"} <= set(fresh)


def test_a_weight_of_another_shape_is_named():
    trained, new = encoder(Convolution()).trunk, encoder(Convolution()).trunk
    new.blocks[1].attn.gate = nn.Parameter(torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"^blocks\.1\.attn\.gate must have one shape, got \(1, 16\) in the trained"):
        carry(trained, new)


def test_what_it_names_is_not_decayed():
    model = Classifier(encoder(Convolution()), 3)
    groups = Optimization(weight_decay=0.1).make_optimizer(model).param_groups
    decayed = {id(weight) for group in groups if group["weight_decay"] for weight in group["params"]}
    layer = model.encoder.trunk.blocks[0].attn
    assert id(layer.gate) not in decayed
    assert id(layer.kernel.weight) in decayed


def test_attention_is_not_plugged_over_a_layer_that_has_no_queries():
    with pytest.raises(ValueError, match=r"block 0 \(Block\) holds ConvolutionLayer; choose a plain, new ViT"):
        plug(plug(vit(), Convolution()), Softmax())
