"""The OpenAI API over an AsyncEngine. Only `outpace serve` imports this package."""
