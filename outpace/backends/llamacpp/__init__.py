"""Any GGUF through llama.cpp, which owns kernels and cache memory."""
