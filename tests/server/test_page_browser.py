"""The page in a real browser, over a fake model: what a user does, and what must not happen to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest

from outpace.core import StepPlan
from outpace.engine.engine import Engine
from tests.browser import Browser, browser, needs_driver
from tests.fakes import ByteTokenizer, FakeModel, fake_engine, runner_of
from tests.scripted_model import ScriptedModel, ScriptedTokenizer
from tests.server_helper import LiveServer, free_port, live

pytestmark = [pytest.mark.browser, needs_driver]
CONTEXT = 12_288
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script>&lt;b&gt; **bold** [a](javascript:1)'
SLOW = pytest.mark.slow
LAST = ".turn.assistant:last-child"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(window: Browser) -> Iterator[Browser]:
    window.resize(1200, 900)
    window.prefer(prefers_color_scheme="light")
    yield window
    problems = [each for each in window.problems() if "Failed to load resource" not in each]
    assert not problems, "the browser complained"
    window.driver.get("about:blank")  # end its streams before the server is stopped


def make_engine(answer: str | None = None, seconds: float = 0.0) -> tuple[Engine, ByteTokenizer]:
    """`seconds`: of a step. Without an answer, the text is the fake model's own, which repeats itself."""
    tokenizer = ByteTokenizer() if answer is None else ScriptedTokenizer(TEMPLATE)
    model = FakeModel() if answer is None else ScriptedModel(lambda _: answer, tokenizer)
    # On a busy machine the steps of a fake take very different times; with a large budget `auto` drafts all the same.
    config: dict[str, Any] = {"max_context": CONTEXT, "cache_tokens": 2 * CONTEXT, "allowed_loss": 0.9}
    engine = fake_engine(model, tokenizer=tokenizer, **config)
    if seconds:
        slow_down(engine, seconds)
    engine.calibrate()
    return engine, tokenizer


def slow_down(engine: Engine, seconds: float) -> None:
    runner = runner_of(engine)
    forward = runner.forward

    def slowly(plan: StepPlan) -> Any:
        sleep(seconds)
        return forward(plan)

    runner.forward = slowly  # type: ignore[method-assign]


@contextmanager
def serving(answer: str | None = None, seconds: float = 0.0, **options: Any) -> Iterator[LiveServer]:
    engine, tokenizer = make_engine(answer, seconds)
    with live(engine, tokenizer, CONTEXT, **options) as server:
        yield server


_SET = """
const [name, value] = arguments;
for (const each of document.querySelectorAll(`[data-setting=${name}]`)) {
  if (each.type === 'radio') { if (each.value === value) each.click(); }
  else { each.value = value; each.dispatchEvent(new Event('input', {bubbles: true})); }
}
return name === 'mode' ? document.querySelector(`[data-setting=mode][value=${value}]`)?.checked
  : JSON.parse(sessionStorage.getItem('outpace-settings') ?? '{}')[name] === value;
"""


def settings(page: Browser, **values: object) -> None:
    """Set controls until the page has taken the values: its scripts, or the methods to choose from, may come late."""
    for name, value in values.items():
        page.wait(partial(page.js, _SET, name, str(value)), f"the page did not take {name}")


def ask(page: Browser, text: str = "hello hello hello", **values: object) -> None:
    settings(page, temperature=0, **values)
    page.find("#prompt").send_keys(text)
    page.click("#send")


def wait_for_end(page: Browser, state: str = "done", seconds: float = 20.0) -> None:
    states = lambda: page.js("return document.querySelector(arguments[0])?.dataset.state", LAST)  # noqa: E731
    page.wait(lambda: states() not in (None, "streaming"), "the answer did not end", seconds)
    assert states() == state, page.text(f"{LAST} .facts")


def answer_text(page: Browser) -> str:
    return page.text(f"{LAST} > .text")


