"""How steps run on a device: graphs, staging, verification, and what is begun before it is asked for."""
