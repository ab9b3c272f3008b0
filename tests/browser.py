"""Headless Chromium for tests of pages. It needs Debian's `chromium` and `chromium-driver`, and selenium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_driver = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver on this machine (chromium, chromium-driver)"
)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """A window of Chromium. `find` and `wait` raise if an element or a condition is missing."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def resize(self, width: int, height: int) -> None:
        """A narrow window is a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def open(self, url: str) -> None:
        """A page; of a server with a port of its own, as a new visitor sees it."""
        self.driver.get_log("browser")
        self.driver.get(url)

    def js(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        """The text as it is in the document, whether visible or not."""
        return str(self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def press(self, selector: str, *keys: str) -> None:
        self.find(selector).send_keys(*keys)

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition(), what)

    def problems(self) -> list[str]:
        """What the browser complained about, such as a breach of the content policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """The addresses of all that the page has loaded."""
        found: list[str] = self.js("return performance.getEntries().map((each) => each.name)")
        return [name for name in found if "://" in name]


@contextmanager
def browser() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        window = Browser(driver)
        window.resize(1200, 900)
        yield window
    finally:
        driver.quit()