def test_an_answer_streams_with_the_drafts_it_came_from(page):
    with serving() as server:
        page.open(server.url)
        ask(page, mode="on", method="suffix", max_tokens=120)
        wait_for_end(page)
        assert len(answer_text(page)) == 120 and "120 tokens" in page.text(f"{LAST} .facts")
        drafted = page.all(f"{LAST} .drafted[data-proposer=suffix]")
        assert drafted and "suffix" in page.text(f"{LAST} .legend")
        move_to(page, drafted[0])
        assert page.find("#card").is_displayed()
        assert "suffix · depth 4" in page.text("#card") and "accepted" in page.text("#card .note")
        assert len(page.all("#card .tokens span")) == 4
        # The same with keys alone, and said aloud.
        page.js("document.querySelector(arguments[0]).focus()", f"{LAST} > .text")
        page.press(f"{LAST} > .text", "\ue014")  # right arrow
        assert len(page.all(f"{LAST} .current")) == 1 and "suffix drafted" in page.text("#spoken")
        assert "Answer complete" in page.text("#spoken")
        page.press(f"{LAST} > .text", "\ue00c")  # escape
        assert not page.find("#card").is_displayed()


def move_to(page: Browser, element: Any) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(page.driver).move_to_element(element).perform()


def test_modes_and_methods_are_what_the_switches_say(page):
    with serving() as server:
        page.open(server.url)
        ask(page, mode="off", max_tokens=60)
        wait_for_end(page)
        text = answer_text(page)
        assert not page.all(f"{LAST} .drafted") and "no drafts" in page.text(f"{LAST} .facts")
        page.wait(lambda: len(page.all("#composer select option")) > 3, "methods are not offered")
        for method in ("ngram", "draft"):
            page.click("#new")
            ask(page, mode="on", method=method, max_tokens=60)
            wait_for_end(page)
            found = page.js("return [...document.querySelectorAll('.drafted')].map((each) => each.dataset.proposer)")
            assert answer_text(page) == text and set(found) == {method}


def test_a_stop_ends_the_request_too(page):
    with serving(seconds=0.01) as server:
        page.open(server.url)
        ask(page, mode="off", max_tokens=2000)
        page.wait(lambda: len(answer_text(page)) > 20, "no text")
        assert page.find("#stop").is_displayed() and not page.find("#send").is_displayed()
        page.click("#stop")
        wait_for_end(page, "stopped")
        server.wait_until_idle()
        assert 20 < len(answer_text(page)) < 1000 and page.find("#send").is_displayed()


def test_plain_beside_auto_finds_identical_text(page):
    with serving(seconds=0.004) as server:
        page.open(f"{server.url}/#compare")
        settings(page, temperature=0)
        page.find("#compare-prompt").send_keys("hello hello")
        page.click("#run")
        outcome = lambda: page.js("return document.querySelector('#outcome').dataset.state")  # noqa: E731
        page.wait(lambda: outcome() not in (None, "running"), "no outcome")
        assert outcome() == "good" and "Identical text" in page.text("#outcome")
        assert page.text("#side-plain .text") == page.text("#side-auto .text") != ""
        clocks = [float(page.text(f"#side-{side} .clock").split()[0]) for side in ("plain", "auto")]
        assert all(clock > 0 for clock in clocks)
        assert page.all("#side-auto .drafted") and not page.all("#side-plain .drafted")


def test_where_a_backend_rounds_the_first_difference_is_shown_with_its_gap(page):
    engine, tokenizer = make_engine("abababababababababababab" * 3, seconds=0.004)
    runner = runner_of(engine)
    forward = runner.forward

    def rounded(plan: StepPlan) -> Any:
        """Late in the text `z` is almost as likely as the scripted byte, and likelier where a draft is verified."""
        logits, at = forward(plan).copy(), 0
        for row in plan.rows:
            for line in range(row.num_logits):
                place = row.start + len(row.tokens) - row.num_logits + line
                if place > 60:
                    logits[at, ord("z")] = 60.0 - 0.001 + 0.002 * (row.num_logits > 1)
                at += 1
        return logits

    runner.forward = rounded  # type: ignore[method-assign]
    with live(engine, tokenizer, CONTEXT) as server:
        page.open(f"{server.url}/#compare")
        settings(page, temperature=0)
        page.js("document.querySelector('#compare-tokens').value = 60")
        page.find("#compare-prompt").send_keys("abababababab")
        page.click("#run")
        outcome = lambda: page.js("return document.querySelector('#outcome').dataset.state")  # noqa: E731
        page.wait(lambda: outcome() not in (None, "running"), "no outcome")
        text = page.text("#outcome")
        assert outcome() == "warn" and "First difference at token" in text and "0.0010 apart" in text
        assert page.text("#side-plain .text") != page.text("#side-auto .text")
        assert len(page.all(".differs")) == 2


