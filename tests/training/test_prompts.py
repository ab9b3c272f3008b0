"""Prompts from files to token ids: formats, licences, overlap with what is kept for measuring, the prepared file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outpace.errors import UsageError
from outpace.training.contamination import overlaps, words
from outpace.training.documents import TASKS
from outpace.training.prepared import load_prepared, save_prepared
from outpace.training.prompts import licence_of, prepare
from tests.fakes import ByteTokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
LONG = "the quick brown fox jumps over the lazy dog while seven grey cats watch it from a wall"


class ChatTokenizer(ByteTokenizer):
    chat_template: str | None = TEMPLATE


class PlainTokenizer(ByteTokenizer):
    chat_template: str | None = None


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def write(path: Path, records: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def text(tokens) -> str:
    return bytes(int(token) for token in tokens if token < 256).decode()  # without the token that begins a text


def prepared(target, train, held=(), exclude=()):
    return prepare(target, ChatTokenizer(), prompt_files=train, held_files=held, exclude_files=exclude)


def test_every_format_becomes_the_same_chat_prompt(target, tmp_path):
    formats: list[dict[str, object]] = [
        {"prompt": "Say one."},
        {"instruction": "Say two.", "input": "", "response": "2"},
        {"instruction": "Add.", "input": "3 and 4"},
        {"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]},
        {"question": "How many?", "answer": "5"},
        {"turns": ["First turn.", "Second turn."], "category": "writing"},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello."}]},
    ]
    file = tmp_path / "all.json"
    file.write_text(json.dumps(formats))
    held = write(tmp_path / "held.jsonl", [{"turns": ["Measure me."], "category": "coding"}])
    found = prepared(target, [file], [held])
    assert [text(prompt) for prompt in found.train] == [
        "<user>Say one.<assistant>",
        "<user>Say two.<assistant>",
        "<user>Add.\n\n3 and 4<assistant>",
        "<user>Sort.\n\nb a<assistant>",
        "<user>How many?<assistant>",
        "<user>First turn.<assistant>",
        "<system>Be kind.<user>Hello.<assistant>",
    ]
    assert found.categories == ["coding"]
    assert text(found.user_begin) == "<user>" and text(found.user_end) == "<assistant>"


def test_overlapping_repeated_and_long_prompts_are_dropped_and_counted(target, tmp_path):
    train = write(
        tmp_path / "train.jsonl",
        [
            {"prompt": f"Please translate: {LONG.upper()}!"},
            {"prompt": "Unrelated."},
            {"prompt": "Unrelated."},
            {"prompt": "Held exactly."},
            {"prompt": "x " * 600},
        ],
    )
    held = write(tmp_path / "held.jsonl", [{"prompt": "held, exactly"}])
    exclude = write(tmp_path / "exclude.jsonl", [{"question": f"{LONG}. Why?", "answer": ""}])
    found = prepared(target, [train], [held], [exclude])
    assert [text(prompt) for prompt in found.train] == ["<user>Unrelated.<assistant>"]
    source = found.sources[0]
    assert (source.num_prompts, source.num_overlapping, source.num_repeated, source.num_long) == (1, 2, 1, 1)
    assert found.excluded == ["exclude.jsonl"]


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_not():
    kept = [words(LONG)]
    shared = words(LONG)[2:15]
    assert overlaps([["so", *shared, "end"], ["so", *shared[:12], "end"], ["so"]], kept) == [True, False, False]


def test_without_held_out_files_some_prompts_are_held_out(target, tmp_path):
    train = write(tmp_path / "train.jsonl", [{"prompt": f"Number {i}."} for i in range(101)])
    found = prepared(target, [train])
    assert len(found.held) == 3 and len(found.train) == 98
    assert not {text(prompt) for prompt in found.held} & {text(prompt) for prompt in found.train}


def test_the_prepared_file_comes_back_whole(target, tmp_path):
    train = write(tmp_path / "data" / "train.jsonl", [{"prompt": "One."}, {"prompt": "Three four."}])
    (tmp_path / "data" / "LICENSE").write_text("\nMIT License\n\nCopyright (c) someone\n")
    held = write(tmp_path / "held.jsonl", [{"prompt": "Two.", "class": "even"}])
    before = prepared(target, [train], [held])
    save_prepared(before, tmp_path / "out" / "prepared.npz")
    after = load_prepared(tmp_path / "out" / "prepared.npz")
    assert after.sources == before.sources and after.sources[0].licence == "MIT"
    assert after.held_sources == before.held_sources
    names = (
        "categories",
        "end_ids",
        "user_begin",
        "user_end",
        "frames",
        "vocab_size",
        "target",
        "fingerprint",
        "excluded",
    )
    assert before.frames
    for name in names:
        assert getattr(after, name) == getattr(before, name)
    for name in ("train", "held"):
        ours, theirs = getattr(before, name), getattr(after, name)
        assert len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


def test_tasks_about_a_text_are_ordinary_prompts_once_the_text_is_in(target, tmp_path):
    found = prepared(target, [write(tmp_path / "train.jsonl", [{"prompt": "One."}, {"prompt": "Two."}])])
    document = [ord(letter) for letter in "Bees dance."]
    assert len(found.frames) == len(TASKS)
    for (before, after), frame in zip(TASKS, found.frames, strict=True):
        asked = write(tmp_path / "asked.jsonl", [{"prompt": f"{before}Bees dance.{after}"}, {"prompt": "x"}])
        whole = next(each for each in prepared(target, [asked]).held if len(each) > 20)
        assert [*frame.before, *document, *frame.after] == whole.tolist()


def test_what_is_no_prepared_file_is_said_in_a_sentence(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UsageError, match=r"is not a prepared file .*; write one with `outpace distill prepare`"):
        load_prepared(tmp_path / "text")
    with pytest.raises(UsageError, match=r"cannot read .*nothing.*check the path"):
        load_prepared(tmp_path / "nothing")


def test_a_file_without_prompts_and_a_model_without_template_are_refused(target, tmp_path):
    with pytest.raises(UsageError, match=r"empty.jsonl holds no prompt"):
        prepared(target, [write(tmp_path / "empty.jsonl", [])])
    with pytest.raises(UsageError, match=r"odd.jsonl, record 1: expected `prompt` or `messages`"):
        prepared(target, [write(tmp_path / "odd.jsonl", [{"text": "hello"}])])
    good = write(tmp_path / "good.jsonl", [{"prompt": "Hello."}])
    with pytest.raises(UsageError, match="has no chat template"):
        prepare(target, PlainTokenizer(), prompt_files=[good], held_files=[], exclude_files=[])
    with pytest.raises(UsageError, match="no prompt is left to train on"):
        prepared(target, [good], [good])


@pytest.mark.parametrize(
    ("first", "name"),
    [("The MIT License", "MIT"), ("Apache License", "Apache-2.0"), ("Do as you like", "Do as you like")],
)
def test_a_licence_is_named_by_the_file_beside_the_prompts(first, name, tmp_path):
    assert licence_of(tmp_path / "train.jsonl") == "unknown"
    (tmp_path / "LICENSE").write_text(f"  {first}\nmore\n")
    assert licence_of(tmp_path / "train.jsonl") == name
