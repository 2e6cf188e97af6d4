"""Compile the kernels of local mixing for an H100, without one, and print what ptxas says of registers."""

import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longseq.encoders import _local_kernels as kernels

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
NUMBERS = {
    "mix": "n tiles prefix columns d x_b x_n mask_b out_b out_n",
    "sum_gradients": "n tiles of_sample prefix columns d per_program grad_b grad_n x_b x_n mask_b",
}
WIDE = {"d", "x_b", "x_n", "out_b", "out_n", "grad_b", "grad_n"}  # multiples of 16


def spilled(name: str, pointers: dict[str, str], constants: dict[str, int], warps: int) -> str:
    """ptxas's words on registers and on the numbers that do not fit into these."""
    kernel = getattr(kernels, name)
    signature = pointers | dict.fromkeys(NUMBERS[name].split(), "i32") | dict.fromkeys(constants, "constexpr")
    even = {*pointers, *WIDE} & set(signature)
    attributes = {(kernel.arg_names.index(part),): [["tt.divisibility", 16]] for part in even}
    given = {(kernel.arg_names.index(part),): value for part, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    for number in ("*fp32", "*bf16"):
        of_mix = {"x": number, "taps": "*fp32", "bias": "*fp32", "mask": number, "out": number}
        of_sums = {"grad": number, "x": number, "mask": number, "parts": "*fp32"}
        sizes = {"HEIGHT": 3, "WIDTH": 3, "IS_MASKED": False, "CHANNELS": 64}
        print(spilled("mix", of_mix, {**sizes, "IS_BACKWARD": False, "BLOCK": 32}, 8))
        print(spilled("mix", of_mix, {**sizes, "IS_BACKWARD": True, "BLOCK": 32}, 8))
        print(spilled("sum_gradients", of_sums, {**sizes, "TAPS": 16, "BLOCK": 4}, 4))
