"""Named data sets, one in each file."""
