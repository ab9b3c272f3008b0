"""Engines that can run the same model file behind one interface, and whether each is installed."""

from __future__ import annotations

from importlib.util import find_spec

# name -> the package it needs
PEERS = {
    "outpace": "outpace",
    "llama.cpp": "xllamacpp",
    "transformers": "transformers",
    "openvino": "openvino_genai",
    "vllm": "vllm",
}


def is_installed(name: str) -> bool:
    return find_spec(PEERS[name]) is not None
