"""A model's weights on a device, and its forward pass."""
