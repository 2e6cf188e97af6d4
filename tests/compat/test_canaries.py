"""longseq uses parts of libraries that the libraries do not promise to keep: a test fails when a part changes."""

import copy
import inspect
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from jsonargparse import ArgumentParser
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from pytorch_lightning.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
from small_networks import onnx_of_sounds, tflite_of_sounds
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import lowering
from torchmetrics.classification import MulticlassAccuracy

from datamodules import Digits
from datamodules.compat import position_in_training, tflite_tensors, tflite_with_output, with_output
from longseq import ImageEncoder, Mechanism, Softmax
from longseq.compat import jsonargparse, lightning, timm, torchmetrics
from longseq.compat import torch as of_torch
from longseq.training import Classifier

# Digests of the timm code that longseq replaces, from the last comparison of the two (see longseq/compat/timm.py).
TIMM = {
    "1.0.31": {
        "VisionTransformer.forward": "baf4cb09a321c472",
        "VisionTransformer.forward_features": "00c84be8897149e5",
        "VisionTransformer._pos_embed": "7a2e167abcde1626",
        "VisionTransformer.pool": "9262402a3193eba1",
        "VisionTransformer.forward_head": "78a9dd72847e326c",
        "Block.forward": "2cb6f77c3039d89c",
        "Mlp.forward": "6dade48223cfc248",
        "PatchEmbed.forward": "a6ecc93628b12824",
        "Attention.__init__": "91d6fd3da04d70d9",
        "Attention.forward": "37a80e0fdf45af9c",
        "Eva.forward_features": "90770b0c066950d6",
        "Eva._pos_embed": "74d4d380a3e6973c",
        "EvaAttention.forward": "ab5e17e344c38aae",
        "AttentionRope.forward": "3f742ca1632dca04",
    },
}


def test_timms_forward_pass_is_the_one_that_longseq_stands_in_for() -> None:
    """If it fails, compare encoder.encode, block.run_block and patches.embed_patches with timm, and add its digests."""
    assert timm.digests() in TIMM.values(), f"timm {timm.version()} has changed: {timm.digests()}"


def test_lightnings_command_line_has_the_methods_that_are_overridden() -> None:
    assert list(inspect.signature(LightningCLI._prepare_subcommand_parser).parameters) == [
        "self", "klass", "subcommand", "kwargs",
    ]  # fmt: skip
    assert "self._parse_ckpt_path()" in inspect.getsource(LightningCLI.__init__)
    assert "_subcommand_method_arguments" in inspect.getsource(LightningCLI._prepare_subcommand_parser)
    assert list(inspect.signature(LightningCLI._get).parameters)[:3] == ["self", "config", "key"]
    assert list(inspect.signature(LightningCLI._run_subcommand).parameters) == ["self", "subcommand"]


def test_lightnings_launcher_and_signals_have_what_is_replaced() -> None:
    assert "self._child_processes" in inspect.getsource(_ChildProcessObserver)
    assert list(inspect.signature(_ChildProcessObserver._terminate_all).parameters) == ["self"]
    assert "self._sigterm_notifier_fn" in inspect.getsource(_SignalConnector.register_signal_handlers)


