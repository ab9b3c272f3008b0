"""Makes the pictures of docs/page.md: `python -m tests.server.page_pictures [FOLDER]`, with the embedded model."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from PIL import Image

from outpace import LLM
from tests.browser import Browser, browser
from tests.server_helper import LiveServer, live

PROMPT = "Write a Python function that adds two numbers, then write it again with type hints."
OTHERS = (
    "Write a Python class for a bank account, with tests.",
    "Tell me a long story about a fox and a clockmaker.",
    "List the planets of the solar system with two facts each.",
)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    with LLM(max_sequences=8) as llm, browser() as window:
        llm.engine.calibrate()
        llm.engine.measure_floor()
        with live(llm.engine, llm.tokenizer, llm.config.max_context, model_names=("SmolLM2-135M-Instruct",)) as server:
            chat(window, server, folder / "page-light.png")
            for name, scheme, size in (("dark", "dark", (1200, 1180)), ("narrow", "light", (390, 844))):
                window.resize(*size)
                window.prefer(prefers_color_scheme=scheme)
                live_view(window, server, folder / f"page-{name}.png")


def chat(window: Browser, server: LiveServer, path: Path) -> None:
    from selenium.webdriver import ActionChains

    window.resize(1200, 900)
    window.prefer(prefers_color_scheme="light")
    window.open(server.url)
    window.js(
        "const control = document.querySelector('[data-setting=temperature]'); control.value = 0;"
        "control.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    window.find("#prompt").send_keys(PROMPT)
    window.click("#send")
    window.wait(lambda: window.all(".turn.assistant[data-state=done]"), "no answer", 60.0)
    drafted = window.all(".drafted")
    longest = max(drafted[len(drafted) // 3 :], key=lambda each: len(each.text))
    ActionChains(window.driver).move_to_element(longest).perform()
    save(window, path)


def live_view(window: Browser, server: LiveServer, path: Path) -> None:
    window.open(f"{server.url}/#live")
    for place, prompt in enumerate(OTHERS):
        Thread(target=generate, args=(server, prompt, place), daemon=True).start()
    window.wait(lambda: int(window.text("#live-running")) == len(OTHERS), "nothing runs", 60.0)
    sleep(6.0)
    save(window, path)
    server.wait_until_idle()


def generate(server: LiveServer, prompt: str, place: int) -> None:
    asked: Any = [{"role": "user", "content": prompt}]
    client = server.client()
    extra = {"ignore_eos": True}
    client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=asked, max_tokens=500, temperature=0.5 * place, extra_body=extra
    )


def save(window: Browser, path: Path) -> None:
    """With 128 colours a picture takes a third of the space."""
    window.driver.save_screenshot(str(path))
    Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
