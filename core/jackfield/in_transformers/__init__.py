"""Plugins in plain transformers code: attention, cache, decoding and quantization."""
