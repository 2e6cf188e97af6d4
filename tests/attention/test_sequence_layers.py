"""Layers that read a sequence in both directions give what a recurrence, step by step, and other packages give."""

import sys
from types import SimpleNamespace

import LRU_pytorch
import numpy as np
import pytest
import scipy.signal
import torch
from small_vit import model
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers.models.mamba import MambaConfig, modeling_mamba
from transformers.models.mamba2 import Mamba2Config, modeling_mamba2

from longseq import ImageEncoder, SpectrogramEncoder, resize
from longseq.arguments import ArgumentError
from longseq.attention import LRU, LSTM, S4, S4D, LongConv, Mamba, Mamba2
from longseq.attention.others import mamba2
from longseq.attention.others.longconv import _squashed
from longseq.attention.others.sequence import backwards
from longseq.training import Classifier
from longseq.training.optimizer import Optimization

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
    both = [torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True) for y in (ours, theirs)]
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in both[0][1:])
    for mine, other in zip(*both, strict=True):
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


def test_s4d_with_its_gradients_is_a_sum_over_scipys_impulse_responses():
    layer, x = layer_of(S4D(state=4)), tokens()
    responses = []  # of each state, to one unit of input
    for log_dt, log_A_real, A_imag in zip(layer.log_dt, layer.log_A_real, layer.A_imag, strict=True):
        for decay, frequency in zip(log_A_real.exp().tolist(), A_imag.tolist(), strict=True):
            A = np.array([[-decay, -frequency], [frequency, -decay]])
            system = A, np.array([[1.0], [0.0]]), np.eye(2), np.zeros((2, 1))
            discrete = scipy.signal.cont2discrete(system, log_dt.exp().item(), "zoh")
            # scipy's y_k has inputs before k only
            real, imag = scipy.signal.dimpulse(discrete, n=N + 2)[1][0][1 : N + 1].T
            responses.append(torch.complex(torch.tensor(real), torch.tensor(imag)))
    responses = torch.stack(responses).view(DIM, 2, N)
    after, before = 2 * torch.einsum("ods,dsn->odn", torch.view_as_complex(layer.C), responses).real
    places = torch.arange(N)
    lag = places[:, None] - places
    kernel = torch.where(lag >= 0, after[:, lag.clamp(0)], before[:, (-lag - 1).clamp(0)])
    theirs, ours = torch.einsum("dlm,bmd->bld", kernel, x), layer.filter(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((y * weights).sum(), [x, layer.C]) for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def of_s4(weights):
    """The complex numbers of all states, those of the second half the conjugates of the first."""
    half = torch.view_as_complex(weights) if weights.shape[-1:] == (2,) and not weights.is_complex() else weights
    return torch.cat([half, half.conj()], dim=-1)


def s4_by_steps(layer, x, direction):
    """x_k = A' x_(k-1) + B' u_k, y_k = C x_k, with dense complex A = Lambda - P P*: arXiv:2111.00396, equation 3."""
    A = of_s4(-layer.log_A_real.exp() + 1j * layer.A_imag).diag_embed()
    P, B, C = of_s4(layer.P), of_s4(layer.B), of_s4(layer.C[direction])
    A = A - P[..., :, None] * P.conj()[..., None, :]
    half, one = layer.log_dt.exp()[:, None, None] / 2, torch.eye(A.shape[-1])
    ahead, inputs = torch.linalg.solve(one - half * A, torch.stack([one + half * A, 2 * half * B.diag_embed()]))
    inputs, state, outcome = inputs.sum(-1), 0 * B, []
    for u in x.unbind(1):
        state = (ahead @ state[..., None]).squeeze(-1) + inputs * u[..., None]
        outcome.append((C * state).sum(-1))
    outcome = torch.stack(outcome, 1)
    assert outcome.imag.abs().max() < 1e-9
    return outcome.real


@pytest.mark.parametrize("n", [1, 2, N, 64])
def test_s4_is_the_recurrence_of_its_dense_matrix_in_both_directions(n):
    layer, x = layer_of(S4(state=8)), tokens(n)
    with torch.no_grad():
        for weight in (layer.P, layer.B, layer.log_A_real):
            weight.add_(0.1 * torch.randn_like(weight))  # as a training leaves them
    next_on = nn.functional.pad(s4_by_steps(layer, x.flip(1), 1).flip(1)[:, 1:], (0, 0, 0, 1))
    compare(layer.filter(x), s4_by_steps(layer, x, 0) + next_on, x, layer)


def test_s4_starts_at_hippo_and_is_discretised_as_scipy_does():
    """HiPPO-LegS is a triangular matrix of real numbers. With C = B' its kernel depends on no basis."""
    n = np.arange(8)
    A = -np.tril(np.sqrt(np.outer(2 * n + 1, 2 * n + 1)), -1) - np.diag(n + 1.0)
    B = np.sqrt(2 * n + 1.0)[:, None]
    layer = layer_of(S4(state=8))
    with torch.no_grad():
        layer.C[0] = layer.B * torch.tensor([1.0, -1.0])  # the conjugates
    for channel in (0, DIM - 1):
        system = A, B, B.T, np.zeros((1, 1))
        step, inputs, *_ = scipy.signal.cont2discrete(system, layer.log_dt[channel].exp().item(), "bilinear")
        kernel = [(B.T @ np.linalg.matrix_power(step, power) @ inputs).item() for power in range(40)]
        torch.testing.assert_close(
            layer.kernels(40)[0, channel], torch.tensor(kernel, dtype=torch.float64), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("mechanism", [S4D(), S4(state=8), LRU(state=24), LongConv()], ids=repr)
def test_the_block_around_a_filter_is_that_of_s4(mechanism):
    """GLU(W GELU(filter(u) + D u) + b), the block of S4's paper, with GELU and GLU written out."""
    layer, x = layer_of(mechanism), tokens()
    inner = layer.filter(x) + layer.D * x
    inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2
    first, second = (inner @ layer.output.weight.T + layer.output.bias).split(DIM, dim=-1)
    compare(layer(x), first / (1 + torch.exp(-second)), x, layer)


def test_s4d_starts_at_the_states_of_its_paper():
    lin, inv = (layer_of(S4D(state=8, start=start)).A_imag[0].tolist() for start in ("lin", "inv"))
    assert lin == pytest.approx([0, 3.14159265, 6.2831853, 9.42477796])
    assert inv == pytest.approx([8 / 3.14159265 * (8 / (2 * i + 1) - 1) for i in range(4)])


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (S4D(state=5), "state must be even and positive, got 5; 64 is usual"),
        (S4D(lr=0.0), "lr must be positive, got 0.0; 0.001 is usual"),
        (S4(state=3), "state must be even and positive, got 3; 64 is usual"),
        (Mamba(rank=0), "rank must be positive, got 0; leave it out for the paper's"),
        (LongConv(lam=-1.0), "lam must be 0 or more, got -1.0; 0.003 is usual"),
        (LongConv(smooth=4), "smooth must be odd and positive, got 4; 1 for no moving average"),
        (LongConv(lr=0.0), "lr must be positive, got 0.0; 0.001 is usual"),
        (LRU(state=0), "state must be positive, got 0; 256 is usual"),
        (LRU(r_min=0.9, r_max=0.5), "r_min must be in 0..r_max, and r_max at most 1, got 0.9 and 0.5"),
        (LRU(lr_factor=0.0), "lr_factor must be positive, got 0.0; leave it out for the usual one"),
        (Mamba2(conv=0), "conv must be positive, got 0; leave it out for the paper's"),
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
    groups = Optimization("adamw", learning_rate, 0.1, layer_decay=layer_decay).make_optimizer(classifier).param_groups
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


def test_a_long_convolution_is_torchs_convolution_with_a_kernel_of_all_lags():
    layer, n = layer_of(LongConv(lam=0.0)), 65
    x = tokens(n)
    after, before = layer.kernel
    kernel = torch.cat([after.flip(-1), before[:, : n - 1]], dim=-1)  # lags n - 1 .. 0, -1 .. 1 - n
    theirs = nn.functional.conv1d(x.mT, kernel[:, None], padding=n - 1, groups=DIM).mT
    compare(layer.filter(x), theirs, x, layer)


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
    layers = [part.trunk.blocks[0].attn for part in (coarse, fine)]
    times = [torch.linspace(0, 1, layer.kernel.shape[-1], dtype=torch.float64) for layer in layers]
    outcomes = [
        layer.filter(torch.sin(6 * t)[None, :, None].repeat(1, 1, 16)) for layer, t in zip(layers, times, strict=True)
    ]
    at_the_same_times = nn.functional.interpolate(outcomes[1].mT, len(times[0]), mode="linear", align_corners=True).mT
    torch.testing.assert_close(at_the_same_times, outcomes[0], rtol=0.1, atol=0.1 * outcomes[0].abs().max().item())
    assert torch.equal(resize(coarse).trunk.blocks[0].attn.kernel, kernel)


@pytest.mark.parametrize("tokens", [128, 256])
def test_a_smoothed_kernel_is_resampled_as_it_is_used(tokens):
    mechanism = LongConv(lam=0.003, smooth=5)
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 64, 1), mechanism, dim=16, depth=1, heads=2)
    kernel = encoder.trunk.blocks[0].attn.kernel
    nn.init.normal_(kernel, std=0.02)
    grown = resize(encoder, (1, tokens, 1)).trunk.blocks[0].attn.kernel
    used = [_squashed(part.detach(), mechanism) for part in (kernel, grown)]
    resampled = nn.functional.interpolate(used[0], tokens, mode="linear", align_corners=True) * 64 / tokens
    assert (used[1] - resampled).norm() < 0.3 * resampled.norm()


