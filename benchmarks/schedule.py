"""Kernels, bytes and graph breaks of a compiled training step on an H100, computed without one.

    python benchmarks/schedule.py [--n 4096 16384 65536] [--width 192 384 768] [--out FOLDER]

TorchInductor plans its kernels from shapes and from a description of the GPU alone. This script describes an H100, lets
TorchInductor plan the forward and backward pass of a module in bfloat16, and reads the plan. Nothing is run and no time
is measured. The functions of torch.cuda that would ask a driver are replaced while a plan is made. What differs from a
real GPU: attention is the CPU's operator (one kernel forward, one backward, as FlashAttention), and the passes that ask
the driver are left out. The optimizer is not included.
"""

import argparse
import copy
import itertools
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.device_interface as device_interface
import torch._functorch.config as functorch_config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
import torch.nn.functional as F
from in_turns import Bench, Row, as_measured, our_layer, write_within
from jsonargparse.typing import PositiveInt
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_map_only

from longseq import ImageEncoder, Linformer, Softmax, SpectrogramEncoder, Verma
from longseq.attention import Mechanism
from longseq.attention import layer as attention_layer
from longseq.attention.grid import TokenGrid
from longseq.attention.query_groups import num_groups
from longseq.encoders import Conv1d, Conv2d, local
from longseq.encoders._block import run_block
from longseq.encoders.local import LocalBlock
from longseq.reports.plots import Report, markdown

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20, gcnArchName="",
    type="cuda", shared_memory_per_block_optin=232448, shared_memory_per_block=49152, max_threads_per_block=1024,
    shared_memory_per_multiprocessor=233472,
)  # fmt: skip
FLOPS_PER_SECOND = 0.72 * 989e12  # what large products reach, of the peak in bfloat16; attention reaches less
BYTES_PER_SECOND = 0.85 * 3.35e12  # what elementwise kernels reach, of the memory's bandwidth
# operations that only change a tensor's precision or place; a kernel of these alone is a cast
COPIES = {
    "cat", "clone", "convert_element_type", "full", "permute", "reshape", "select", "slice", "slice_scatter", "split",
    "squeeze", "unsqueeze", "view",
}  # fmt: skip
HEADER = ["measured", "attention", "local", "tokens", "width", "kernels", "products", "casts", "attention and others"]
HEADER += ["elementwise", "elementwise, MB", "products, GFLOP", "ms at best", "graphs", "breaks"]


@dataclass(frozen=True)
class Kernel:
    """A kernel of the plan.

    Attributes:
        kind: ``product``, ``cast``, ``elementwise`` (also reductions), or ``other``: attention, convolutions, FFT.
        name: The operator, or ``triton``.
        operations: What a Triton kernel computes.
        size: Of its first result.
        bytes: Read and written.
        flops: Of products and attention.
        is_backward: Whether it is part of the backward pass.
    """

    kind: str
    name: str
    operations: tuple[str, ...]
    size: tuple[int, ...]
    bytes: int
    flops: int
    is_backward: bool

    @property
    def seconds(self) -> float:
        """At the rates that large kernels reach; its start is not included."""
        return max(self.flops / FLOPS_PER_SECOND, self.bytes / BYTES_PER_SECOND)


@dataclass
class Schedule:
    """The kernels of a forward and backward pass, the number of graphs, and the reasons why it broke into these."""

    kernels: list[Kernel] = field(default_factory=list)
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)

    def count(self, *kinds: str) -> int:
        return sum(kernel.kind in kinds for kernel in self.kernels)

    @property
    def megabytes(self) -> float:
        """Traffic of casts and elementwise kernels."""
        return sum(kernel.bytes for kernel in self.kernels if kernel.kind in ("cast", "elementwise")) / 1e6


