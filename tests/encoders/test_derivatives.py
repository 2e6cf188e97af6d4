"""Second derivatives and torch.func through a whole encoder are right or raise an error, never silently wrong."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from longseq.attention import Linformer, Softmax, Verma
from longseq.encoders import ImageEncoder
from longseq.encoders.forward_pass import encode

MECHANISMS = [Softmax(), Linformer(5), Verma(), Verma(5), Verma(5, normalize="columns"), Linformer(5, sharing="none")]
EVERY = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
FUSED = (Softmax, Linformer)  # torch has no second derivative of its fused attention


def encoder(mechanism):
    torch.manual_seed(0)
    return ImageEncoder((1, 3, 3), mechanism, dim=8, depth=2, heads=2, mlp_ratio=2.0).double()


class Features(torch.nn.Module):
    """An encoder without its normalisation, which is in float32 and would hide small steps."""

    def __init__(self, mechanism):
        super().__init__()
        self.trunk = encoder(mechanism).trunk

    def forward(self, x):
        return encode(self.trunk, x)


def pictures(count=2):
    return torch.randn(count, 1, 3, 3, generator=torch.Generator().manual_seed(0)).double()


@EVERY
def test_second_derivatives_of_a_whole_encoder_are_those_of_finite_differences(mechanism):
    model = Features(mechanism)
    names = ["blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc2.bias", "blocks.1.norm2.weight", "blocks.0.attn.qkv.bias"]
    weights = tuple(model.trunk.get_parameter(name).detach().clone().requires_grad_() for name in names)

    def features(x, *chosen):
        return functional_call(model, {f"trunk.{name}": one for name, one in zip(names, chosen, strict=True)}, (x,))

    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            features, (pictures().requires_grad_(), *weights), atol=1e-4, fast_mode=True
        )


@EVERY
def test_a_gradient_penalty_moves_every_weight_as_timms_forward_pass_does(mechanism):
    """The penalty uses torch.autograd.grad with create_graph, where the outer gradient is a constant."""
    model = Features(mechanism)

    along = torch.randn(8, dtype=torch.float64)

    def penalty(forward):
        x = pictures().requires_grad_()
        (of_x,) = torch.autograd.grad((forward(x) * along).sum(), x, create_graph=True)
        parameters = [p for name, p in model.named_parameters() if "norm.bias" not in name]
        return torch.autograd.grad(of_x.square().sum(), parameters, allow_unused=True)

    with sdpa_kernel(SDPBackend.MATH):
        for ours, theirs in zip(penalty(model), penalty(model.trunk), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if isinstance(m, FUSED)], ids=repr)
def test_fused_attention_refuses_second_derivatives(mechanism):
    x = pictures().requires_grad_()
    (of_x,) = torch.autograd.grad(Features(mechanism)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product"):
        of_x.square().sum().backward()


@EVERY
def test_gradients_of_each_sample_by_vmap_are_those_of_each_sample_alone(mechanism):
    model = Features(mechanism)
    weights = dict(model.named_parameters())
    along = torch.randn(8, dtype=torch.float64)

    def loss(weights, picture):
        # with tie_weights=True, torch would leave its wrappers in the model if a module stands there in two places
        features = functional_call(model, weights, (picture[None],), tie_weights=False)
        return (features * along).sum()

    with sdpa_kernel(SDPBackend.MATH):
        derivatives = vmap(grad(loss), (None, 0))(weights, pictures())
        for number, picture in enumerate(pictures()):
            model.zero_grad()
            (model(picture[None]) * along).sum().backward()
            for name, weight in weights.items():
                torch.testing.assert_close(derivatives[name][number], weight.grad, msg=name)


@EVERY
def test_a_directional_derivative_is_that_of_finite_differences(mechanism):
    model = Features(mechanism)
    x, along = pictures(), torch.randn(2, 1, 3, 3, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        _, derivatives = jvp(model, (x,), (along,))
        step = 1e-6
        expected = (model(x + step * along) - model(x - step * along)) / (2 * step)
    torch.testing.assert_close(derivatives, expected, rtol=1e-5, atol=1e-7)
