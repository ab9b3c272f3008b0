"""Log-probabilities of prompts over HTTP: `echo` with `logprobs` in OpenAI's shape, `prompt_logprobs` in vLLM's."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from outpace.core import TokenLogprob
from tests.engine.test_prompt_logprobs import scores
from tests.fakes import BOS, EOS, ByteTokenizer, FakeModel, fake_engine
from tests.server.test_contract import HELLO, chat_tokens
from tests.server_helper import LiveServer, live, wait_until

SCORING: dict[str, Any] = {"model": "fake", "temperature": 0, "seed": 1, "echo": True, "logprobs": 1}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(fake_engine(max_context=256, cache_tokens=2048), ByteTokenizer(), 256) as server:
        yield server
        server.check_clean()


def ask(server: LiveServer, prompt: Any, **body: Any) -> list[dict[str, Any]]:
    """The choices, merged from the chunks of a stream."""
    if not body.get("stream"):
        status, reply, _ = server.post("/v1/completions", SCORING | {"prompt": prompt} | body)
        assert status == 200, reply
        return sorted(reply["choices"], key=lambda choice: choice["index"])
    status, text, _ = server.post("/v1/completions", SCORING | {"prompt": prompt} | body)
    assert status == 200, text
    merged: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            [chunk] = json.loads(line[6:])["choices"]
            whole = merged.setdefault(chunk["index"], {"text": "", "logprobs": {name: [] for name in LISTS}})
            whole["text"] += chunk["text"]
            whole["finish_reason"] = chunk["finish_reason"]
            for name in LISTS if chunk["logprobs"] else ():
                whole["logprobs"][name] += chunk["logprobs"][name]
    return [merged[index] for index in sorted(merged)]


def text_of(token: int) -> str:
    return f"<{token}>" if token >= 256 else bytes([token]).decode(errors="replace")


def tops(entries: list[TokenLogprob]) -> list[dict[str, float]]:
    return [{text_of(t): p for t, p in [(each.token_id, each.logprob), *each.top]} for each in entries]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["abcd", [97, 98, 99, 100], "aé</s>🙂b"], ids=["text", "tokens", "controls"])
def test_an_echoed_prompt_has_logprobs(server, prompt, max_tokens, stream):
    tokens = ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    [choice] = ask(server, prompt, max_tokens=max_tokens, stream=stream, logprobs=2)
    found, shown = choice["logprobs"], prompt if isinstance(prompt, str) else "abcd"
    assert choice["text"].startswith(shown) and choice["finish_reason"] == "length"
    assert [len(found[name]) for name in LISTS] == [len(tokens) + max_tokens] * 4
    expected = scores(FakeModel(), tokens, 2)
    assert found["tokens"][: len(tokens)] == [text_of(token) for token in tokens]
    assert found["token_logprobs"][: len(tokens)] == [None, *(each.logprob for each in expected)]
    assert found["top_logprobs"][: len(tokens)] == [None, *tops(expected)]
    if max_tokens == 0:
        assert choice["text"] == shown


def test_offsets_are_places_in_the_text(server):
    """Control tokens take no place, unless the text of the prompt names them; parts of a character share one."""
    [named] = ask(server, "aé</s>b", max_tokens=0)
    assert named["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 6]
    [spelled] = ask(server, [BOS, 97, EOS, 98], max_tokens=1)
    assert spelled["text"].startswith("ab") and spelled["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]


def test_a_batch_of_token_ids_is_scored_as_evaluation_harnesses_ask(server):
    """Sums over continuations, and whether each is what greedy decoding gives: taken from the lists as lm-eval does."""
    contexts, ends = [[97, 98, 99], [100, 101], [97]], [[100, 97], [98], [99, 99, 99]]
    prompts = [context + end for context, end in zip(contexts, ends, strict=True)]
    for max_tokens in (0, 1):
        choices = ask(server, prompts, max_tokens=max_tokens)
        for choice, context, prompt in zip(choices, contexts, prompts, strict=True):
            logprobs = choice["logprobs"]
            places = slice(len(context), len(prompt))
            expected = scores(FakeModel(), prompt, 1)[len(context) - 1 :]
            assert sum(logprobs["token_logprobs"][places]) == sum(each.logprob for each in expected)
            pairs = zip(logprobs["token_logprobs"][places], logprobs["top_logprobs"][places], strict=True)
            is_greedy = all(own == max(top.values()) for own, top in pairs)
            assert is_greedy == all(each.rank == 1 for each in expected)


def test_an_answer_has_the_same_logprobs_when_it_is_echoed(server):
    [answer] = ask(server, "abc", echo=False, max_tokens=8, logprobs=3)
    [echoed] = ask(server, "abc" + answer["text"], max_tokens=0, logprobs=3)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echoed["logprobs"][name][4:] == answer["logprobs"][name]


@pytest.mark.parametrize("stream", [False, True])
def test_every_completion_of_a_prompt_has_its_logprobs(server, stream):
    choices = ask(server, ["abc", "de"], n=2, max_tokens=2, temperature=1, stream=stream)
    lists = [choice["logprobs"]["token_logprobs"] for choice in choices]
    assert [len(each) for each in lists] == [6, 6, 5, 5]
    assert lists[0][:4] == lists[1][:4] and lists[2][:3] == lists[3][:3]


def vllm_shape(entries: list[TokenLogprob], num_top: int) -> list[Any]:
    shaped: list[Any] = [None]
    for each in entries:
        ranked = {token: (p, rank) for rank, (token, p) in enumerate(each.top[:num_top], 1)}
        ranked[each.token_id] = (each.logprob, each.rank)
        shaped.append({str(t): {"logprob": p, "rank": r, "decoded_token": text_of(t)} for t, (p, r) in ranked.items()})
    return shaped


@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_have_the_shape_of_vllm(server, num_top):
    body = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": num_top}
    _, chat, _ = server.post("/v1/chat/completions", {"messages": HELLO, **body})
    tokens = chat_tokens(HELLO)
    assert chat["prompt_logprobs"] == vllm_shape(scores(FakeModel(), tokens, num_top), num_top)
    [first, second] = ask(server, ["abc", "de"], echo=False, logprobs=None, n=1, **body)
    assert first["logprobs"] is None
    for choice, prompt in ((first, "abc"), (second, "de")):
        expected = scores(FakeModel(), ByteTokenizer().encode(prompt), num_top)
        assert choice["prompt_logprobs"] == vllm_shape(expected, num_top)


def test_both_shapes_at_once_have_their_own_numbers_of_alternatives(server):
    [choice] = ask(server, "abc", logprobs=1, prompt_logprobs=4, max_tokens=0)
    assert {len(each) for each in choice["prompt_logprobs"][1:]} <= {4, 5}
    assert {len(each) for each in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}


def test_without_being_asked_for_there_are_none(server):
    _, chat, _ = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
    [plain] = ask(server, "abc", max_tokens=2, logprobs=None)
    assert "prompt_logprobs" not in chat and "prompt_logprobs" not in plain and plain["logprobs"] is None


def test_a_prompt_may_fill_the_context_if_no_answer_is_wanted(server):
    [choice] = ask(server, [97] * 256, max_tokens=0)
    assert len(choice["logprobs"]["tokens"]) == 256
    status, reply, _ = server.post("/v1/completions", SCORING | {"prompt": [97] * 257, "max_tokens": 0})
    assert status == 400 and "the context holds 256 tokens" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "set echo or prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "greater than or equal to 0"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "less than or equal to 20"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "not sent in a stream"),
        ("/v1/completions", {"prompt": ["a" * 250] * 100, "prompt_logprobs": 20, "n": 1}, "at most 524288 fit"),
        ("/v1/completions", {"prompt": "a" * 200, "echo": True, "logprobs": 20, "n": 128}, "at most 524288 fit"),
        ("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": -1}, "greater than or equal to 0"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}, "greater than or equal to 1"),
        ("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 0, "stream": True}, "not sent in a stream"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_a_sentence(server, path, body, words):
    status, reply, _ = server.post(path, {"max_tokens": 1} | body)
    assert status == 400 and words in reply["error"]["message"], reply


def test_prompts_that_are_only_scored_are_counted(server):
    before = server.metrics()
    ask(server, "abcdefg", max_tokens=0)
    after = server.metrics()

    def change(name: str) -> float:
        return float(after.get(name, 0.0) - before.get(name, 0.0))

    assert change("vllm:prompt_tokens_total") == 8 and change("vllm:generation_tokens_total") == 0
    assert change("vllm:time_to_first_token_seconds_count") == 0


def test_a_client_that_leaves_ends_its_scoring():
    model = FakeModel()
    with live(fake_engine(model, max_context=256, cache_tokens=2048), ByteTokenizer(), 256) as server:
        server.engine.scheduler._max_scored_tokens = 1
        body = json.dumps({"prompt": [[97] * 250] * 8, "echo": True, "logprobs": 1, "max_tokens": 0}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(request, timeout=0.05)
        wait_until(lambda: not server.async_engine.num_open and not server.engine.has_requests)
        server.check_clean()


def test_a_harness_finds_what_it_needs_of_the_tokenizer(server):
    """lm-eval encodes with the server's tokenizer, and begins a text without context with the end token."""
    status, found, _ = server.get("/tokenizer_info")
    template = ByteTokenizer.chat_template
    assert (status, found) == (200, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    _, encoded, _ = server.post("/tokenize", {"prompt": found["eos_token"], "add_special_tokens": False})
    assert encoded["tokens"] == [EOS]
