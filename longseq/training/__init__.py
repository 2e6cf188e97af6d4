"""Training: the classifier, its optimizer and checkpoints, and what is measured on the way."""

from longseq.training.classifier import Classifier
from longseq.training.devices.fully_sharded import FullySharded
from longseq.training.devices.sequence_parallel import SequenceParallel
from longseq.training.memory import keep_freed_memory
from longseq.training.mix import CutMix, MixUp, MixUpOrCutMix
from longseq.training.quantisation import QuantizationAwareTraining
from longseq.training.recipe import Recipe

__all__ = [
    "Classifier",
    "CutMix",
    "FullySharded",
    "MixUp",
    "MixUpOrCutMix",
    "QuantizationAwareTraining",
    "Recipe",
    "SequenceParallel",
    "keep_freed_memory",
]
