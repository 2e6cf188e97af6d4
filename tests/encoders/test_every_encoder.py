"""What every encoder must do, tested on all that longseq.encoders exports, so a new one is tested once exported."""

import copy

import pytest
import torch
from encoder_kinds import KINDS

from longseq import Linformer, Softmax, Verma
from longseq.arguments import arguments_of
from longseq.encoders import Encoder, FeatureEncoder, resize
from longseq.files.description import describe
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample

MECHANISMS = [Softmax(), Linformer(7), Verma()]


def examples(kind, mechanism=MECHANISMS[1]):
    torch.manual_seed(0)
    return kind.examples(mechanism)


def measured(kind, number):
    """An example that knows its inputs, in evaluation: in training, the random masks of SpecAugment would differ."""
    encoder, inputs = examples(kind)[number]
    encoder.measure([inputs])
    return encoder.eval(), inputs


EVERY = pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, number, id=f"{kind.__name__} {number}")
        for kind in KINDS
        for number in range(len(examples(kind)))
    ],
)


def every_one_of(inputs):
    """Split a batch into batches of one sample, and cut every sample to its length."""
    if not isinstance(inputs, dict):
        return [sample[None] for sample in inputs]
    (name,) = inputs.keys() - {"lengths"}
    pairs = zip(inputs[name], inputs["lengths"], strict=True)
    return [{name: clip[None, :length], "lengths": length[None]} for clip, length in pairs]


def test_every_encoder_has_an_example_that_says_whether_it_takes_sounds():
    for kind in KINDS:
        assert examples(kind), kind
        for encoder, inputs in examples(kind):
            sounds = encoder.sounds(inputs)
            assert bool(sounds) == (kind.kind == "sounds")
            assert all(sound.ndim == 1 for sound in sounds)


@EVERY
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_features_are_finite_and_a_sample_has_them_in_any_batch(kind, number, mechanism):
    encoder, inputs = examples(kind, mechanism)[number]
    encoder.double().eval()
    features = encoder(inputs)
    assert features.shape == (len(every_one_of(inputs)), encoder.dim)
    assert features.isfinite().all()
    alone = torch.cat([encoder(sample) for sample in every_one_of(inputs)])
    torch.testing.assert_close(alone, features, rtol=1e-9, atol=1e-9)
    assert (features[0] - features[1]).abs().max() > 1e-6


@EVERY
def test_a_bfloat16_model_normalises_in_float32(kind, number):
    encoder, inputs = measured(kind, number)
    encoder.mean.add_(1000.3), encoder.std.mul_(1.003)  # no numbers of bfloat16
    expected, rows = encoder.prepared(inputs)
    picture, of_low = encoder.bfloat16().prepared(inputs)
    assert picture.dtype == torch.bfloat16 and (rows is None or torch.equal(of_low, rows))
    torch.testing.assert_close(picture, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert encoder(inputs).isfinite().all()


@EVERY
def test_every_parameter_has_a_gradient_with_checkpointing_and_without(kind, number):
    encoder, inputs = measured(kind, number)

    def gradients():
        encoder.zero_grad()
        encoder(inputs).square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in encoder.named_parameters()}

    expected = gradients()
    assert [name for name, gradient in expected.items() if not gradient.abs().sum()] == []
    encoder.trunk.set_grad_checkpointing(True)
    encoder.train()
    encoder.augment = lambda picture: picture
    for part in encoder.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eval()  # in training, features depend on the whole batch
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@EVERY
def test_its_arguments_rebuild_it_and_a_state_dict_brings_back_the_very_features(kind, number):
    encoder, inputs = measured(kind, number)
    arguments = arguments_of(encoder)
    again = kind(**arguments).eval()
    assert describe(again) == describe(encoder)
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again(inputs), encoder(inputs))
    assert torch.equal(copy.deepcopy(encoder)(inputs), encoder(inputs))


@EVERY
def test_a_measured_one_normalises_its_pictures_unless_its_weights_expect_others(kind, number):
    encoder, inputs = examples(kind)[number]
    before = encoder.mean.clone()
    encoder.measure([inputs])
    if kind.measure in (Encoder.measure, FeatureEncoder.measure) and not encoder.keeps_statistics:
        picture, rows = encoder.front_end(inputs), encoder.rows(inputs)
        if kind is FeatureEncoder and encoder.num_coordinates:  # their mean stays 0
            picture[:, encoder.num_features :] = 0
        rows = [picture.shape[2]] * len(picture) if rows is None else rows.tolist()
        own = torch.cat([one[:, :count].flatten(1) for one, count in zip(picture, rows, strict=True)], 1)
        assert encoder.mean.mean().item() == pytest.approx(own.mean().item(), rel=1e-4, abs=1e-6)
    else:
        assert torch.equal(encoder.mean, before)


@EVERY
def test_it_counts_its_tokens_its_flops_and_draws_what_it_sees(kind, number):
    encoder, inputs = examples(kind)[number]
    assert encoder.num_tokens >= 16
    count = len(every_one_of(inputs))
    tokens = int(encoder.count_tokens(inputs))
    assert tokens <= count * encoder.num_tokens
    assert (tokens == count * encoder.num_tokens) == (not isinstance(inputs, dict))
    flops = flops_per_sample(Classifier(encoder, num_classes=3))
    assert flops.training > 2 * flops.forward > 0
    figure = encoder.draw(list(encoder.front_end(inputs)), ["x"] * count, (0, 255))  # with limits, as the board draws
    assert len(figure.axes) == count


@EVERY
def test_carried_to_its_own_size_it_gives_the_very_features(kind, number):
    encoder, inputs = measured(kind, number)
    sizes = {"sounds": ["seconds"], "images": ["shape"], "features": ["most_tokens"]}[kind.kind]
    same = resize(encoder, **{name: getattr(encoder, name) for name in sizes})
    assert torch.equal(same(inputs), encoder(inputs))


@EVERY
def test_in_mixed_precision_it_comes_near_its_features_in_float32(kind, number):
    encoder, inputs = measured(kind, number)
    expected = encoder(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        near = encoder(inputs).float()
    assert (near - expected).norm() < 0.05 * expected.norm()
