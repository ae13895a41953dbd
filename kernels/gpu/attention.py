"""The attention ops of a GPU."""

from cbatch.kernels.gpu.paged_attention import paged_attention
from cbatch.kernels.gpu.store_kv import rope_store_kv, store_kv

__all__ = ["paged_attention", "rope_store_kv", "store_kv"]
