"""Trains a draft head for a target: `outpace distill`.

`prompts.py` and `prepared.py` need a tokenizer; everything else needs torch, the target's weights and a prepared file.
"""
