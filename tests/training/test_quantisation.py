"""Quantization-aware training computes what onnxruntime computes with 8-bit integers, and leaves a plain model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from longseq import ImageEncoder, Linformer, Softmax, Verma
from longseq.arguments import ArgumentError
from longseq.deploy._formats import quantise, run_onnx, write_onnx
from longseq.files.storage import read_whole
from longseq.training import Classifier, QuantizationAwareTraining
from longseq.training.quantisation import QuantisedLinear, rounded_inputs, rounded_weight
from tests.programs import program_of

NO_TRAINER: Any = None


def linear(noise: float = 1.0) -> nn.Linear:
    """A layer whose outputs have weights of very different sizes, as the training computes it."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 10)
    with torch.no_grad():
        layer.weight *= torch.logspace(-3, 1, 10)[:, None]
    QuantizationAwareTraining(noise).setup(NO_TRAINER, layer, "fit")  # type: ignore[arg-type]
    assert type(layer) is QuantisedLinear
    return layer


def inputs() -> torch.Tensor:
    return 3 * torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(1)) + 1


def test_a_layer_computes_what_onnxruntime_computes_with_integers(tmp_path: Path) -> None:
    layer, file = linear(), tmp_path / "layer.onnx"
    expected, x = layer(inputs()), inputs()
    QuantizationAwareTraining().on_fit_end(NO_TRAINER, layer)  # type: ignore[arg-type]
    torch.onnx.export(layer, (x,), file, dynamo=True, verbose=False)
    plain = run_onnx(file)(x)
    integers = quantise(file)(x)
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= {node.op_type for node in onnx.load(file).graph.node}
    torch.testing.assert_close(expected.detach(), integers, rtol=1e-5, atol=1e-5)
    assert (integers - plain).abs().max() > 1e-2


def test_weights_and_inputs_are_rounded_as_torch_fakes_quantization() -> None:
    weight, x = linear().weight.detach(), inputs()
    scales, zeros = weight.abs().amax(1) / 127, torch.zeros(10, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -127, 127)
    torch.testing.assert_close(rounded_weight(weight), expected, rtol=1e-6, atol=0)
    for numbers in (x, x.abs(), -x.abs() - 5):
        low, high = min(0.0, float(numbers.min())), max(0.0, float(numbers.max()))
        step = (high - low) / 255
        expected = torch.fake_quantize_per_tensor_affine(numbers, step, round(-low / step), 0, 255)
        torch.testing.assert_close(rounded_inputs(numbers), expected, rtol=1e-5, atol=1e-5)


def test_zeros_stay_zeros() -> None:
    assert not rounded_weight(torch.zeros(2, 3)).any() and not rounded_inputs(torch.zeros(2, 3)).any()


def test_gradients_are_those_of_the_rounded_layer_passed_straight_through() -> None:
    layer, x = linear(), inputs().requires_grad_()
    cotangent = torch.randn(5, 7, 10)
    of_x, of_weight, of_bias = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], cotangent)
    torch.testing.assert_close(of_x, cotangent @ rounded_weight(layer.weight))
    torch.testing.assert_close(of_weight, torch.einsum("bne,bnd->ed", cotangent, rounded_inputs(x)))
    torch.testing.assert_close(of_bias, cotangent.sum((0, 1)))


