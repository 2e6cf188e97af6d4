"""Samples in shards: tar archives and Parquet files."""
