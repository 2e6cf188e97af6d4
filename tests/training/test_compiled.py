"""A compiled encoder meets few shapes, and gives what it gives without."""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from encoder_kinds import KINDS
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset

from datamodules import Digits
from longseq import Linformer, Softmax, Verma
from longseq.arguments import SettingError
from longseq.compat import torch as of_torch
from longseq.compat.torch import is_compiled
from longseq.encoders import Encoder, ImageEncoder, SpectrogramEncoder, WaveformEncoder
from longseq.encoders.forward_pass import encode
from longseq.encoders.sound import padded_clips
from longseq.training import Classifier, classifier, compiled
from longseq.training.compiled import compile_encoder
from longseq.training.generators import GeneratorStates


class Graphs(list):
    """A backend of torch.compile: it has each graph, and runs it as it is."""

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.append(graph)
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """The graphs of all compilations in a test, with torch's own limit of 8."""
    torch.compiler.reset()
    made = Graphs()
    monkeypatch.setattr(classifier, "compile_encoder", partial(compile_encoder, backend=made))
    with torch._dynamo.config.patch(recompile_limit=8):
        yield made


def encoder_of_images(**change: Any) -> ImageEncoder:
    torch.manual_seed(0)
    return ImageEncoder((1, 8, 8), Linformer(7), **{"dim": 8, "depth": 1, "heads": 2, **change})


def trainer_of(folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", default_root_dir=str(folder), logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"max_epochs": 2, **options},
    )  # fmt: skip


def loader(samples: int, batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (samples, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(samples) % 3), batch_size)


def test_epochs_with_a_smaller_last_batch_and_validations_compile_once_each(tmp_path: Path, graphs: Graphs) -> None:
    model = Classifier(encoder_of_images(), 3, compile=True)
    trainer = trainer_of(tmp_path, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="never measured"):
        trainer.fit(model, loader(10, 4), loader(8, 3))
    assert len(graphs) == 2
    trainer.test(model, loader(2, 3), verbose=False)  # a whole batch has as many samples as there are
    assert len(graphs) == 3


class Foreign:
    """A loader of another library, which has only a batch size."""

    batch_size = 4

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(10, 4))


def test_loaders_of_which_only_the_batch_size_is_known_are_trained_from(tmp_path: Path, graphs: Graphs) -> None:
    model = Classifier(encoder_of_images(), 3, compile=True)
    trainer = trainer_of(tmp_path, enable_checkpointing=False)
    endless = DataLoader(loader(8, 4).dataset, 4, sampler=iter(range(8)))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="never measured"):
        trainer.fit(model, Foreign(), endless)
    assert len(graphs) == 2


def test_losses_and_metrics_are_those_of_the_samples_alone(tmp_path: Path, graphs: Graphs) -> None:
    figures = []
    for compiles in (False, True):
        encoder = encoder_of_images()
        encoder.set_statistics(torch.full((1, 1, 1), 128.0), torch.full((1, 1, 1), 64.0))
        model = Classifier(encoder, 3, compile=compiles)
        trainer = trainer_of(tmp_path, enable_checkpointing=False)
        trainer.fit(model, loader(10, 4), loader(8, 3))
        figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
    assert len(graphs) == 2


def test_a_compiled_training_resumed_at_the_smaller_last_batch_is_bit_equal(tmp_path: Path, graphs: Graphs) -> None:
    def trained(folder: Path, resume: str | None = None) -> dict[str, torch.Tensor]:
        pl.seed_everything(0 if resume is None else 1)
        torch.compiler.reset()
        model = Classifier(encoder_of_images(dropout=0.1), 10, compile=True)
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = trainer_of(folder, limit_val_batches=0, callbacks=[saving, GeneratorStates()])
        trainer.fit(model, datamodule=Digits(batch_size=500), ckpt_path=resume, weights_only=True)
        return model.state_dict()

    whole = trained(tmp_path / "whole")
    resumed = trained(tmp_path / "resumed", str(tmp_path / "whole/step=2.ckpt"))
    assert len(graphs) == 2  # one in each process
    assert all(torch.equal(weight, whole[name]) for name, weight in resumed.items())


