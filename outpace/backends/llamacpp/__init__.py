"""Runs any GGUF with llama.cpp, which owns the kernels and the cache memory."""
