"""A simulated world with known costs and acceptance, to compare policies with each other and with an oracle."""
