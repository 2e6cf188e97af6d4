"""The FLOPs of a sample, counted and not timed, and the peak FLOP/s of devices."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from longseq.attention.others.fourier import FFT_FLOPS
from longseq.encoders.forward_pass import encode, token_features
from longseq.training.classifier import Classifier

# Dense (not sparse) FLOP/s of matrix products in bfloat16 and float16 with float32 sums, from NVIDIA's data sheets. The
# keys are whole names from torch.cuda.get_device_name, because a MIG slice has a longer name and another peak.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}
_HALF_PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed", "16-true")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak dense FLOP/s of a device, or None if the table does not have it.

    Args:
        device_name: The result of torch.cuda.get_device_name.
        precision: trainer.precision; the table has only half precisions.
    """
    return PEAK_FLOPS.get(device_name) if precision in _HALF_PRECISIONS else None


class Flops(NamedTuple):
    """FLOPs of one sample: a multiplication and an addition are two."""

    forward: int
    training: int  # forward and backward, and the teacher's forward


def flops_per_sample(model: Classifier) -> Flops:
    """Count the matrix products, convolutions and FFTs of trunk, head and pooling for one sample, on the meta device.

    In training, the forward pass of a teacher is counted too, if it is a checkpoint. The spectrogram (it has no
    parameters), the optimizer and all elementwise operations are not counted. Recomputation under activation
    checkpointing or in a fused attention's backward pass is not counted either, because it is not the model's work.

    Raises:
        RuntimeError: If no parameter is trained.
    """
    if model.before_sharding is not None:
        return model.before_sharding[0]
    own = _count(model, backward=True)
    teacher = None if model.teaching is None else model.teaching.model
    return Flops(own.forward, own.training + (0 if teacher is None else _count(teacher, backward=False).forward))


@torch.inference_mode(False)  # the backward pass needs gradients, which the caller may have turned off
def _count(model: Classifier, backward: bool) -> Flops:
    originals: Any = (model.encoder.trunk, model.head, model.pooling or nn.Identity())
    memo: dict[int, Any] = {}  # deepcopy uses these values as the copies, so a second model needs no memory
    for module in originals:
        memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
        for weight in module.parameters():
            memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    trunk, head, pooling = copy.deepcopy(originals, memo)
    trunk.set_grad_checkpointing(False)
    trunk.reversible = False  # the same products, without recomputation
    picture = torch.empty(1, *model.encoder.picture_shape, dtype=model.encoder.dtype, device="meta")
    formulas = {torch.ops.aten.convolution_backward: _of_gradients, **FFT_FLOPS}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    # torch's formula for a fused attention kernel adds the recomputed scores; MATH has the plain products only
    with sdpa_kernel(SDPBackend.MATH), counter:
        if model.pooling is not None:
            tokens, _ = token_features(trunk, picture)
            logits = pooling(tokens, head(tokens))
        elif model.task.is_by_token:
            logits = head(token_features(trunk, picture)[0])
        else:
            logits = head(encode(trunk, picture))
        forward = counter.get_total_flops()
        if backward:
            logits.sum().backward()
    return Flops(forward, training=counter.get_total_flops())


def _of_gradients(of_output: torch.Size, inputs: torch.Size, kernel: torch.Size, *arguments: Any, **_: Any) -> int:
    """FLOPs of a convolution's backward pass, from shapes. The gradients of the inputs and of the kernel, if needed,
    each cost as much as the forward pass; torch's own formula ignores groups for the kernel's gradient."""
    for_inputs, for_kernel, _for_bias = arguments[-1]
    return (for_inputs + for_kernel) * conv_flop_count(list(inputs), list(kernel), list(of_output))
