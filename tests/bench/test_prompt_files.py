"""Loading of common prompt files, and mixing of sources by weight."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from outpace.bench.mix import draw, load_sources, parse_mix
from outpace.bench.prompt_files import load_prompts
from outpace.bench.workloads import Prompt
from outpace.errors import UsageError


def written(path: Path, records: Sequence[object], *, as_list: bool = False) -> Path:
    text = json.dumps(records) if as_list else "\n".join(json.dumps(record) for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def asked(prompts: list[Prompt]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_spec_bench_and_mt_bench(tmp_path):
    records = [{"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}]
    (prompt,) = load_prompts(written(tmp_path / "question.jsonl", records))
    assert prompt.messages == ({"role": "user", "content": "Compose a post."},)
    assert prompt.category == "writing"


def test_sharegpt_takes_the_first_question_and_leaves_out_what_begins_with_an_answer(tmp_path):
    records = [
        {"id": "a", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "Go on."}, {"from": "human", "value": "No."}]},
        {"id": "c", "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Who?"}]},
        {"id": "d", "conversations": []},
    ]
    prompts = load_prompts(written(tmp_path / "sharegpt.json", records, as_list=True))
    assert asked(prompts) == ["Why?", "Who?"]
    assert [len(prompt.messages) for prompt in prompts] == [1, 2]
    assert {prompt.category for prompt in prompts} == {"sharegpt"}


def test_humaneval_compressed_and_gsm8k(tmp_path):
    task = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""}
    (prompt,) = load_prompts(written(tmp_path / "HumanEval.jsonl.gz", [task]))
    assert "def f():" in asked([prompt])[0] and prompt.category == "humaneval"
    (prompt,) = load_prompts(written(tmp_path / "test.jsonl", [{"question": "How many?", "answer": "#### 18"}]))
    assert asked([prompt]) == ["How many?"] and prompt.category == "gsm8k"


def test_instructions_come_with_their_input(tmp_path):
    records = [
        {"instruction": "Add them.", "input": "3 and 4", "output": "7"},
        {"instruction": "Say hello.", "input": ""},
        {"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}, {"input": "d c"}]},
        {"question": "How many?"},
    ]
    prompts = load_prompts(written(tmp_path / "alpaca.json", records, as_list=True))
    assert asked(prompts) == ["Add them.\n\n3 and 4", "Say hello.", "Sort.\n\nb a", "How many?"]


def test_plain_lines_may_say_class_temperature_and_length(tmp_path):
    records = [
        {"prompt": "One", "class": "short", "temperature": 0.3, "max_tokens": 9},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Two"}]},
    ]
    first, second = load_prompts(written(tmp_path / "mine.jsonl", records), max_tokens=50)
    assert first == Prompt(({"role": "user", "content": "One"},), "short", 9, 0.3)
    assert (second.category, second.max_tokens, second.temperature) == ("mine", 50, None)


def test_unicode_line_separators_inside_a_prompt_do_not_break_it(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False), encoding="utf-8")
    assert asked(load_prompts(path)) == ["a\u2028b"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"text": "no"}', "record 1: expected `prompt` or `messages`"),
        (b'{"prompt": ""}', "text that is not empty"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens must be a whole number"),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature must be a number"),
        (b'["a"]', "record 1: expected an object"),
        (b"{not json", "neither JSON lines nor one JSON list"),
        (b"", "holds no prompt"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_wrong_files_are_refused_in_a_sentence(tmp_path, content, sentence):
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        load_prompts(path)


def test_a_missing_file_is_named():
    with pytest.raises(UsageError, match=r"cannot read the prompts nowhere\.jsonl"):
        load_prompts(Path("nowhere.jsonl"))
    with pytest.raises(UsageError, match="neither a built-in workload"):
        load_sources(["poetry"])


def test_mixes_are_read_with_their_weights():
    assert parse_mix("json=0.6,story=0.4") == {"json": 0.6, "story": 0.4}
    assert parse_mix("chat") == {"chat": 1.0}
    for wrong in ("json=0", "json=x", "=1", "json=1,,story=1"):
        with pytest.raises(UsageError, match="a mix is NAME=WEIGHT"):
            parse_mix(wrong)
    with pytest.raises(UsageError, match="appears twice"):
        parse_mix("json=1,json=2")


def test_every_stretch_of_a_mix_keeps_its_proportion():
    sources = load_sources(["json", "story"])
    drawn = draw(sources, {"json": 0.75, "story": 0.25}, 40)
    assert Counter(prompt.category for prompt in drawn) == {"json": 30, "story": 10}
    for begin in range(0, 40, 8):
        assert Counter(prompt.category for prompt in drawn[begin : begin + 8])["story"] == 2
    assert len({prompt.messages[0]["content"] for prompt in drawn[:16]}) == 16, "no prompt twice while others are left"
    assert draw(sources, {"json": 1, "story": 1}, 12, seed=3) == draw(sources, {"json": 1, "story": 1}, 12, seed=3)


def test_lengths_can_be_capped():
    assert all(prompt.max_tokens == 40 for prompt in load_sources(["chat"], max_tokens=40)["chat"])