def test_an_lstm_trains_on_a_cpu_where_torchs_default_is_bfloat16():
    torch.set_default_dtype(torch.bfloat16)  # as Lightning's bf16-true does
    try:
        layer = layer_of(LSTM()).bfloat16()
        layer(torch.randn(2, N, DIM)).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.from_first.weight_hh_l0.grad.abs().sum() > 0


EXACT, FROM_NOISE = 0.02, 0.15  # a long convolution starts as noise, whose lags say little of those between them


@pytest.mark.parametrize("hop_ms", [2.5, 5.0, 20.0])
@pytest.mark.parametrize(
    ("mechanism", "most"),
    [
        (S4D(), EXACT),
        (S4D(state=16, start="inv"), EXACT),
        (LRU(state=64), EXACT),
        (LRU(64, 0.9, 0.99, 0.3), EXACT),
        (LongConv(), FROM_NOISE),
        (LongConv(lam=0.01), FROM_NOISE),
    ],
    ids=repr,
)
def test_a_resized_layer_says_the_same_of_the_same_sound(mechanism, most, hop_ms):
    torch.manual_seed(0)
    before = SpectrogramEncoder(8000, 4.0, mechanism, num_mels=8, dim=16, depth=1, heads=2, hop_ms=10.0).double()
    outcomes = []
    for encoder in (before, resize(before, hop_ms=hop_ms)):
        times = torch.arange(encoder.num_tokens, dtype=torch.float64) / encoder.num_tokens
        outcomes.append(encoder.trunk.blocks[0].attn.filter(torch.sin(6 * times)[None, :, None].repeat(1, 1, 16)))
    ours, theirs = (nn.functional.interpolate(part.mT, 100, mode="linear") for part in outcomes)
    assert (ours - theirs).norm() < most * theirs.norm()


