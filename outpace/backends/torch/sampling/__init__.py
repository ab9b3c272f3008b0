"""Sampling and acceptance on a device, equal to `decoding` given the same logits."""
