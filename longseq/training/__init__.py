"""Training: the classifier, its optimizer and checkpoints, and what is measured on the way."""

from longseq.training.classifier import Classifier
from longseq.training.fully_sharded import FullySharded
from longseq.training.mix import CutMix, MixUp, MixUpOrCutMix
from longseq.training.sequence_parallel import SequenceParallel

__all__ = ["Classifier", "CutMix", "FullySharded", "MixUp", "MixUpOrCutMix", "SequenceParallel"]