def test_a_long_convolution_refuses_what_its_kernel_does_not_reach():
    layer = layer_of(LongConv())
    with pytest.raises(ArgumentError, match="^tokens must be at most the 65 that the kernel was built for, got 66; "):
        layer(tokens(66))


def test_the_kernel_of_a_long_convolution_has_the_rate_of_its_paper_and_no_decay():
    rates = rates_of(LongConv(), 0.01)
    assert rates["kernel"] == (0.001, 0)
    assert rates["output.weight"] == (0.01, 0.1)


def test_lstm_is_torchs_bidirectional_one_on_packed_sequences():
    layer, x = layer_of(LSTM()), tokens()
    theirs = nn.LSTM(DIM, DIM // 2, batch_first=True, bidirectional=True).double()
    for name, weight in layer.from_first.named_parameters():
        setattr(theirs, name, weight)
        setattr(theirs, f"{name}_reverse", getattr(layer.from_last, name))
    lengths = torch.tensor([N, 9])
    packed = theirs(pack_padded_sequence(x, lengths, batch_first=True))[0]
    present = (torch.arange(N) < lengths[:, None])[..., None]
    expected = layer.output(pad_packed_sequence(packed, batch_first=True)[0])
    compare(layer(x, present[:, None].mT) * present, expected * present, x, layer)


def lru_of_package(layer, x, direction, monkeypatch):
    """The public package's LRU, which goes step by step, with the layer's weights."""
    state = len(layer.nu)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: torch.zeros(*sizes, dtype=x.dtype))
    theirs = LRU_pytorch.LRU(DIM, DIM, state).double()
    for name, weight in {
        "nu_log": layer.nu,
        "theta_log": layer.theta,
        "gamma_log": layer.gamma,
        "B": torch.complex(*layer.B),
        "C": torch.complex(*layer.C[direction]),
        "D": torch.zeros(DIM, DIM, dtype=x.dtype),
    }.items():
        delattr(theirs, name)
        setattr(theirs, name, weight)
    outcome = theirs(x, torch.zeros(state, dtype=torch.complex128))
    monkeypatch.undo()
    return outcome