class _Anything:
    """Stands for a stream or a context of a device that is not there."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __enter__(self) -> "_Anything":
        return self

    def __exit__(self, *_: Any) -> None: ...


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _described_gpu() -> ExitStack:
    """A context in which torch.cuda and TorchInductor see an H100."""
    interface = device_interface.CudaInterface
    cuda = {
        "get_device_properties": H100, "get_device_capability": (9, 0), "is_available": True, "device_count": 1,
        "current_device": 0, "_lazy_init": None, "is_bf16_supported": True, "get_device_name": H100.name,
        "synchronize": None, "is_initialized": True, "set_rng_state": None, "is_current_stream_capturing": False,
        "current_stream": _Anything(),
    }  # fmt: skip
    places: list[tuple[Any, str, Any]] = [(torch.cuda, name, _always(value)) for name, value in cuda.items()]
    places += [(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())]
    places += [(torch.cuda, name, _Anything) for name in ("device", "_DeviceGuard")]
    places += [(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", _always(False))]
    places += [(torch.accelerator, "is_available", _always(False)), (torch._C, "_cuda_getDevice", _always(0))]
    facts = {"get_device_properties": H100, "current_device": 0, "is_available": True}
    places += [(interface, name, staticmethod(_always(value))) for name, value in facts.items()]
    places += [(interface.Worker, name, staticmethod(_always(facts[name]))) for name in list(facts)[:2]]
    # fused patterns are tried out on the device, and so is what may be written in place
    places += [(joint_graph, "lazy_init", _always(None)), (post_grad, "lazy_init", _always(None))]
    places += [(post_grad, "reinplace_inplaceable_ops", _always(None))]
    # what longseq itself decides by the device
    places += [(attention_layer, "_is_small", _always(False)), (attention_layer, "groups_for", _groups_for)]
    places += [(attention_layer, "suits_few_keys", lambda heads: heads.keys.shape[2] <= 256)]
    places += [(local, "suits_local_kernel", _always(True))]
    stack = ExitStack()
    for where, name, value in places:
        stack.enter_context(patch.object(where, name, value, create=True))
    stack.enter_context(patch.object(config, "fx_graph_cache", False))
    stack.enter_context(patch.object(functorch_config, "force_non_lazy_backward_lowering", True))
    return stack


def _groups_for(queries: Tensor, keys: Tensor) -> int:
    b, h, n, _ = queries.shape
    return num_groups(b, h, n, keys.shape[2], H100.multi_processor_count)


def _kernels(lowered: GraphLowering) -> Iterator[Kernel]:
    if lowered.wrapper_code is None:
        lowered.init_wrapper_code()
    lowered._update_scheduler()
    with V.set_graph_handler(lowered):
        for planned in lowered.scheduler.nodes:
            parts = [part.node for part in planned.get_nodes()]
            first: Any = parts[0]
            external = type(planned).__name__ in ("ExternKernelSchedulerNode", "NopKernelSchedulerNode")
            kind = type(first).__name__
            if kind == "MultiOutput" or type(planned).__name__ == "NopKernelSchedulerNode":
                continue  # a name for a result, not a kernel
            origins = {str(origin.target) for part in parts for origin in part.origins or ()}
            operations = sorted({origin.split(".")[1] for origin in origins if "." in origin})
            name = str(getattr(first, "op_overload", None) or getattr(first, "python_kernel_name", None) or kind)
            name = str(getattr(first, "python_kernel_name", None) or name) if external else "triton"
            if not external:
                kind = "cast" if set(operations) <= COPIES else "elementwise"
            else:
                kind = "product" if "mm" in name else "other"
            yield Kernel(
                kind,
                name,
                tuple(operations),
                _size(first),
                int(planned.get_read_write_buffers_sizes()),
                _flops_of_attention(first) if _is_attention(name) else int(planned.estimate_flops() or 0),
                lowered.is_backward,
            )


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name or "few_keys" in name


def _flops_of_attention(part: Any) -> int:
    """Two products forward, five backward, each 2 n k c FLOPs for a head."""
    is_backward = "backward" in str(part.python_kernel_name)
    queries, keys = (part.inputs[place + is_backward].get_size() for place in (0, 1))
    return (10 if is_backward else 4) * math.prod(map(int, queries)) * int(keys[2])


def _size(part: Any) -> tuple[int, ...]:
    try:
        return tuple(int(side) for side in part.get_size())
    except NotImplementedError:  # a kernel of several results
        return ()


def _moved(graph: torch.fx.GraphModule, inputs: list[Any]) -> tuple[torch.fx.GraphModule, list[Any], FakeTensorMode]:
    """A copy of a graph and of its inputs on the GPU."""
    graph = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    graph.recompile()
    mode = FakeTensorMode()
    with mode:
        there = [
            torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="cuda")
            if isinstance(part, Tensor)
            else part
            for part in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
    return graph, there, mode


def _partition(joint: torch.fx.GraphModule, *arguments: Any, **named: Any) -> Any:
    joint_graph.joint_graph_passes(joint)
    return min_cut_rematerialization_partition(joint, *arguments, compiler="inductor", **named)


def schedule(module: nn.Module, *inputs: Any, autocasts: bool = True) -> Schedule:
    """The plan of a module's forward and backward pass in bfloat16; the module becomes useless.

    Args:
        module: On the CPU. If its result is no number, the backward pass starts at the sum of the result.
        autocasts: Whether this is autocast (bf16-mixed). Otherwise the weights and the inputs become bfloat16
            (bf16-true), and with these the residual stream.
        inputs: Tensors on the CPU, or tuples and dictionaries of these; they are never read.
    """
    plan = Schedule()

    def compiler(is_backward: bool) -> Callable[..., Any]:
        def lower(graph: torch.fx.GraphModule, given: list[Any]) -> Any:
            moved, there, mode = _moved(graph, given)
            plan.graphs += not is_backward
            with tracing(TracingContext(mode)), patch.object(GraphLowering, "compile_to_module", note):
                compile_fx_inner(moved, there, is_backward=is_backward, static_input_idxs=())

            def boxed(arguments: list[Any]) -> Any:
                return graph(*arguments)  # fake tensors for the next graph

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return lower

    def note(lowered: GraphLowering) -> Any:
        plan.kernels += _kernels(lowered)
        return types.SimpleNamespace(call=_always(None), __file__="")

    def backend(graph: torch.fx.GraphModule, given: list[Any]) -> Any:
        return aot_module_simplified(
            graph,
            given,
            fw_compiler=compiler(False),
            bw_compiler=compiler(True),
            partition_fn=_partition,
            decompositions=select_decomp_table(),
        )

    torch.compiler.reset()
    counters.clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not autocasts:
        module = module.bfloat16()
        inputs = tree_map_only(Tensor, _in_bfloat16, inputs)
    with _described_gpu(), mode, torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        faked = tree_map_only(Tensor, mode.from_tensor, inputs)
        out = torch.compile(_fake(module, mode), backend=backend)(*faked)
        if out.requires_grad:
            out.sum().backward()
    plan.breaks = [reason.splitlines()[0] for reason, count in counters["graph_break"].items() for _ in range(count)]
    return plan


def _in_bfloat16(part: Tensor) -> Tensor:
    return part.detach().bfloat16().requires_grad_(part.requires_grad) if part.is_floating_point() else part


def _fake(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The module with tensors without numbers; tensors that layers share stay shared."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        tensors: Any
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = made.setdefault(id(tensor), mode.from_tensor(tensor))
    return module


class Step(nn.Module):
    """The loss of a classifier, as in a training step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).float(), labels)


