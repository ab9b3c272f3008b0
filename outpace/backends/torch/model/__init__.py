"""A model's weights on a device, and what is computed from them."""
