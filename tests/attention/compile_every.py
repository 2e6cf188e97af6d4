"""Compile a ViT of every kind of layer in one graph, compare its gradients with the plain one's, and print it."""

import torch
from test_contract import COMPILED, gradients, model

for mechanism in COMPILED:
    torch.compiler.reset()
    vit = model(mechanism).train()
    expected = gradients(vit)
    vit.compile(fullgraph=True, backend="aot_eager")
    for name, gradient in gradients(vit).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=f"{mechanism}: {name}")
    assert not any("_orig_mod" in name for name in vit.state_dict())
    print(repr(mechanism))
