"""Prompts and tokens on the host: tokenizers, sources, packing."""