class OurBlock(nn.Module):
    """A block as the encoders run it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, tokens: Tensor) -> Tensor:
        return run_block(self.block, tokens, None, None)


def sides(n: int) -> tuple[int, int]:
    """Height and width of an image with n pixels."""
    height = 1 << (n.bit_length() - 1) // 2
    return height, n // height


def block(mechanism: Mechanism, is_local: bool, n: int, width: int, batch: int, depth: int) -> tuple[nn.Module, Tensor]:
    """One block, whatever the depth; with Softmax timm's own."""
    made: Any = Block(width, max(width // 64, 1), qkv_bias=False)
    tokens = torch.empty(batch, n, width, requires_grad=True)
    if isinstance(mechanism, Softmax):
        return made, tokens
    made.attn = our_layer(Bench("cuda", width, max(width // 64, 1), ("bf16",), (n,), (), ()), mechanism, n)
    if is_local:
        local1, local2 = (Conv2d().build(width, TokenGrid(sides(n))) for _ in range(2))
        made = LocalBlock(made, local1, local2)
    return OurBlock(made), tokens


def image(
    mechanism: Mechanism, is_local: bool, n: int, width: int, batch: int, depth: int
) -> tuple[nn.Module, Tensor, Tensor]:
    """A training step on images, every pixel a token; with Softmax timm's model."""
    size, heads = sides(n), max(width // 64, 1)
    if isinstance(mechanism, Softmax):
        model: nn.Module = VisionTransformer(
            size, 1, num_classes=10, global_pool="avg", class_token=False, embed_dim=width, depth=depth, num_heads=heads  # type: ignore[arg-type]
        )  # fmt: skip
    else:
        mixing = Conv2d() if is_local else None
        encoder = ImageEncoder((3, *size), mechanism, dim=width, depth=depth, heads=heads, local=mixing)
        model = nn.Sequential(as_measured(encoder), nn.Linear(width, 10))
    return Step(model), torch.empty(batch, 3, *size), torch.zeros(batch, dtype=torch.long)


def sound(
    mechanism: Mechanism, is_local: bool, n: int, width: int, batch: int, depth: int
) -> tuple[nn.Module, Tensor, Tensor]:
    """A training step on clips of one length, every frame of 10 ms a token."""
    sizes: dict[str, Any] = {"dim": width, "depth": depth, "heads": max(width // 64, 1)}
    encoder = SpectrogramEncoder(16000, (n - 1) / 100, mechanism, local=Conv1d() if is_local else None, **sizes)
    model = nn.Sequential(as_measured(encoder), nn.Linear(width, 10))  # type: ignore[arg-type]
    return Step(model), torch.empty(batch, 160 * (n - 1)), torch.zeros(batch, dtype=torch.long)


PARTS: dict[str, Callable[..., tuple[Any, ...]]] = {part.__name__: part for part in (block, image, sound)}
MECHANISMS: dict[str, Callable[[int], Mechanism]] = {
    "Linformer": lambda n: Linformer(min(128, n // 4)),
    "Verma": lambda _: Verma(),
    "exact": lambda _: Softmax(),  # timm's own
}


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    flags = arguments.parts, arguments.width, arguments.n, arguments.attention, arguments.local
    for part, width, n, name, has_local in itertools.product(*flags):
        is_local = has_local == "yes"
        if name == "exact" and (is_local or part == "sound"):
            continue  # timm's blocks have no local mixing, and timm has no encoder of sounds
        module, *inputs = PARTS[part](MECHANISMS[name](n), is_local, n, width, arguments.batch, arguments.depth)
        if arguments.precision == "bf16-residual":
            if part != "block":
                continue  # pixels and waveforms are float32
            inputs = [_in_bfloat16(inputs[0])]
        with config.patch(combo_kernels=arguments.combo):
            plan = schedule(module, *inputs, autocasts=arguments.precision != "bf16-true")
        what = "block" if part == "block" else f"step on {part}s, depth {arguments.depth}"
        counts = [len(plan.kernels), *map(plan.count, ("product", "cast", "other", "elementwise"))]
        flops = sum(kernel.flops for kernel in plan.kernels if kernel.kind == "product")
        best = sum(kernel.seconds for kernel in plan.kernels)
        amounts = [f"{plan.megabytes:.0f}", f"{flops / 1e9:.3g}", f"{1e3 * best:.3g}", plan.graphs, len(plan.breaks)]
        if arguments.kernels:
            print_kernels(plan)
        yield [str(cell) for cell in (what, name, has_local, n, width, *counts, *amounts)]


def print_kernels(plan: Schedule) -> None:
    for kernel in plan.kernels:
        pass_, size = "backward" if kernel.is_backward else "forward", "x".join(map(str, kernel.size))
        what = kernel.name.removeprefix("extern_kernels.") if kernel.name != "triton" else ", ".join(kernel.operations)
        print(
            f"{pass_:9s}{kernel.kind:12s}{kernel.bytes / 1e6:9.2f} MB{kernel.flops / 1e9:8.2f} GFLOP  {size:16s} {what}"
        )
    for reason in plan.breaks:
        print(f"graph break: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=PositiveInt, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--width", type=PositiveInt, nargs="+", default=[192, 384, 768])
    parser.add_argument("--batch", type=PositiveInt, default=1)
    parser.add_argument("--depth", type=PositiveInt, default=2, help="blocks of a training step's model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--attention", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--local", nargs="+", choices=("no", "yes"), default=["no", "yes"], help="local mixing")
    parser.add_argument("--precision", choices=("bf16-mixed", "bf16-residual", "bf16-true"), default="bf16-mixed")
    parser.add_argument("--combo", action="store_true", help="with TorchInductor's combo_kernels")
    parser.add_argument("--kernels", action="store_true", help="print each kernel too")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no row after this time")
    parser.add_argument("--out", type=Path, default=Path("docs/results/schedule"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(markdown(HEADER, []), end="")
    about = f"Computed, not measured: torch {torch.__version__}'s plan for one {H100.name}."
    report = Report(arguments.out, about, sys.argv)
    write_within(
        arguments.minutes, rows(arguments), lambda done, late: report.write(HEADER, done, markdown(HEADER, done) + late)
    )


if __name__ == "__main__":
    main()
