"""Safetensors and GGUF models on CUDA, and on the CPU in float32 for tests: our own forward over a paged cache."""
