"""Layers that read a sequence in both directions give what a recurrence, step by step, and other packages give."""

import pytest
import scipy.signal
import torch
from small_vit import model
from torch import nn

from longseq import ImageEncoder, SpectrogramEncoder, resize
from longseq.arguments import ArgumentError
from longseq.attention import S4D, LongConv
from longseq.attention.others.sequence import backwards
from longseq.training import Classifier
from longseq.training.optimizer import make_optimizer

N, DIM = 23, 32


def layer_of(mechanism, **options):
    layer = model(mechanism, **options).double().blocks[0].attn
    for name, weight in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.1)
    return layer


def tokens(n=N):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, n, DIM, dtype=torch.float64, generator=generator, requires_grad=True)


def compare(ours, theirs, x, layer):
    """Values, and gradients of a weighted sum."""
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    wanted = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    found = [torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True) for y in (ours, theirs)]
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in found[0][1:])
    for mine, other in zip(*found, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def s4d_by_steps(layer, x, direction):
    """x_k = exp(dt A) x_(k-1) + (exp(dt A) - 1) / A u_k, y_k = 2 Re(C x_k): arXiv:2206.11893, section 3."""
    dt, A = layer.log_dt.exp()[:, None], -layer.log_A_real.exp() + 1j * layer.A_imag
    decay, C = torch.exp(dt * A), torch.view_as_complex(layer.C[direction])
    state, outcome = 0, []
    for u in x.unbind(1):
        state = decay * state + (decay - 1) / A * u[..., None]
        outcome.append(2 * (C * state).sum(-1).real)
    return torch.stack(outcome, 1)


@pytest.mark.parametrize("mechanism", [S4D(), S4D(state=16, start="inv")], ids=repr)
def test_s4d_is_its_recurrence_in_both_directions_and_is_discretised_as_scipy_does(mechanism):
    layer, x = layer_of(mechanism), tokens(150)
    steps = s4d_by_steps(layer, x, 0)
    next_on = nn.functional.pad(s4d_by_steps(layer, x.flip(1), 1).flip(1)[:, 1:], (0, 0, 0, 1))  # begins at the next
    compare(layer.filter(x), steps + next_on, x, layer)
    for channel in (0, DIM - 1):
        dt, C = layer.log_dt[channel].exp().item(), torch.view_as_complex(layer.C[0, channel])
        A = (-layer.log_A_real[channel].exp() + 1j * layer.A_imag[channel]).tolist()
        blocks = torch.block_diag(
            *(torch.tensor([[a.real, -a.imag], [a.imag, a.real]], dtype=torch.float64) for a in A)
        )
        B = torch.tensor([1.0, 0.0]).repeat(len(A))[:, None]
        rows = 2 * torch.stack([C.real, -C.imag], -1).flatten()[None]
        system = [matrix.detach().numpy() for matrix in (blocks, B, rows, torch.zeros(1, 1))]
        discrete = scipy.signal.cont2discrete(system, dt, "zoh")
        u = nn.functional.pad(x[0, :, channel], (0, 1)).detach().numpy()
        theirs = torch.from_numpy(scipy.signal.dlsim(discrete, u)[1][1:, 0])  # scipy's y_k has inputs before k only
        torch.testing.assert_close(steps[0, :, channel], theirs, rtol=1e-9, atol=1e-10)


def test_s4d_starts_at_the_states_of_its_paper():
    lin, inv = (layer_of(S4D(state=8, start=start)).A_imag[0].tolist() for start in ("lin", "inv"))
    assert lin == pytest.approx([0, 3.14159265, 6.2831853, 9.42477796])
    assert inv == pytest.approx([8 / 3.14159265 * (8 / (2 * i + 1) - 1) for i in range(4)])


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (S4D(state=5), "state must be even and positive, got 5; 64 is usual"),
        (S4D(lr=0.0), "lr must be positive, got 0.0; 0.001 is usual"),
        (LongConv(lam=-1.0), "lam must be 0 or more, got -1.0; 0.003 is usual"),
        (LongConv(smooth=4), "smooth must be odd and positive, got 4; 1 for no moving average"),
        (LongConv(lr=0.0), "lr must be positive, got 0.0; 0.001 is usual"),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_named(mechanism, message):
    with pytest.raises(ArgumentError) as error:
        model(mechanism)
    assert str(error.value) == message


def rates_of(mechanism, learning_rate, layer_decay=None):
    """Learning rate and weight decay of each weight of the second block's layer."""
    encoder = ImageEncoder((1, 8, 8), mechanism, dim=16, depth=2, heads=2)
    classifier = Classifier(encoder, 3)
    groups = make_optimizer(classifier, "adamw", learning_rate, 0.1, layer_decay=layer_decay).param_groups
    of_weight = {id(weight): (group["lr"], group["weight_decay"]) for group in groups for weight in group["params"]}
    assert len(of_weight) == len(list(classifier.parameters()))
    layer = encoder.trunk.blocks[1].attn
    return {name: of_weight[id(weight)] for name, weight in layer.named_parameters()}


def test_the_states_of_s4d_have_the_rate_of_its_paper_and_no_decay():
    fast = rates_of(S4D(), 0.01)
    assert fast["log_dt"] == fast["log_A_real"] == fast["A_imag"] == (0.001, 0)
    assert fast["C"] == fast["output.weight"] == (0.01, 0.1)
    slow = rates_of(S4D(), 1e-4)
    assert slow["log_dt"] == (1e-4, 0) and slow["C"] == (1e-4, 0.1)
    decayed = rates_of(S4D(), 0.01, layer_decay=0.5)  # the head and the norm come after the last block
    assert decayed["log_dt"][0] / decayed["C"][0] == pytest.approx(0.1)


def test_backwards_turns_the_tokens_round_and_leaves_padding_behind_them():
    x = torch.arange(1, 6.0).view(1, 5, 1).repeat(2, 1, 1)
    present = (torch.arange(5) < torch.tensor([[5], [3]]))[..., None]
    assert backwards(x, present)[..., 0].tolist() == [[5, 4, 3, 2, 1], [3, 2, 1, 4, 5]]
    assert torch.equal(backwards(x, None), backwards(x, torch.ones_like(present)))


def test_a_layer_says_which_masks_it_takes():
    layer, x = layer_of(S4D()), tokens()
    with pytest.raises(ArgumentError, match="^is_causal must be False: the layer reads a sequence in both directions"):
        layer(x, is_causal=True)
    with pytest.raises(ArgumentError, match="^attn_mask must be bool and of the shape"):
        layer(x, torch.ones(2, 1, N, N, dtype=torch.bool))


def long_convolution_by_sums(layer, x):
    """y_l = sum_j K_j x_(l-j) + sum_j K'_j x_(l+1+j), token by token, of the squashed moving average of the weights."""
    lam, width = layer.options.lam, layer.options.smooth
    around = nn.functional.pad(layer.kernel, (width // 2, width // 2)).unfold(-1, width, 1).mean(-1)
    after, before = torch.where(around.abs() > lam, around - lam * around.sign(), 0.0)
    n, places = x.shape[1], torch.arange(x.shape[1])
    lag = places[:, None] - places
    kernel = torch.where(lag >= 0, after[:, lag.clamp(0, n)], before[:, (-lag - 1).clamp(0, n)])
    return torch.einsum("dlm,bmd->bld", kernel, x)


@pytest.mark.parametrize("mechanism", [LongConv(), LongConv(lam=0.001, smooth=5)], ids=repr)
def test_a_long_convolution_is_a_sum_over_all_lags_of_the_squashed_and_smoothed_kernel(mechanism):
    layer, x = layer_of(mechanism), tokens()
    compare(layer.filter(x), long_convolution_by_sums(layer, x), x, layer)
    assert layer.kernel.shape == (2, DIM, 65)  # as long as the sequence, of which x has the first tokens


def test_a_resized_long_convolution_says_the_same_of_the_same_sound():
    def encoder(seconds, hop_ms):
        torch.manual_seed(0)
        return SpectrogramEncoder(8000, seconds, LongConv(lam=0.0), num_mels=8, dim=16, depth=1, heads=2, hop_ms=hop_ms)

    coarse = encoder(0.4, 10.0).double()
    kernel = coarse.trunk.blocks[0].attn.kernel
    lags = torch.linspace(0, 1, kernel.shape[-1], dtype=torch.float64)
    kernel.data.copy_(torch.exp(-5 * lags))
    fine = resize(coarse, hop_ms=2.5)
    grown = fine.trunk.blocks[0].attn.kernel
    assert grown.shape[-1] > 3.5 * kernel.shape[-1]
    torch.testing.assert_close(grown.sum(-1), kernel.sum(-1), rtol=0.05, atol=0)
    layers = [each.trunk.blocks[0].attn for each in (coarse, fine)]
    times = [torch.linspace(0, 1, layer.kernel.shape[-1], dtype=torch.float64) for layer in layers]
    outcomes = [
        layer.filter(torch.sin(6 * t)[None, :, None].repeat(1, 1, 16)) for layer, t in zip(layers, times, strict=True)
    ]
    at_the_same_times = nn.functional.interpolate(outcomes[1].mT, len(times[0]), mode="linear", align_corners=True).mT
    torch.testing.assert_close(at_the_same_times, outcomes[0], rtol=0.1, atol=0.1 * outcomes[0].abs().max().item())
    assert torch.equal(resize(coarse).trunk.blocks[0].attn.kernel, kernel)


def test_a_long_convolution_refuses_what_its_kernel_does_not_reach():
    layer = layer_of(LongConv())
    with pytest.raises(ArgumentError, match="^tokens must be at most the 65 that the kernel was built for, got 66; "):
        layer(tokens(66))


def test_the_kernel_of_a_long_convolution_has_the_rate_of_its_paper_and_no_decay():
    rates = rates_of(LongConv(), 0.01)
    assert rates["kernel"] == (0.001, 0)
    assert rates["output.weight"] == (0.01, 0.1)
