"""``python -m longseq``: the same as the command longseq."""

from longseq.cli import main

if __name__ == "__main__":
    main()
