"""How steps run on a device: graphs, staging, verification, and steps started before their plan arrives."""
