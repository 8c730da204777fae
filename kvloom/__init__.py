"""kvloom: KV-cache reuse for vLLM, as exact prefixes and as blended chunks at any position."""

__version__ = "0.1.0"
