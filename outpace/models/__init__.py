"""Files and architectures, described once for every backend."""
