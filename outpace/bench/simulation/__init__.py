"""A world with known costs and known acceptance, to compare policies with each other and with an oracle."""
