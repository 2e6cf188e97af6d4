"""A simple model on the same splits, fitted in seconds: it shows whether a training was worth its time.

Images are classified by their pixels, at most 16 x 16, with a support vector machine and with nearest neighbours.
Sounds are classified by statistics over time of a log-mel spectrogram, with a logistic regression and with extra trees
(Geurts et al., 2006), a random forest that takes an eighth of the time. Features of a trained network are classified by
their mean and maximum over the tokens, with a logistic regression.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.compat.torch import is_out_of_memory
from longseq.encoders.spectrogram import LogMel
from longseq.training.data import InputSpec

MOST = 10_000  # samples in all splits: with more, the models would take minutes
_VERSION = 1  # increase it when the models or their features change; otherwise old results are reused
_SECONDS = 30.0  # for reading the inputs: large images on a slow disk would take longer than all other work
_SLOWEST_HZ = 1000  # the lowest rate of sounds
_AT_ONCE = 16  # samples read at once: large images and long sounds must not fill the memory
_SIDE = 16  # pixels
_BANDS, _PARTS = 64, 5  # of a spectrogram: mel bands, and parts in time


class BaselineError(Exception):
    """No simple model can be fitted; the message says why."""


class Baseline(NamedTuple):
    """A simple model: its name, its accuracy on the validation and on the test split, and the seconds of all models."""

    name: str
    val: float
    test: float
    seconds: float

    @property
    def figures(self) -> dict[str, float]:
        """Its accuracies, by names that no figure of a trained model has."""
        return {"baseline/val/accuracy": self.val, "baseline/test/accuracy": self.test}


def fit_baseline(data: Any) -> Baseline | None:
    """Fit simple models to the training split, without augmentation, choose one on the validation split, and test it.
    The data module remembers the result.

    Args:
        data: The data module, after setup; each sample has one class.

    Returns:
        None if there are more than 10,000 samples, or if inputs are neither images nor waveforms nor features.

    Raises:
        BaselineError: If the samples can no longer be read or not within half a minute, if they are neither images nor
            sounds, or if all samples of the training split are of one class.
    """
    rate, kind = _rate_of_sounds(data.inputs), data.inputs.kind
    is_known = rate is not None or kind in ("images", "features")
    if not is_known or sum(map(len, data.splits().values())) > MOST:
        return None
    key = f"baseline {_VERSION} at {rate} Hz of {dict(data.identity)}"
    try:
        return Baseline(**data.remember(key, lambda: _fit(rate, kind, data.splits())._asdict()))
    except Exception as error:
        # a file was removed after the training read it, or the cache's disk is full; other errors are defects
        if hasattr(error, "exit_code") or isinstance(error, OSError | ArgumentError) or is_out_of_memory(error):
            raise BaselineError(" ".join(str(error).split()) or type(error).__name__) from error
        raise


def _rate_of_sounds(inputs: InputSpec) -> int | None:
    """The sample rate of waveforms in Hz; None for other inputs, and for signals too slow for mel bands."""
    rate_hz = inputs.rate_hz or 0
    return int(rate_hz) if inputs.shape[-1:] == (None,) and rate_hz >= _SLOWEST_HZ else None


def _fit(rate: int | None, kind: str, splits: Any) -> Baseline:
    begin = time.perf_counter()
    labels = {name: split.labels.numpy() for name, split in splits.items()}
    if len(set(labels["train"].tolist())) < 2:
        raise BaselineError("all samples of the training split are of one class")
    vectors = {}
    for name, split in splits.items():
        read = []
        for values in features(rate, split):
            if not values.isfinite().all():
                raise BaselineError(f"an input of the {name} split has values that are not finite")
            if time.perf_counter() - begin > _SECONDS:
                raise BaselineError(f"reading the inputs takes more than {_SECONDS:g} s")
            read.append(values)
        vectors[name] = torch.cat(read)
    if kind == "features":
        models = {"a logistic regression on the mean and the maximum of the tokens": _regression()}
    else:
        models = _models_of_images(vectors["train"]) if rate is None else _models_of_sounds()
    fitted = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a regression that has not fully converged is as good
        inputs = {name: values.flatten(1).numpy() for name, values in vectors.items()}
        for name, model in models.items():
            model.fit(inputs["train"], labels["train"])
            fitted.append((name, model, float(model.score(inputs["val"], labels["val"]))))
        name, model, val = max(fitted, key=itemgetter(2))  # the test split chooses no model
        test = float(model.score(inputs["test"], labels["test"]))
    return Baseline(name, val, test, time.perf_counter() - begin)


def _regression() -> Any:
    from sklearn.linear_model import LogisticRegression  # scikit-learn takes a second to import
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=0.05, max_iter=2000))


def _models_of_sounds() -> dict[str, Any]:
    from sklearn.ensemble import ExtraTreesClassifier

    return {
        "a logistic regression on log-mel statistics": _regression(),
        "extra trees on log-mel statistics": ExtraTreesClassifier(200, random_state=0, n_jobs=torch.get_num_threads()),
    }


def _models_of_images(train: Float[Tensor, "n c h w"]) -> dict[str, Any]:
    from sklearn.decomposition import PCA
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import SVC

    pixels, nearest = " x ".join(map(str, train.shape[2:])), min(3, len(train))
    return {
        f"a support vector machine on {pixels} pixels": make_pipeline(PCA(0.99), SVC(C=10)),
        f"{nearest} nearest neighbours on {pixels} pixels": KNeighborsClassifier(nearest),
    }


@torch.no_grad()
def features(rate: int | None, split: Any) -> Iterator[Float[Tensor, "b _ ..."]]:
    """What the simple models see of a split, a few samples at a time: of sounds, statistics of a spectrogram, for which
    ``rate`` is their sample rate in Hz; of images and features it is None."""
    log_mel = None if rate is None else LogMel(rate, _BANDS, hop=max(rate // 100, 1), window=max(rate // 40, 1))
    for begin in range(0, len(split), _AT_ONCE):
        inputs, _ = split.__getitems__(list(range(begin, min(begin + _AT_ONCE, len(split)))))
        if log_mel is not None:
            sounds = zip(inputs["waveforms"], inputs["lengths"], strict=True)
            channels = (sound[..., :length].reshape(-1, length) for sound, length in sounds)
            yield torch.stack([_of_sound(log_mel(sound).flatten(0, 1)) for sound in channels])
        elif isinstance(inputs, Mapping) and "features" in inputs:
            bags = [bag[:length] for bag, length in zip(inputs["features"], inputs["lengths"], strict=True)]
            yield torch.stack([torch.cat([bag.mean(0), bag.amax(0)]) for bag in bags])
        elif isinstance(inputs, Tensor) and inputs.ndim == 4:
            sides = [min(side, _SIDE) for side in inputs.shape[2:]]
            yield F.interpolate(inputs.float(), sides, mode="bilinear", antialias=True)
        else:
            raise BaselineError("the inputs are neither sounds nor images (channels, height, width) nor features")


def _of_sound(bands: Float[Tensor, "mels frames"]) -> Float[Tensor, " features"]:
    """Mean, deviation, maximum and mean change of each band over time, and its means over five parts of the sound."""
    parts = F.adaptive_avg_pool1d(bands, _PARTS)
    change = bands.diff(dim=1).abs().sum(1) / max(bands.shape[1] - 1, 1)
    return torch.cat([bands.mean(1), bands.std(1, correction=0), bands.amax(1), change, parts.flatten()])
