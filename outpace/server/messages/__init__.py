"""Anthropic's Messages API: requests become chat requests, and answers become messages made of content blocks."""
