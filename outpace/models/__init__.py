"""Model files and architectures, shared by all backends."""
