"""Training: the classifier, its optimizer and checkpoints, and what is measured on the way."""

from longseq.training.classifier import Classifier

__all__ = ["Classifier"]
