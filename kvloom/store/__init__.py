"""Bytes and keys: stages, pipelines and the block format. Knows no tensors and no engine."""
