"""Runs of a training: their folders, how they begin and resume, and what is written about them."""
