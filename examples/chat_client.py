"""Chat in the terminal with a running `outpace serve`, using the OpenAI client (pip install openai).

python examples/chat_client.py [--base-url http://localhost:8000/v1] [--api-key KEY]
"""

from __future__ import annotations

import argparse
from typing import Any

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none needed")
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id
    print(f"talking to {model}; an empty line ends the chat")
    messages: list[Any] = []
    while question := input("> ").strip():
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        answer = ""
        for chunk in stream:
            if chunk.choices:
                piece = chunk.choices[0].delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
            if chunk.usage:
                spec = chunk.usage.model_extra["speculation"]
                accepted = f"{spec['accepted']} of {spec['drafted']} drafted tokens accepted"
                print(f"\n[{chunk.usage.completion_tokens} tokens, {accepted}]")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