@pytest.mark.parametrize("mechanism", LRU.examples(), ids=repr)
def test_lru_is_that_of_a_public_package_in_both_directions(mechanism, monkeypatch):
    layer, x = layer_of(mechanism), tokens(12)
    forward, backward = (lru_of_package(layer, y, i, monkeypatch) for i, y in enumerate((x, x.flip(1))))
    compare(layer.filter(x), forward + backward.flip(1), x, layer)


def test_lru_starts_in_its_ring_and_its_recurrent_weights_have_the_rate_of_its_paper():
    layer = layer_of(LRU(state=1000, r_min=0.5, r_max=0.9, max_phase=0.3))
    size, phase = torch.exp(-layer.nu.exp()), layer.theta.exp()
    assert 0.5 <= size.min() < 0.52 and 0.89 < size.max() <= 0.9 and phase.max() <= 0.3
    assert size.square().mean().item() == pytest.approx((0.25 + 0.81) / 2, abs=0.01)  # uniform by area
    torch.testing.assert_close(layer.gamma.exp().square(), 1 - size.square(), rtol=1e-5, atol=1e-6)
    rates = rates_of(LRU(), 0.01)
    assert rates["nu"] == rates["theta"] == rates["gamma"] == rates["B"] == (0.0025, 0)
    assert rates["C"] == rates["output.weight"] == (0.01, 0.1)


def mamba2_of_transformers(direction, heads, x, monkeypatch):
    """The mixer of transformers in float64, with a direction's weights; it casts to float32 by these two names."""
    inner, state = direction.sizes[0], (direction.sizes[1] - direction.sizes[0]) // 2
    config = Mamba2Config(
        hidden_size=DIM, num_heads=heads, head_dim=inner // heads, state_size=state, expand=inner // DIM, n_groups=1,
        conv_kernel=direction.conv1d.kernel_size[0], chunk_size=16, num_hidden_layers=1,
    )  # fmt: skip
    mixer = modeling_mamba2.Mamba2Mixer(config, 0).double()
    mixer.in_proj, mixer.out_proj = direction.in_proj, direction.out_proj
    mixer.conv1d.weight, mixer.conv1d.bias = direction.conv1d.weight, direction.conv1d.bias
    mixer.A_log, mixer.D, mixer.dt_bias, mixer.norm.weight = (
        direction.A_log, direction.D, direction.dt_bias, direction.norm,
    )  # fmt: skip
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(modeling_mamba2, "torch", SimpleNamespace(**{**vars(torch), "float32": torch.float64}))
    outcome = mixer.eval()(x)
    monkeypatch.undo()
    return outcome


