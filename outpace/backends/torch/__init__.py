"""Runs safetensors and GGUF models on CUDA, and in float32 on the CPU for tests, over a paged KV cache."""