class Watching(pl.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []
        self.positions: list[tuple[int, int]] = []
        self.validations = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.seen.append((lightning.is_accumulating(trainer), lightning.is_followed_by_validation(trainer)))
        self.positions.append(position_in_training(trainer))

    def on_validation_start(self, *_: object) -> None:
        self.validations += 1


def trainer_of(folder: object, *callbacks: pl.Callback, **options: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", default_root_dir=str(folder), callbacks=list(callbacks), logger=False, limit_train_batches=4,
        limit_val_batches=1, num_sanity_val_steps=0, enable_model_summary=False,
        **{"max_epochs": 1, "enable_progress_bar": False, **options},
    )  # fmt: skip


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier(ImageEncoder((1, 8, 8), Softmax(), dim=8, depth=1, heads=1), 10)


def test_lightnings_loops_tell_where_a_training_is(tmp_path) -> None:
    watching = Watching()
    trainer = trainer_of(tmp_path, watching, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.fit(model(), datamodule=Digits())
    # the callback sees these values after the batch is done
    assert watching.seen == [(True, False), (False, False), (True, False), (False, True)]
    assert watching.positions == [(0, 1), (0, 2), (0, 3), (1, 0)]
    assert not lightning.is_finding_learning_rate(trainer)


def test_lightning_restores_a_checkpoint_within_a_context(tmp_path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.fit(model(), datamodule=Digits())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    resumed, events = trainer_of(tmp_path), []

    @contextmanager
    def watched():
        events.append("begin")
        try:
            yield
        except KeyError:
            events.append("fault")
            raise

    lightning.restore_within(resumed, watched)
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    torch.save({**checkpoint, "optimizer_states": [{}]}, tmp_path / "damaged.ckpt")
    with pytest.raises(KeyError):
        resumed.fit(model(), datamodule=Digits(), ckpt_path=tmp_path / "damaged.ckpt")
    assert events == ["begin", "begin", "fault"]


def test_what_lightnings_errors_are_about_is_known(tmp_path) -> None:
    """The callback in which an error was raised, whether Lightning raised it, and which argument the words name."""
    with pytest.raises(RuntimeError) as error:
        trainer_of(tmp_path, EarlyStopping("nothing")).fit(model(), datamodule=Digits())
    assert lightning.callback_behind(error.value, ()) == "EarlyStopping"
    with pytest.raises(ValueError, match="val_check_interval") as error:
        trainer_of(tmp_path, val_check_interval=100).fit(model(), datamodule=Digits())
    assert lightning.is_raised_by_lightning(error.value) and lightning.callback_behind(error.value, ()) is None
    with pytest.raises(ValueError, match="empty name") as error:
        Path().with_name("")
    assert not lightning.is_raised_by_lightning(error.value)
    names = inspect.signature(pl.Trainer).parameters
    for wrong in ({"gradient_clip_algorithm": "nonsense"}, {"max_epochs": -5}, {"val_check_interval": 1.5}):
        with pytest.raises(Exception) as error:  # noqa: PT011
            trainer_of(tmp_path, **wrong)
        assert next(word for word in lightning.words_of_arguments(str(error.value)) if word in names) in wrong


def test_a_checkpoint_can_be_put_before_its_validation(tmp_path) -> None:
    """A checkpoint from the end of an epoch then continues with the whole validation."""
    trainer = trainer_of(tmp_path)
    trainer.fit(model(), datamodule=Digits())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    lightning.put_before_validation(checkpoint["loops"]["fit_loop"])
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["current"]
    assert progress == {"ready": 1, "started": 1, "processed": 0, "completed": 0}


def test_a_training_by_steps_goes_on_from_an_epochs_end_with_the_next_epoch(tmp_path) -> None:
    class Batches(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            numbers.append(batch_idx)

    def resumed(prepare: Callable[[pl.Trainer], None]) -> None:
        steps = {"max_epochs": -1, "max_steps": 8}
        trainer = trainer_of(tmp_path, Batches(), check_val_every_n_epoch=2, enable_checkpointing=False, **steps)
        prepare(trainer)
        trainer.fit(model(), datamodule=Digits(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)

    saving = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    trainer_of(tmp_path, saving, check_val_every_n_epoch=2).fit(model(), datamodule=Digits())
    numbers: list[int] = []
    resumed(lightning.resume_exactly)
    assert numbers == [0, 1, 2, 3]
    numbers.clear()
    with pytest.raises(ZeroDivisionError):  # a fifth batch of four has no share in a step
        resumed(lambda _: None)
    assert numbers == [4]


def test_stochastic_weight_averaging_has_its_average(tmp_path) -> None:
    averaging = StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    assert not lightning.is_resumed_averaging(averaging)
    averaging._average_model = model()
    for weight in averaging._average_model.parameters():
        torch.nn.init.ones_(weight)
    averaged = model()
    lightning.take_average(averaging, averaged)
    assert all((weight == 1).all() for weight in averaged.parameters())


def test_a_checkpoint_says_by_which_figure_the_best_one_was_chosen(tmp_path) -> None:
    for mode in ("min", "max"):
        saving = ModelCheckpoint(tmp_path, monitor="val/x", mode=mode)
        assert lightning.watched_figure({saving.state_key: {}, "Other": {}}, "ModelCheckpoint") == (
            "val/x",
            mode == "min",
        )


def test_gradients_of_a_fused_optimizer_are_clipped_under_mixed_precision() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], fused=True)
    precision = MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(RuntimeError, match="fused"):
        precision.clip_gradients(optimizer, 1.0)
    lightning.leave_unscaling_to_lightning(optimizer)
    weight.grad = torch.full((1,), 4.0)
    precision.clip_gradients(optimizer, 1.0)
    assert weight.grad == pytest.approx(1.0)


def test_averages_over_steps_are_those_of_the_model_until_their_first_update(tmp_path) -> None:
    averaging, trained = WeightAveraging(), model()
    trainer = trainer_of(tmp_path, averaging)
    averaging.setup(trainer, trained, "fit")
    (average,) = lightning.running_averages(trainer)
    torch.nn.init.ones_(trained.head.weight)
    lightning.keep_unbegun_averages(trainer, trained)
    assert (average.head.weight == 1).all() and not lightning.has_averaged(averaging)
    assert averaging._average_model is not None
    averaging._average_model.update_parameters(trained)
    torch.nn.init.zeros_(trained.head.weight)
    lightning.keep_unbegun_averages(trainer, trained)
    assert (average.head.weight == 1).all() and lightning.has_averaged(averaging)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--a.x", "1"], ("no such option", "", "a.x", [])),
        (["--n", "1", "a file.wav"], ("no flag", "", "a file.wav", [])),
        (["--m", "Linformer", "--m.kk", "1"], ("no such argument", "m", "kk", [])),
        (["--m", "Linformer", "--m.k", "many"], ("wrong value", "m.k", "many", ["int", "list"])),
        (["--m", "Verna"], ("no such class", "m", "Verna", [])),
        (["--n", "1.5"], ("wrong value", "n", "1.5", ["int"])),
        (["--config", "/nowhere.yaml"], ("no such file", "", "/nowhere.yaml", [])),
        ([], ("missing", "", "n", [])),
    ],
)
def test_jsonargparses_reports_are_taken_apart(arguments, fault) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--n", type=int, required=not arguments)
    parser.add_subclass_arguments(Mechanism, "m", required=False)
    with pytest.raises(Exception) as error:  # noqa: PT011  (jsonargparse has its own exception class)
        parser.parse_args(arguments)
    found = jsonargparse.fault_of(str(error.value))
    kind, key, what, expected = fault
    assert (found.kind, found.what) == (kind, what), str(error.value)
    assert key in found.key
    assert all(any(said.startswith(each) for said in found.expected) for each in expected)
    assert {"n", "config"} <= jsonargparse.options_of(parser)


def test_the_word_none_names_a_class_where_jsonargparse_expects_one_of_its_kind() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--attention", type=Mechanism)
    parser.add_argument("--name", type=str)
    for none in ("None", {"class_path": "None"}):
        values = jsonargparse.with_name_for_none(parser, {"attention": none, "name": "None"}, Mechanism, "Softmax")
        assert parser.parse_object(values).as_dict() == {
            "attention": {"class_path": "longseq.Softmax", "init_args": {"length_scaling": 0.0, "rotary": False}},
            "name": "None",
        }


def test_jsonargparse_builds_every_class_where_its_refusal_is_noted() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[pl.Callback])
    config = parser.parse_args(["--callbacks+=Timer", "--callbacks.duration", "nonsense"])
    with pytest.raises(Exception, match="nonsense") as error:
        parser.instantiate(config)
    assert jsonargparse.refusing_class(error.value) is Timer
    assert jsonargparse.refusing_class(ValueError()) is None


