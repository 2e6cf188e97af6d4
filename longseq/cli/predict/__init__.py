"""The command predict: the files it reads, its answers, and where it writes them."""
