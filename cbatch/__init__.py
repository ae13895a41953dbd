"""cbatch: batch inference with language models, by continuous batching."""

__version__ = "0.1.0"
