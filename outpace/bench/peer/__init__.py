"""Other engines that can run the same file, each behind the same small door, and who of them is installed."""

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
