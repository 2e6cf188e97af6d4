"""Train, validate, test and predict from the command line: python train.py --help."""

import datamodules  # noqa: F401  (so that --data MNIST resolves)
from longseq.cli import main

if __name__ == "__main__":
    main()
