"""The command predict: which files it reads, what it answers, and where it writes that."""
