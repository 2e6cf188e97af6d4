"""Tasks, which say what a model learns: one per file; task.py is their contract."""

from longseq.tasks.masked import Masked
from longseq.tasks.multi_label import MultiLabel
from longseq.tasks.ordinal import Ordinal
from longseq.tasks.regression import Regression
from longseq.tasks.single_label import SingleLabel
from longseq.tasks.task import Answer, Task

__all__ = ["Answer", "Masked", "MultiLabel", "Ordinal", "Regression", "SingleLabel", "Task"]