def test_hooks_and_transformations_of_torch_are_seen() -> None:
    layer = torch.nn.Linear(2, 2)
    assert not of_torch.is_hooked(layer) and not of_torch.is_transformed()
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook):
        handle = register(lambda *_: None)
        assert of_torch.is_hooked(layer)
        handle.remove()
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(of_torch.is_transformed()), x)[1])(torch.zeros(2))
    torch.func.jvp(lambda x: (seen.append(of_torch.is_transformed()), x)[1], (torch.zeros(2),), (torch.ones(2),))
    assert seen == [True, True]


def test_backward_operators_of_torch_give_autograds_gradients() -> None:
    x, gamma, beta = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4), (4,), (4,)))
    grad = torch.randn(3, 4)
    (expected,) = torch.autograd.grad(F.gelu(x), x, grad)
    torch.testing.assert_close(of_torch.gelu_backward(grad, x), expected)
    normed, mean, rstd = torch.native_layer_norm(x, gamma.shape, gamma, beta, 1e-5)
    found = of_torch.layer_norm_backward(grad, x, mean, rstd, gamma, beta)
    torch.testing.assert_close(found, torch.autograd.grad(normed, (x, gamma, beta), grad))


def test_torch_says_that_memory_is_too_little_in_the_known_words() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert of_torch.is_out_of_memory(error.value)
    assert of_torch.asked_of_memory(error.value) in (None, f"{1 << 40} MiB")