def test_noise_rounds_its_share_of_the_weights_anew_at_each_step_and_all_in_evaluation() -> None:
    layer, all_of_them = linear(0.3), rounded_weight(linear().weight)
    x, bias = torch.eye(24), layer.bias.detach()  # its outputs are the weights; 0 and 1 are not changed by rounding
    shares, seen = [], []
    for _ in range(100):
        used = (layer(x) - bias).T.detach()
        is_rounded = torch.isclose(used, all_of_them, rtol=0, atol=1e-7)
        torch.testing.assert_close(used[~is_rounded], layer.weight.detach()[~is_rounded], rtol=1e-4, atol=1e-6)
        was_far = (all_of_them - layer.weight).abs() > 1e-4  # the others are the same either way
        shares.append(float(is_rounded[was_far].float().mean()))
        seen.append(is_rounded[was_far])
    assert sum(shares) / len(shares) == pytest.approx(0.3, abs=0.03)
    assert not torch.equal(seen[0], seen[1])
    layer.eval()
    torch.testing.assert_close((layer(x) - bias).T, all_of_them, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mechanism", [Softmax(), Linformer(8), Verma(8)], ids=repr)
def test_what_is_validated_is_nearer_to_the_exported_integers_than_the_float_model_is(
    mechanism: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), mechanism, dim=32, depth=2, heads=4)
    encoder.measure([torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)])
    model = Classifier(encoder, num_classes=10).eval()
    for weight in (weight for weight in model.parameters() if weight.ndim == 2):
        nn.init.normal_(weight, std=2 * weight.shape[1] ** -0.5)
    images = torch.randint(256, (1, 1, 8, 8), dtype=torch.uint8)
    exact = model.predict_step(images, 0).detach()
    write_onnx(program_of(model), tmp_path / "model.onnx", {})
    integers = quantise(tmp_path / "model.onnx")(images)
    callback = QuantizationAwareTraining()
    callback.setup(NO_TRAINER, model, "fit")
    validated = model.predict_step(images, 0).detach()
    assert (validated - integers).norm() < 0.5 * (exact - integers).norm()
    callback.on_fit_end(NO_TRAINER, model)
    assert torch.equal(model.predict_step(images, 0), exact)


ROOT = Path(__file__).parents[2]
FIT = ["fit", "--config", ROOT / "configs/image/digits.yaml", "--experiment", "x", "--model.encoder.dim", "8"]
FIT += ["--model.encoder.depth", "1", "--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
FIT += ["--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "1", "--trainer.max_epochs", "1"]
FIT += ["--trainer.limit_test_batches", "1", "--trainer.callbacks+=QuantizationAwareTraining"]


def test_a_training_rounds_and_its_checkpoint_is_that_of_a_plain_model(
    command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: dict[str, list[int]] = {"training_step": [], "validation_step": [], "test_step": []}
    for hook, counts in met.items():
        step = getattr(Classifier, hook)

        def watched(self: Classifier, batch: Any, batch_idx: int, step: Any = step, counts: Any = counts) -> Any:
            counts.append(sum(isinstance(layer, QuantisedLinear) for layer in self.modules()))
            return step(self, batch, batch_idx)

        monkeypatch.setattr(Classifier, hook, watched)
    done = command(*FIT, "--trainer.callbacks.noise", "0.5")
    assert done.code == 0, done.err
    linears = 5  # qkv, proj and two of the MLP in one block, and the head
    assert met["training_step"] == [linears] * 3 and set(met["validation_step"]) == {linears}
    assert met["test_step"] == [0]
    names = read_whole(Path("runs/x/0/best.ckpt"))["state_dict"].keys()
    assert command(*FIT[:-1]).code == 0
    assert names == read_whole(Path("runs/x/1/best.ckpt"))["state_dict"].keys()


@pytest.mark.parametrize("noise", [0, -0.5, 1.5])
def test_a_share_that_is_none_is_one_line(noise: float, command: Callable) -> None:
    with pytest.raises(ArgumentError, match="^noise must be above 0 and at most 1"):
        QuantizationAwareTraining(noise)
    done = command(*FIT, "--trainer.callbacks.noise", noise)
    assert done.code == 2 and "noise" in done.error and "1 rounds all weights" in done.error, done.err


def test_a_training_that_fails_leaves_a_plain_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    callback = QuantizationAwareTraining(0.5)
    callback.setup(NO_TRAINER, model, "fit")  # type: ignore[arg-type]
    callback.on_exception(NO_TRAINER, model, RuntimeError())  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear and "noise" not in vars(model[0])


def test_under_bfloat16_a_layer_stays_near_float32_and_its_gradients_too() -> None:
    layer, x = linear(), inputs()
    exact = layer(x)
    (of_exact,) = torch.autograd.grad(exact.square().sum(), [layer.weight])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.bfloat16 and (mixed.float() - exact).norm() < 0.01 * exact.norm()
    (of_mixed,) = torch.autograd.grad(mixed.float().square().sum(), [layer.weight])
    assert (of_mixed - of_exact).norm() < 0.02 * of_exact.norm()