def without_chance(encoder: Encoder) -> Encoder:
    """In training, without what differs between batches."""
    encoder.set_statistics(encoder.mean, encoder.std)
    encoder.double().train().augment = lambda picture: picture
    for part in encoder.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eval()
    return encoder


def outputs_and_gradients(encoder: Encoder, inputs: Any) -> list[torch.Tensor]:
    encoder.zero_grad()
    features = encoder(inputs)
    tokens, present = encoder.token_features(inputs)
    of_inputs, of_tokens, _ = encoder.all_features(inputs)
    there = torch.ones(tokens.shape[:2], dtype=torch.bool) if present is None else present
    parts = features, tokens[there], of_inputs, of_tokens[there]
    torch.stack([(part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in parts]).sum().backward()
    return [*parts, *(weight.grad.clone() for weight in encoder.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("mechanism", [Softmax(), Linformer(7), Verma()], ids=repr)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_features_and_gradients_are_those_without_padding(kind: Any, mechanism: Any) -> None:
    for encoder, inputs in kind.examples(mechanism):
        without_chance(encoder)
        batches = [inputs]
        if kind.kind == "sounds":
            longest = encoder.num_samples
            channels = (encoder.channels,) if encoder.channels > 1 else ()
            batches = [padded_clips(longest * 5 // 9, longest // 4, 3, channels=encoder.channels)]
            batches += [torch.randn(2, *channels, longest * 2 // 3)]
            batches = [tree_map(lambda part: part.double() if part.is_floating_point() else part, b) for b in batches]
        expected = [outputs_and_gradients(encoder, batch) for batch in batches]
        compile_encoder(encoder, True, lambda: 5, disable=True)  # the compiler does nothing, but the batches are padded
        for batch, values in zip(batches, expected, strict=True):
            ours = outputs_and_gradients(encoder, batch)
            for value, other in zip(ours, values, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-9)


def shapes_seen(encoder: Encoder) -> list[tuple[int, ...]]:
    """The shapes of all batches that reach the encoder from now on."""
    seen = []
    plain = encoder.front_end

    def front_end(inputs: Any) -> torch.Tensor:
        seen.append(tuple(tree_leaves(inputs)[0].shape))
        return plain(inputs)

    encoder.front_end = front_end  # type: ignore[method-assign]
    return seen


def test_ten_lengths_of_clips_are_eight_at_most_and_all_are_compiled(graphs: Graphs) -> None:
    torch.manual_seed(0)
    encoder = WaveformEncoder(8000, 0.05, Verma(), patch_size=4, dim=8, depth=1, heads=2, positions="none")
    encoder.set_statistics(encoder.mean, encoder.std)
    plain = copy.deepcopy(encoder)
    compile_encoder(encoder, True, lambda: 3, backend=graphs)
    for samples in range(40, 401, 40):
        clips = padded_clips(samples, 30, 7)
        torch.testing.assert_close(encoder(clips), plain(clips), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 8
    encoder.eval()
    for samples in range(40, 401, 40):
        encoder(padded_clips(samples, 30, 7))
    assert len(graphs) == 16


def test_clips_are_padded_to_the_longest_at_most_and_recordings_run_as_they_are() -> None:
    sizes: dict[str, Any] = {"dim": 8, "depth": 1, "heads": 2, "positions": "none", "any_length": True}
    encoder = WaveformEncoder(1000, 0.1, Verma(), **sizes)
    encoder.set_statistics(encoder.mean, encoder.std)
    seen = shapes_seen(encoder)
    compile_encoder(encoder.eval(), True, lambda: 2, disable=True)
    for samples in (13, 14, 99, 100, 101, 555):
        encoder(torch.randn(1, samples))
    assert seen == [(2, 13), (2, 26), (2, 100), (2, 100), (1, 101), (1, 555)]
    seen.clear()
    encoder.train()(torch.randn(1, 101))
    assert seen == [(2, 104)]


def test_a_batch_is_not_padded_if_its_samples_depend_on_each_other_or_a_whole_one_is_unknown() -> None:
    encoder, images = ImageEncoder.examples(Linformer(7))[2]  # BatchNorm in its stem
    encoder.set_statistics(encoder.mean, encoder.std)
    seen = shapes_seen(encoder)
    whole: int | None = 5

    compile_encoder(encoder, True, lambda: whole, disable=True)
    encoder(images)
    encoder.eval()(images)
    whole = None
    encoder(images)
    whole = 2  # a larger batch than the loader's
    encoder(images)
    assert [shape[0] for shape in seen] == [3, 5, 3, 3]


def test_an_encoder_is_measured_on_the_samples_alone(graphs: Graphs) -> None:
    encoder = SpectrogramEncoder(8000, 0.4, Verma(), num_mels=20, dim=8, depth=1, heads=2)
    clips = padded_clips(2000, 1000, 90)
    expected = copy.deepcopy(encoder)
    expected.measure([clips])
    compile_encoder(encoder, True, lambda: 9, backend=graphs)
    with pytest.warns(UserWarning, match="never measured"):
        encoder(clips)
    assert torch.equal(encoder.mean, expected.mean)
    assert len(graphs) == 1


def test_a_copy_of_a_compiled_encoder_has_weights_of_its_own() -> None:
    encoder = encoder_of_images().eval()
    compile_encoder(encoder, True, lambda: 4, disable=True)
    twin, images = copy.deepcopy(encoder), torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    before = encoder.token_features(images)[0]
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.zero_()
    assert torch.equal(twin.token_features(images)[0], before)
    assert is_compiled(encoder)
    assert list(twin.state_dict()) == list(encoder_of_images().state_dict())


@pytest.mark.parametrize("accumulated", [1, 3])
def test_gradients_that_are_accumulated_stay_where_they_are_under_cuda_graphs(accumulated: int, tmp_path: Path) -> None:
    """A graph overwrites what it has made, so gradients are added to tensors of their own; the training is the same."""
    trained = []
    for how in (False, "reduce-overhead"):
        model = Classifier(encoder_of_images(), 3, compile=how, optimizer="sgd")  # type: ignore[arg-type]
        places: list[set[int]] = []
        watch = LambdaCallback(
            on_before_optimizer_step=lambda _, model, __, places=places: places.append(
                {weight.grad.data_ptr() for weight in model.parameters()}
            )
        )
        options = {"callbacks": [watch], "enable_checkpointing": False, "accumulate_grad_batches": accumulated}
        with pytest.warns(UserWarning, match="never measured"):
            trainer_of(tmp_path, **options).fit(model, loader(12, 2))
        trained.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
        if how and accumulated > 1:
            assert len(set(map(frozenset, places))) == 1, "gradients moved"
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-4, atol=1e-6)


def test_outputs_of_an_evaluation_are_not_in_a_graphs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(2, 8)
    monkeypatch.setattr(
        compiled, "compile_for_shapes", lambda *_, **__: lambda encoder, inputs: memory.fill_(inputs[0, 0, 0, 0])
    )
    encoder = encoder_of_images().eval()
    compile_encoder(encoder, "reduce-overhead", lambda: 2)
    with torch.no_grad():
        features = [encoder(torch.full((2, 1, 8, 8), value)) for value in (1.0, 2.0)]
    assert [part[0, 0].item() for part in features] == [1.0, 2.0]


@pytest.mark.parametrize(("options", "number"), [({}, 1), ({"pool": "token"}, 2), ({"drop_path": 0.2}, 3)], ids=str)
def test_blocks_of_one_form_share_a_graph(options: dict[str, Any], number: int, tmp_path: Path, graphs: Graphs) -> None:
    """With a class token the last block computes it alone; a rate of stochastic depth is a constant of the graph."""
    trained = []
    for how in (False, "blocks"):
        torch.compiler.reset()
        model = Classifier(encoder_of_images(**{"depth": 3, **options}), 3, compile=how)  # type: ignore[arg-type]
        pl.seed_everything(0)
        with pytest.warns(UserWarning, match="never measured"):
            trainer_of(tmp_path, enable_checkpointing=False, max_epochs=1).fit(model, loader(8, 4), loader(8, 3))
        trained.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert len(graphs) == 2 * number, "in training and in evaluation"
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-4, atol=1e-6)


def test_a_copy_of_an_encoder_with_compiled_blocks_has_its_own_weights(graphs: Graphs) -> None:
    encoder = encoder_of_images().eval()
    compile_encoder(encoder, "blocks", lambda: 2, backend=graphs)
    images = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    before = encoder(images)
    twin = copy.deepcopy(encoder)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.zero_()
    torch.testing.assert_close(twin(images), before)
    assert len(graphs) == 1


def test_calls_of_the_trunk_itself_run_the_block_as_it_is(graphs: Graphs) -> None:
    """Maps of attention and attributions hook into the blocks, and every hook would take a compilation."""
    encoder = encoder_of_images().eval()
    compile_encoder(encoder, "blocks", lambda: 2, backend=graphs)
    images = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(encode(encoder.trunk, *encoder.prepared(images)), encoder(images))
    assert len(graphs) == 1
    encode(encoder.trunk, *encoder.prepared(images[:1]))
    assert len(graphs) == 1


def test_recordings_longer_than_the_clips_are_not_compiled_by_blocks_either(graphs: Graphs) -> None:
    encoder = SpectrogramEncoder(
        8000, 0.5, Verma(), num_mels=16, dim=8, depth=1, heads=2, positions="none", any_length=True
    ).eval()
    compile_encoder(encoder, "blocks", lambda: 1, backend=graphs)
    encoder(torch.randn(1, 9000))
    assert len(graphs) == 0
    encoder(torch.randn(1, 4000))
    assert len(graphs) == 1


def test_without_triton_a_gpu_compiles_nothing_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier, "HAS_TRITON", False)
    model: Any = Classifier(encoder_of_images(), 3, compile="blocks")
    model.trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda")),
        precision_plugin=SimpleNamespace(),
        is_global_zero=True,
    )
    with pytest.raises(
        SettingError, match="^model.compile: on a GPU it needs Triton, .*; install gcc .*, or give false$"
    ):
        model.setup("test")


@pytest.mark.parametrize("missing", ["compiler", "header", "triton"])
def test_triton_needs_a_compiler_and_pythons_header(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(of_torch.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(of_torch, "find_spec", lambda name: None if missing == "triton" else name)
    monkeypatch.setattr(of_torch.shutil, "which", lambda name: None if missing == "compiler" else name)
    monkeypatch.delenv("CC", raising=False)
    if missing != "header":
        (tmp_path / "Python.h").touch()
    assert not of_torch._has_triton()
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(of_torch, "find_spec", str)
    monkeypatch.setenv("CC", "cc")
    assert of_torch._has_triton()


@pytest.mark.parametrize("how", [True, "blocks"])
def test_signals_with_gaps_and_without_share_their_graphs_and_have_the_outputs_of_an_encoder_that_is_not_compiled(
    how: Any, graphs: Graphs
) -> None:
    sizes = {"dim": 16, "depth": 2, "heads": 4, "patch_size": 5, "channels": 2, "sample_rate_hz": 100, "seconds": 2.0}
    encoder = WaveformEncoder(attention=Verma(), gaps=True, **sizes).eval()
    encoder.set_statistics(torch.zeros_like(encoder.mean), torch.ones_like(encoder.std))
    whole = {"waveforms": torch.randn(2, 2, 200), "lengths": torch.tensor([200, 160])}
    broken = {**whole, "waveforms": whole["waveforms"].clone()}
    broken["waveforms"][0, :, 60:95] = torch.nan
    expected = [encoder(batch) for batch in (broken, whole)]
    compile_encoder(encoder, how, lambda: 2, backend=graphs)
    with torch.no_grad():
        found = [encoder(batch) for batch in (broken, whole)]
        number = len(graphs)
        encoder(whole), encoder(broken)
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)
    assert len(graphs) == number > 0
