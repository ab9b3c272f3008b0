"""The OpenAI API over an AsyncEngine. Imported by `outpace serve` alone."""