def test_numbers_move_while_somebody_looks(page):
    with serving(seconds=0.004) as server:
        page.open(f"{server.url}/#live")
        page.wait(lambda: page.text("#pulse-state") == "connected", "not connected")
        assert page.text("#now-title") == "Nothing runs."
        client = server.client()
        extra = {"speculation": {"mode": "on", "method": "suffix"}, "ignore_eos": True}
        ask_twice = [{"role": "user", "content": "hello hello"}]
        client.chat.completions.create(
            model="fake", messages=ask_twice, max_tokens=400, temperature=0, extra_body=extra
        )
        page.wait(lambda: "400 tokens" in page.text("#note-rate"), "the count did not move")
        page.wait(lambda: page.all("#chart-positions [data-proposer=suffix] circle"), "no acceptance by position")
        assert page.all("#trace tr td") and page.all("#chart-depths rect") and page.all("#spark-rate .line")
        assert "accepted in" in page.text("#note-speed") or "no drafts" in page.text("#note-speed")


def test_a_reload_in_the_middle_loses_nothing_that_was_written(page):
    with serving(seconds=0.01) as server:
        page.open(server.url)
        ask(page, mode="on", method="suffix", max_tokens=2000)
        page.wait(lambda: len(answer_text(page)) > 60, "no text")
        before = answer_text(page)
        page.driver.refresh()
        page.wait(lambda: page.all(LAST), "the conversation is gone")
        assert answer_text(page).startswith(before) and "cut off by a reload" in page.text(f"{LAST} .facts")
        assert page.text(".turn.user .said") == "hello hello hello" and page.all(f"{LAST} .drafted")
        server.wait_until_idle()
        settings(page, max_tokens=30)
        page.js("[...document.querySelectorAll('.actions .link')].at(-1).click()")  # again
        page.wait(lambda: "30 tokens" in page.text(f"{LAST} .facts"), "no second answer")


def test_a_server_that_goes_away_is_found_again(page):
    port = free_port()
    with serving(port=port) as server:
        page.open(server.url)
        page.wait(lambda: page.text("#pulse-state") == "connected", "not connected")
    page.wait(lambda: page.text("#pulse-state") == "not reachable", "the loss is not shown")
    assert page.find("#notice").is_displayed()
    ask(page, mode="off", max_tokens=10)
    wait_for_end(page, "failed")
    assert "cannot be reached" in page.text(f"{LAST} .facts")
    with serving(port=port):
        page.wait(lambda: page.text("#pulse-state") == "connected", "it is not found again")
        assert not page.find("#notice").is_displayed()
        page.js("[...document.querySelectorAll('.actions .link')].at(-1).click()")  # again
        page.wait(lambda: "10 tokens" in page.text(f"{LAST} .facts"), "no answer")
        page.driver.get("about:blank")


def test_a_wrong_key_is_refused_and_a_right_one_kept_for_the_tab(page):
    with serving(api_keys=("right key",)) as server:
        page.open(server.url)
        page.wait(lambda: page.find("#key-dialog").is_displayed(), "no question")
        assert "forgotten when the tab closes" in page.text("#key-reason")
        page.press("#key", "wrong", "\ue007")
        page.wait(lambda: "refused" in page.text("#key-reason"), "the refusal is not shown")
        page.press("#key", "right key", "\ue007")
        page.wait(lambda: page.text("#pulse-state") == "connected", "not connected")
        ask(page, mode="off", max_tokens=10)
        wait_for_end(page)
        page.driver.refresh()
        page.wait(lambda: page.text("#pulse-state") == "connected", "the key is gone")
        assert page.js("return localStorage.length") == 0
        page.js("sessionStorage.clear()")
        page.driver.refresh()
        page.wait(lambda: page.find("#key-dialog").is_displayed(), "no question")
        page.click("#key-cancel")
        page.wait(lambda: page.text("#pulse-state") == "no key", "it does not say what is missing")


