"""A clip gives the same features and gradients in a padded batch as it gives alone."""

import pytest
import torch

from longseq.attention import Conv, Gaussian, Linear, Linformer, Max, Mean, Reformer, Separable, Softmax, Verma
from longseq.encoders import SpectrogramEncoder

SAMPLES = [1000, 2600, 8000, 79]  # the third has the full length, the last has one frame
PROJECTIONS = [Linear(), Mean(), Max(), Conv(), Conv(full=True), Gaussian(), Separable()]
MECHANISMS = [
    Softmax(),
    Verma(),
    Verma(normalize="columns"),
    *(kind(9, projection=projection) for kind in (Linformer, Verma) for projection in PROJECTIONS),
    *(kind(9, "none", projection) for kind in (Linformer, Verma) for projection in PROJECTIONS),
    Verma(9, projection=Mean(), normalize="columns"),
    Linformer([[3, 9], [5, 5]], "none", Mean()),
    Linformer([8, 4], projection=Separable()),
    Verma(8, "layerwise", Separable()),
]


def encoder(attention, **change):
    torch.manual_seed(0)
    arguments = {"sample_rate_hz": 8000, "seconds": 1.0, "num_mels": 16, "dim": 16, "depth": 2, "heads": 2, **change}
    model = SpectrogramEncoder(attention=attention, **arguments).double()
    # the mean, the spectrum of silence and zero must all differ, or a test could miss padding filled with one of them
    model.mean.normal_()
    return model


def clips():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, samples, dtype=torch.float64, generator=generator) for samples in SAMPLES]


def batch():
    waveforms = torch.cat([torch.nn.functional.pad(clip, (0, 8000 - clip.shape[1])) for clip in clips()])
    return {"waveforms": waveforms, "lengths": torch.tensor(SAMPLES)}


def gradients(model, features, weights):
    grads = torch.autograd.grad((features * weights).sum(), list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(model.parameters(), grads, strict=True)]


CASES = [(each, change) for change in ({}, {"tokens": [8, 4]}, {"pool": "token"}) for each in MECHANISMS]
CASES += [(each, {"pool": pool}) for each in (Verma(), Linformer(9)) for pool in ("max", "gated", "statistics")]
# a checkpointed block is given its mask alike for every mechanism; Reformer hashes again in the backward pass
CASES += [(each, {"checkpointing": True, "tokens": [16, 3]}) for each in (Softmax(), Linformer(9), Reformer(2, 16))]


@pytest.mark.parametrize(("mechanism", "change"), CASES, ids=repr)
def test_features_and_gradients_are_those_of_the_clip_alone(mechanism, change):
    model = encoder(mechanism, **change)
    torch.manual_seed(2)
    weights = torch.randn(len(SAMPLES), 16, dtype=torch.float64)
    together = model(batch())
    grads = gradients(model, together, weights)
    alone = torch.cat([model(clip) for clip in clips()])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    for mine, theirs in zip(grads, gradients(model, alone, weights), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_batch_padded_less_gives_the_same():
    model = encoder(Linformer(9, projection=Mean()))
    whole = batch()
    first = {"waveforms": whole["waveforms"][:2, :2600], "lengths": whole["lengths"][:2]}
    torch.testing.assert_close(model(first), model(whole)[:2], rtol=0, atol=1e-10)


def test_without_lengths_all_clips_are_as_long_as_the_tensor():
    model = encoder(Linformer(9))
    short = batch()["waveforms"][:, :3000]
    lengths = torch.full((4,), 3000)
    assert torch.equal(model(short), model({"waveforms": short, "lengths": lengths}))


def test_the_statistics_leave_padding_out():
    padded, alone = encoder(Softmax()), encoder(Softmax())
    padded.measure([batch()])
    alone.measure(clips())
    torch.testing.assert_close(padded.mean, alone.mean)
    torch.testing.assert_close(padded.std, alone.std)


def test_checkpointing_keeps_fewer_activations_under_a_mask_too():
    def kept(checkpointing):
        model, size = encoder(Linformer(9), depth=4, checkpointing=checkpointing), 0

        def pack(tensor):
            nonlocal size
            size += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch())
        return size

    assert kept(True) < 0.4 * kept(False)
