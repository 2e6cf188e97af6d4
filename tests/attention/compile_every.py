"""Compile a layer of every kind in one graph, and two ViTs; compare with plain gradients; print every layer kind."""

import torch
from small_vit import COMPILED, gradients, model

import longseq.attention.layer
from longseq.attention import Linformer, Verma

PADDED = (torch.arange(65) < torch.tensor([[65], [40]]))[:, None, None]


def gradients_of_layer(layer, mask):
    x = torch.randn(2, 65, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    parameters = dict(layer.named_parameters())
    results = torch.autograd.grad(layer(x, mask)[:, :40].square().sum(), [x, *parameters.values()])
    return dict(zip(["x", *parameters], results, strict=True))


def compare(compiled, expected, what):
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=f"{what}: {name}")


seen = set()  # of classes: one of each is compiled with padding too
for mechanism in COMPILED:
    layer = model(mechanism).train().blocks[1].attn
    masks = (None,) if type(mechanism) in seen else (None, PADDED)
    seen.add(type(mechanism))
    expected = [gradients_of_layer(layer, mask) for mask in masks]
    torch.compiler.reset()
    layer.compile(fullgraph=True, backend="eager")
    for mask, gradients_of_mask in zip(masks, expected, strict=True):
        compare(gradients_of_layer(layer, mask), gradients_of_mask, mechanism)
    print(repr(mechanism))

# "aot_eager" also tests the compiler's backward pass, which "eager" leaves out
for mechanism, groups in ((Linformer(7), 4), (Verma(), 1)):
    vit = model(mechanism, depth=1).train()
    expected = gradients(vit)
    longseq.attention.layer.groups_for = lambda queries, keys, groups=groups: groups
    torch.compiler.reset()
    vit.compile(fullgraph=True, backend="aot_eager")
    compare(gradients(vit), expected, f"a whole ViT with {mechanism} and {groups} groups of queries")
    assert not any("_orig_mod" in name for name in vit.state_dict())