def test_ten_thousand_tokens(page):
    with serving() as server:
        page.open(server.url)
        ask(page, mode="on", method="suffix", max_tokens=10_000, max_depth=32)
        wait_for_end(page, seconds=60.0)
        assert len(answer_text(page)) == 10_000 and "10,000 tokens" in page.text(f"{LAST} .facts")
        began = perf_counter()
        page.js("scrollTo(0, 0); document.body.offsetHeight; scrollTo(0, document.body.scrollHeight)")
        page.driver.refresh()
        page.wait(lambda: len(answer_text(page)) == 10_000, "it does not come back")
        assert perf_counter() - began < 10.0


def test_markup_in_an_answer_is_text(page):
    with serving(MARKUP) as server:
        page.open(server.url)
        ask(page, f"say {MARKUP}", mode="off")
        wait_for_end(page)
        assert answer_text(page) == MARKUP and page.text(".turn.user .said") == f"say {MARKUP}"
        assert not page.all(".turn img, .turn script, .turn b, .turn a") and page.driver.title == "Outpace"
        page.driver.refresh()
        page.wait(lambda: answer_text(page) == MARKUP, "it does not come back")
        assert not page.all(".turn img, .turn script")
        # The browser itself refuses markup, should the page ever try.
        refused = "try { document.body.innerHTML = '<b>x</b>'; return false; } catch (error) { return error.name; }"
        assert page.js(refused) == "TypeError"
        assert any("TrustedHTML" in each for each in page.problems())


def test_the_first_paint_asks_nobody_else_and_is_small(page):
    with serving() as server:
        page.open(server.url)
        page.wait(lambda: page.text("#pulse-state") == "connected", "not connected")
        assert page.requests() and all(name.startswith(server.url) for name in page.requests())
        sizes = page.js("return performance.getEntriesByType('resource').map((each) => each.decodedBodySize)")
        assert sum(sizes) < 150_000
        paper = lambda: page.js("return getComputedStyle(document.body).backgroundColor")  # noqa: E731
        as_system = paper()
        seen = []
        for _ in range(3):  # light, dark, as the system again
            page.click("#theme")
            seen.append(paper())
        assert seen[0] == seen[2] == as_system != seen[1]
        page.open(f"{server.url}/docs")
        page.wait(lambda: len(page.all(".route")) == 14, "routes are missing")
        page.click(".route")
        page.wait(lambda: "include_drafts" in page.text("#routes"), "fields are missing")
        assert all(name.startswith(server.url) for name in page.requests())


@pytest.mark.parametrize(
    ("scheme", "width"),
    [("light", 1200), ("dark", 390), pytest.param("light", 390, marks=SLOW), pytest.param("dark", 1200, marks=SLOW)],
)
def test_no_serious_fault_of_accessibility(page, scheme, width):
    axe = axe_script()
    page.resize(width, 844)
    page.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    with serving() as server:
        page.open(server.url)
        ask(page, mode="on", method="suffix", max_tokens=60)
        wait_for_end(page)
        page.js("document.querySelector('.more').open = true")
        faults = check(page, axe, "chat")
        for view in ("compare", "live"):
            page.js("location.hash = arguments[0]", view)
            page.wait(lambda view=view: page.find(f"#view-{view}").is_displayed(), "not shown")
            page.wait(lambda: page.text("#pulse-state") == "connected", "not connected")
            faults += check(page, axe, view)
        page.js("document.querySelector('#key-dialog').showModal()")
        faults += check(page, axe, "key")
        page.open(f"{server.url}/docs")
        page.wait(lambda: page.all(".route"), "no routes")
        page.click(".route")
        faults += check(page, axe, "docs")
        assert not faults


def axe_script() -> str:
    package = pytest.importorskip("axe_core_python")
    return Path(package.__file__).with_name("axe.min.js").read_text(encoding="utf-8")


def check(page: Browser, axe: str, where: str) -> list[str]:
    """Serious and critical faults, and anything that makes a page wider than its window."""
    page.js(axe)
    result = page.driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(done, (error) => done({error: `${error}`}))"
    )
    assert len(result.get("passes", ())) > 10, f"{where}: axe did not run: {result.get('error')}"
    faults = [
        f"{where}: {each['id']}: {node['html']}"
        for each in result["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
    too_wide = page.js("return document.documentElement.scrollWidth > innerWidth")
    return [*faults, f"{where}: wider than the window"] if too_wide else faults
