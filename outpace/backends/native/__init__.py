"""C++ kernels for CPUs. Verifying a few tokens costs little more than one, and logits are bit-exact for any batch."""
