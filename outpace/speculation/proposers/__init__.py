"""Ways of guessing: a file for each."""