def test_torch_names_a_gpu_to_nvml() -> None:
    (argument,) = inspect.signature(torch.cuda._get_pynvml_handler).parameters
    assert argument == "device"
    assert "return handle" in inspect.getsource(torch.cuda._get_pynvml_handler)
    # energy is read with it in the way in which torch itself reads the power
    assert "handle = _get_pynvml_handler" in inspect.getsource(torch.cuda.memory_usage)


def test_torchmetrics_states_come_back_in_one_metric() -> None:
    first, second, whole = (MulticlassAccuracy(3, average="micro") for _ in range(3))
    first.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    second.update(torch.tensor([0]), torch.tensor([1]))
    torchmetrics.restore_states(whole, [torchmetrics.state_of(each) for each in (first, second)], torch.device("cpu"))
    assert (whole.compute(), whole.update_count) == (2 / 4, 2)


def test_a_module_that_was_compiled_is_known() -> None:
    module = torch.nn.Linear(2, 2)
    assert not of_torch.is_compiled(module)
    module.compile()
    assert of_torch.is_compiled(module)


def test_the_call_of_a_module_can_be_replaced_and_a_copy_has_its_own() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: torch.ones(3))
    plain = of_torch.plain_call(module)
    of_torch.replace_call(module, lambda inputs: 2 * plain(module, inputs))
    assert of_torch.is_compiled(module)
    assert torch.equal(module(torch.zeros(2)), 2 * torch.ones(3))
    assert torch.equal(copy.deepcopy(module)(torch.zeros(2)), torch.ones(3))


def test_torch_compiles_for_as_many_shapes_as_asked_for_and_of_itself_for_eight() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    for most, expected in ((1, 8), (10, 10)):
        torch.compiler.reset()
        graphs.clear()
        compiled = of_torch.compile_for_shapes(twice, most, backend=backend)
        with torch._dynamo.config.patch(recompile_limit=8):  # torch's own; timm raises it
            assert all(torch.equal(compiled(torch.ones(size)), 2 * torch.ones(size)) for size in range(2, 14))
        assert len(graphs) == expected


def test_torch_measures_how_long_it_compiles_forward_and_backward() -> None:
    def slow(graph: Any, inputs: Any) -> Any:
        time.sleep(0.3)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(lambda x: (x * x).sum(), backend=aot_autograd(fw_compiler=slow, bw_compiler=slow))
    readings, began = [of_torch.seconds_of_compilations()], []
    for _ in range(2):
        began.append(time.monotonic())
        compiled(torch.ones(3, requires_grad=True)).backward()
        readings.append(of_torch.seconds_of_compilations())
    assert 0.6 < readings[1] - readings[0] <= began[1] - began[0]
    assert readings[2] == readings[1]  # the second call compiles nothing