@pytest.mark.parametrize("mechanism", Mamba2.examples(), ids=repr)
def test_mamba2_is_that_of_transformers_in_both_directions(mechanism, monkeypatch):
    layer, x = layer_of(mechanism), tokens(200)  # four chunks
    forward = mamba2_of_transformers(layer.from_first, 4, x, monkeypatch)
    backward = mamba2_of_transformers(layer.from_last, 4, x.flip(1), monkeypatch).flip(1)
    compare(layer(x), forward + backward, x, layer)


def mamba_of_transformers(direction, x, monkeypatch):
    inner, states = direction.A_log.shape
    config = MambaConfig(
        hidden_size=DIM, state_size=states, expand=inner // DIM, conv_kernel=direction.conv1d.kernel_size[0],
        time_step_rank=direction.sizes[0], use_mambapy=False,
    )  # fmt: skip
    mixer = modeling_mamba.MambaMixer(config, 0).double()
    for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj"):
        part = getattr(direction, name)
        if isinstance(part, nn.Parameter):
            setattr(mixer, name, part)
            continue
        getattr(mixer, name).weight = part.weight
        if part.bias is not None:
            getattr(mixer, name).bias = part.bias
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(modeling_mamba, "torch", SimpleNamespace(**{**vars(torch), "float32": torch.float64}))
    outcome = mixer.eval()(x)
    monkeypatch.undo()
    return outcome


@pytest.mark.parametrize("mechanism", Mamba.examples(), ids=repr)
def test_mamba_is_that_of_transformers_in_both_directions(mechanism, monkeypatch):
    """Over one chunk, and over three of them."""
    for n in (N, 150):
        layer, x = layer_of(mechanism), tokens(n)
        forward = mamba_of_transformers(layer.from_first, x, monkeypatch)
        backward = mamba_of_transformers(layer.from_last, x.flip(1), monkeypatch).flip(1)
        compare(layer(x), forward + backward, x, layer)


def test_long_sequences_of_mamba2_do_not_overflow():
    layer = model(Mamba2(state=16)).blocks[0].attn
    nn.init.constant_(layer.from_first.dt_bias, 10.0)  # states are forgotten within a token
    x = torch.randn(1, 300, DIM, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in [x, *layer.parameters()])


@pytest.mark.parametrize("length", [200, 131])
def test_the_kernel_of_mamba_ssm_gets_what_its_interface_asks_for(length, monkeypatch):
    """In its place stands the recurrence, step by step, with the shapes that the package's source checks."""
    layer, x = layer_of(Mamba2(state=16)), tokens(200)
    present = (torch.arange(200) < torch.tensor([[200], [length]]))[:, None, None]
    expected = layer(x, present)

    def scan(x, dt, A, B, C, chunk_size, D=None):
        batch, n, heads, _ = x.shape
        assert dt.shape == (batch, n, heads) and A.shape == D.shape == (heads,)
        assert B.shape == C.shape == (batch, n, 1, 16)
        assert chunk_size == 64 and (x.stride(-1) == 1 or x.stride(1) == 1)
        state, outcome = 0, []
        for u, step, row, column in zip(x.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1), strict=True):
            added = step[..., None, None] * u[..., None] * row[:, :, None]
            state = torch.exp(step * A)[..., None, None] * state + added
            outcome.append((state * column[:, :, None]).sum(-1) + D[:, None] * u)
        return torch.stack(outcome, 1)

    monkeypatch.setattr(mamba2, "kernel_for", lambda device, dtype: scan)
    there = present[:, 0, 0, :, None]
    compare(layer(x, present) * there, expected * there, x, layer)


def test_the_kernel_of_mamba_ssm_is_used_on_a_gpu_in_low_precision_alone(monkeypatch):
    module = SimpleNamespace(mamba_chunk_scan_combined=len)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(mamba2, "_has_kernel", lambda: True)
    assert mamba2.kernel_for("cuda", torch.bfloat16) is len
    assert mamba2.kernel_for("cpu", torch.bfloat16) is None
    assert mamba2.kernel_for("cuda", torch.float32) is None
