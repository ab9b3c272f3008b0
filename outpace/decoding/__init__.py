"""From logits to tokens: sampling, acceptance, verification, randomness."""
