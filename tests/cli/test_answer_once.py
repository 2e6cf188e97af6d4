"""All that a model says of a file comes from one pass, which knows nothing of other passes through the same model."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from tones import tone

import longseq
from longseq import Verma, WaveformEncoder
from longseq.training import Classifier
from longseq.training.answers.events import Settings
from longseq.training.answers.predictions import ByPart, EventDetector, answers, batches_of
from longseq.training.classifier import Answers


@pytest.fixture
def recordings(tmp_path: Path) -> list[str]:
    """Recordings of unlike lengths, low and high."""
    paths = [str(tmp_path / f"{number}.wav") for number in range(4)]
    for number, path in enumerate(paths):
        sound = np.concatenate([tone(300 if number % 2 else 2000, 0.3), tone(2000, 0.1 * number, seed=number)])
        soundfile.write(path, sound, 8000)
    return paths


def plain(value: Any) -> Any:
    """Any answer of a predictor as values that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_one_pass_has_the_predictions_the_features_and_the_events(checkpoint, recordings) -> None:
    predictor = longseq.load(checkpoint)
    model, data = predictor.model, predictor.data
    parts = [part for path in recordings for part in data.parts(path, 0.2, 0.1)]
    found = list(answers(model, batches_of(data, parts), parts, features=True, scores=True))
    assert [answered.part for answered in found] == parts
    assert [answered.part[0] for answered in found if answered.is_last] == recordings
    of_windows = predictor.predict(recordings, window=0.2, hop=0.1)
    torch.testing.assert_close(
        torch.stack([answered.probabilities for answered in found]),
        torch.stack([prediction.probabilities for prediction in of_windows]),
    )
    hearing = EventDetector(model, Settings())
    for answered in found:
        hearing.add(answered)
    for path, heard, features in zip(recordings, hearing.heard(), predictor.embed(recordings, 0.2, 0.1), strict=True):
        of_file = [answered for answered in found if answered.part[0] == path]
        torch.testing.assert_close(torch.stack([answered.features for answered in of_file]).mean(0), features)
        events = predictor.events(path, window=0.2, hop=0.1)
        assert heard.path == path and [event[:3] for event in heard.events] == [event[:3] for event in events]


def test_threads_that_ask_one_predictor_at_the_same_time_get_what_each_gets_alone(free_checkpoint, recordings) -> None:
    predictor = longseq.load(free_checkpoint)
    waveform = tone(300, 0.3).astype(np.float32)
    asked = [
        call
        for path in recordings
        for call in (
            lambda path=path: predictor.predict(path, window=0.05, top=1),
            lambda path=path: predictor.events(path, window=0.1, hop=0.05),
            lambda path=path: predictor.embed(path, window=0.05),
            lambda: predictor.events(waveform),
        )
    ]
    alone = [plain(call()) for call in asked]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda call: plain(call()), asked * 3))
    assert together == alone * 3


def test_the_events_of_a_signal_with_gaps_stay_on_the_device_of_its_scores() -> None:
    """The meta device stands for an accelerator: no product with a tensor of the processor is possible on it."""
    encoder = WaveformEncoder(100, 1.0, Verma(), patch_size=4, gaps=True, dim=16, depth=1, heads=4)
    scores, present = torch.zeros(1, 25, 2, device="meta"), torch.ones(1, 25, dtype=bool, device="meta")
    (answered,) = ByPart([("f", 0.0, 1.0)])(Answers(torch.zeros(1, 2), scores=scores, present=present))
    # the number is asked for after the product
    with pytest.raises(RuntimeError, match=r"Tensor.item\(\) cannot be called on meta tensors"):
        EventDetector(Classifier(encoder, 2), Settings()).add(answered)