def test_torch_warns_in_the_known_words_that_it_calls_a_library_for_a_fourier_transform() -> None:
    assert "Torchinductor does not support code generation for complex operators" in inspect.getsource(lowering)


def test_lightning_tells_the_trainer_of_a_model(tmp_path) -> None:
    untrained = model()
    assert lightning.trainer_of(untrained) is None
    trainer = trainer_of(tmp_path, enable_checkpointing=False)
    trainer.fit(untrained, datamodule=Digits())
    assert lightning.trainer_of(untrained) is trainer


@pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
def test_a_bar_of_lightning_counts_epochs_from_one_and_shows_texts_beside_it(tmp_path, kind, monkeypatch) -> None:
    for patched, name in (
        (RichProgressBar, "_get_train_description"), (TQDMProgressBar, "on_train_epoch_start")
    ):  # fmt: skip
        monkeypatch.setattr(patched, name, getattr(patched, name))  # undone after the test
    lightning.count_epochs_from_one()
    described, shown = [], []

    class Reads(pl.Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            lightning.show_beside_bar(trainer, lambda: {"left": "9 min"})

        def on_validation_start(self, trainer, pl_module) -> None:
            bar = trainer.progress_bar_callback.train_progress_bar
            described.append(bar.description.strip() if kind is RichProgressBar else bar.desc.removesuffix(": "))
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module)["left"])

    options = {"enable_progress_bar": True, "max_epochs": 2, "enable_checkpointing": False}
    trainer = trainer_of(tmp_path, Reads(), kind(), **options)
    trainer.fit(model(), datamodule=Digits(batch_size=512))
    assert [text.split("]")[-1] for text in described] == ["Epoch 1/2", "Epoch 2/2"]
    assert shown == ["9 min", "9 min"]


def test_libgomps_threads_spin_briefly_while_there_are_more_of_them_than_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a training beside busy processes is slow again (see longseq/cli/process/spinning.py)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000000000")  # longer than this test
    code = """
import threading, time, torch
from longseq.compat.openmp import has_libgomp, spin_briefly
assert has_libgomp()

def spinning_of():
    torch.ones(2**18).add_(1)  # both threads have a part; then the other one waits for the next part
    before = time.process_time()
    time.sleep(0.4)
    return time.process_time() - before

until = threading.Event()
holder = threading.Thread(target=spin_briefly, args=(until,))
print(spinning_of())
holder.start()
time.sleep(0.2)
print(spinning_of())
until.set()
holder.join()  # libgomp frees the thread's team when the thread itself ends, which can be later than Python's join
print(next((seconds for seconds in (spinning_of() for _ in range(20)) if seconds > 0.01), 0.0))
"""
    done = forked.run("-c", code, cwd=tmp_path, fresh=True)
    before, meanwhile, after = map(float, done.stdout.split())
    assert meanwhile < 0.005 < 0.01 < min(before, after), done


def test_onnxruntime_joins_the_outputs_of_two_messages(tmp_path: Path) -> None:
    import onnxruntime

    onnx_of_sounds(tmp_path / "m.onnx")
    changed = with_output((tmp_path / "m.onnx").read_bytes(), "embedding")
    session = onnxruntime.InferenceSession(changed, providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_outputs()] == ["scores", "embedding"]


def test_litert_has_the_schema_of_its_files(tmp_path: Path) -> None:
    from ai_edge_litert.interpreter import Interpreter

    tflite_of_sounds(tmp_path / "m.tflite")
    content = (tmp_path / "m.tflite").read_bytes()
    outputs, made = tflite_tensors(content)
    assert (list(outputs), list(made)) == (["scores"], ["embedding", "scores"])
    changed = Interpreter(model_content=tflite_with_output(content, made["embedding"]))
    assert [entry["name"] for entry in changed.get_output_details()] == ["embedding"]
