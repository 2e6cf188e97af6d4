"""The Audio Spectrogram Transformer with weights that transformers wrote: random ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from fake_gpu import DEVICE, fake_gpu, move
from torchaudio.compliance.kaldi import fbank
from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification, ASTModel

from longseq import ASTEncoder, Linear, Linformer, Softmax, SpecAugment, Verma, resize
from longseq.encoders._kaldi import KaldiLogMel
from longseq.encoders.forward_pass import encode
from longseq.files.description import build, describe
from longseq.tasks import Masked
from longseq.training import Classifier
from longseq.training.answers.events import Settings
from longseq.training.answers.predictions import EventDetector, answers

RATE = 16000
SECONDS = (400 + 75 * 160) / RATE  # 76 frames: 7 rows of patches, without a rest
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "num_mel_bins": 40,
    "max_length": 76, "num_labels": 5,
}  # fmt: skip


def waveforms(count: int = 2, seconds: float = SECONDS) -> torch.Tensor:
    return 0.1 * torch.randn(count, round(seconds * RATE), generator=torch.Generator().manual_seed(0))


def saved(kind: type, folder: Path, **changes: Any) -> Any:
    """A model of transformers whose weights all differ from their start, and its folder of safetensors and JSON."""
    torch.manual_seed(0)
    model = kind(ASTConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    model.save_pretrained(folder)
    ASTFeatureExtractor(num_mel_bins=40, max_length=76).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp("ast")
    return saved(ASTForAudioClassification, folder), str(folder)


def theirs(clips: torch.Tensor, folder: str) -> torch.Tensor:
    extract = ASTFeatureExtractor.from_pretrained(folder)
    return extract([clip.numpy() for clip in clips], sampling_rate=RATE, return_tensors="pt")["input_values"]


@torch.no_grad()
def test_from_the_waveform_to_the_logits_it_is_transformers_model(checkpoint: tuple[Any, str]) -> None:
    model, folder = checkpoint
    encoder = ASTEncoder(RATE, SECONDS, Softmax(), folder).eval()
    expected = model(theirs(waveforms(), folder)).logits
    torch.testing.assert_close(model.classifier.dense(encoder(waveforms())), expected, rtol=1e-5, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-3


@torch.no_grad()
def test_filled_clips_have_transformers_logits_at_any_length(checkpoint: tuple[Any, str]) -> None:
    model, folder = checkpoint
    encoder = ASTEncoder(RATE, SECONDS, Softmax(), folder, fills=True).eval()
    lengths = torch.tensor([8000, 5000, 420])
    clips = waveforms(3, 0.5)
    expected = [
        model(theirs(clip[None, :length], folder)).logits[0] for clip, length in zip(clips, lengths, strict=True)
    ]
    batch = {"waveforms": clips, "lengths": lengths}
    torch.testing.assert_close(model.classifier.dense(encoder(batch)), torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert encoder.count_tokens(batch) == 3 * encoder.num_tokens


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"frequency_stride": 8, "time_stride": 16}, {"qkv_bias": False}], ids=str)
def test_of_transformers_own_spectrograms_it_makes_transformers_features(changes: dict, tmp_path: Path) -> None:
    model = saved(ASTModel, tmp_path, **changes).double()
    encoder = ASTEncoder(RATE, SECONDS, Softmax(), str(tmp_path / "model.safetensors")).double().eval()
    pictures = torch.randn(2, 76, 40, dtype=torch.float64)
    expected = encoder.trunk.fc_norm(model(pictures).pooler_output)  # a bare model has no classifier's norm
    torch.testing.assert_close(encode(encoder.trunk, pictures[:, None]), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("rate", "mels"), [(16000, 128), (8000, 24)])
def test_its_spectrogram_is_kaldis_as_torchaudio_has_it(rate: int, mels: int) -> None:
    clips = waveforms() + 0.3  # a constant is taken off
    kaldi = {"sample_frequency": rate, "window_type": "hanning", "num_mel_bins": mels}
    expected = [fbank(clip[None], **kaldi) for clip in clips.double()]
    log_mel = KaldiLogMel(rate, mels)
    spectrograms = log_mel(clips).mT
    assert spectrograms.shape[1] == log_mel.count_frames(clips.shape[1])
    torch.testing.assert_close(spectrograms.double(), torch.stack(expected), rtol=1e-3, atol=1e-3)
    assert torch.equal(log_mel.bfloat16()(clips).mT, spectrograms)


@torch.no_grad()
def test_a_short_clip_has_the_features_that_an_encoder_built_for_it_gives(checkpoint: tuple[Any, str]) -> None:
    _, folder = checkpoint
    clip = waveforms(1, 0.5)
    long, short = (ASTEncoder(RATE, seconds, Verma(), folder).eval() for seconds in (SECONDS, 0.5))
    assert short.num_tokens == 2 + 4 * 3
    assert int(long.count_tokens({"waveforms": clip, "lengths": torch.tensor([clip.shape[1]])})) == 2 + 4 * 3
    torch.testing.assert_close(long(clip), short(clip), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("stride", [4, 16, 20])
def test_any_stride_gives_a_clip_in_a_batch_what_it_gives_alone(stride: int) -> None:
    sizes = {"num_mels": 40, "dim": 16, "depth": 2, "heads": 2, "stride_frames": stride, "stride_mels": stride}
    encoder = ASTEncoder(RATE, SECONDS, Linformer(3), **sizes).double().eval()
    clips, lengths = waveforms(4).double(), torch.tensor([12400, 8000, 2700, 100])
    clips = clips.masked_fill(torch.arange(clips.shape[1]) >= lengths[:, None], 0)
    together = encoder({"waveforms": clips, "lengths": lengths})
    for clip, length, features in zip(clips, lengths, together, strict=True):
        alone = encoder({"waveforms": clip[None, :length], "lengths": length[None]})
        torch.testing.assert_close(alone[0], features, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("stride", [4, 10, 16])
def test_an_event_that_lasts_to_the_end_of_a_clip_ends_there(stride: int) -> None:
    sizes = {"num_mels": 40, "dim": 16, "depth": 1, "heads": 2, "stride_frames": stride}
    model = Classifier(ASTEncoder(RATE, 1.0, Verma(), **sizes), 2).eval()
    model.head.bias.copy_(torch.tensor([20.0, 0.0]))  # the first class is everywhere
    hearing = EventDetector(model, Settings())
    for answered in answers(model, [waveforms(1, 1.0)], [("a.wav", 0.0, 1.0)], scores=True):
        hearing.add(answered)
    (event,) = hearing.heard()[0].events
    assert event.start == 0 and abs(event.end - 1.0) <= stride * 0.01 / 2


@torch.no_grad()
def test_longer_clips_than_the_checkpoints_have_resampled_positions(checkpoint: tuple[Any, str]) -> None:
    model, folder = checkpoint
    encoder = ASTEncoder(RATE, 1.5, Linformer(9), folder).eval()
    rows = encoder.trunk.patch_embed.grid_size[0]
    assert rows == (148 - 16) // 10 + 1
    ours = encoder.trunk.pos_embed[:, 2:].unflatten(1, (rows, 3))
    grid = (
        model.audio_spectrogram_transformer.embeddings.position_embeddings[:, 2:].unflatten(1, (3, 7)).transpose(1, 2)
    )
    torch.testing.assert_close(ours.mean(1), grid.mean(1), rtol=0.05, atol=0.05)
    assert encoder(waveforms(2, 1.5)).isfinite().all()
    resized = resize(ASTEncoder(RATE, SECONDS, Linformer(9), folder), seconds=1.5)
    torch.testing.assert_close(resized.trunk.pos_embed, encoder.trunk.pos_embed)


def test_a_checkpoint_of_ours_needs_neither_the_file_nor_its_sizes(checkpoint: tuple[Any, str]) -> None:
    _, folder = checkpoint
    attention = Linformer(5, projection=Linear("mean"))
    model = Classifier(ASTEncoder(RATE, SECONDS, attention, folder, spec_augment=SpecAugment()), 3).eval()
    description = describe(model)
    assert folder not in json.dumps(description)
    again = build(description, Classifier).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(waveforms()), model(waveforms()))
    with pytest.raises(ValueError, match="task must not be Masked where patches overlap"):
        Classifier(model.encoder, 3, task=Masked())


def test_a_training_on_the_command_line_starts_from_it(command, checkpoint: tuple[Any, str]) -> None:
    flags = {
        "data": "Vowels",
        "data.sample_rate_hz": RATE,
        "data.num_train": 120,
        "data.num_test": 60,
        "model.encoder": "ASTEncoder",
        "model.encoder.pretrained": checkpoint[1],
        "model.encoder.attention": "Linformer",
        "model.encoder.attention.k": 4,
        "trainer.max_steps": 1,
        "trainer.enable_progress_bar": "false",
    }
    done = command("fit", *(part for name, value in flags.items() for part in (f"--{name}", value)))
    assert done.code == 0, done.err
    assert "ASTEncoder: 2 blocks, 4 heads, 32 wide" in done.out


BROKEN = {
    "no file": "got '.*nothing.safetensors': no such file",
    "pickled": "got '.*pytorch_model.bin': pickled weights may run code",
    "no config": "got '.*config.json', which cannot be read",
    "another model": "got a 'vit' in",
    "activation": "got hidden_act 'relu' in .*; only 'gelu' is supported",
    "no safetensors": "got '.*model.safetensors', which cannot be read",
    "other names": "got '.*model.safetensors', which lacks embeddings.position_embeddings; give that of an AST",
    "other positions": r"got position_embeddings of \(1, 23, 32\), but config.json says \(1, 38, 32\)",
    "other width": r"got blocks.0.mlp.fc1.weight of \(96, 32\), but config.json says \(64, 32\)",
    "sizes": "got sizes in .* that are none",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_no_such_checkpoint_is_refused_in_one_line(
    how: str, checkpoint: tuple[Any, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint[1], tmp_path / "copy"))
    weights, path = folder / "model.safetensors", folder / "config.json"
    config = json.loads(path.read_text())
    changes = {
        "another model": {"model_type": "vit"}, "activation": {"hidden_act": "relu"}, "sizes": {"hidden_size": 0},
        "other positions": {"max_length": 130}, "other width": {"intermediate_size": 64},
    }  # fmt: skip
    path.write_text(json.dumps(config | changes.get(how, {})))
    asked = folder
    if how == "no file":
        asked = folder / "nothing.safetensors"
    elif how == "pickled":
        asked = weights.rename(folder / "pytorch_model.bin")
    elif how == "no config":
        path.unlink()
    elif how == "no safetensors":
        weights.write_bytes(b"no header")
    elif how == "other names":
        safetensors.torch.save_file({"weight": torch.zeros(2)}, weights)
    with pytest.raises(
        ValueError, match=f"pretrained must be a checkpoint of transformers' AST, {BROKEN[how]}"
    ) as error:
        ASTEncoder(RATE, SECONDS, Softmax(), str(asked))
    assert "\n" not in str(error.value)


def test_waveforms_of_another_rate_are_refused(checkpoint: tuple[Any, str]) -> None:
    with pytest.raises(ValueError, match="sample_rate_hz must be the 16000 of the checkpoint, got 8000; give --data"):
        ASTEncoder(8000, SECONDS, Softmax(), checkpoint[1])


def test_the_features_of_a_gpu_are_not_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU rounds float32 factors of a convolution to TF32: beside a loud tone, quiet frequencies would be noise."""
    kinds: list[torch.dtype] = []
    conv1d = F.conv1d
    monkeypatch.setattr(F, "conv1d", lambda x, *rest, **options: kinds.append(x.dtype) or conv1d(x, *rest, **options))
    with fake_gpu():
        features = move(KaldiLogMel(8000, 20))(torch.empty(2, 800, device=DEVICE))
    assert kinds == [torch.float64] * 2 and features.dtype == torch.float32
