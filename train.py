"""Train, validate, test and predict from the command line of a clone: python train.py --help."""

from longseq.cli import main

if __name__ == "__main__":
    main()
