"""`--measure`: walking along the target's answers accepts exactly what the engine accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outpace import LLM, SamplingParams, backends
from outpace.bench.workloads import built_in
from outpace.cli import main
from outpace.config import EngineConfig
from outpace.errors import UsageError
from outpace.models.embedded import own_head
from outpace.models.resolve import resolve_model
from outpace.plan.agreement import Text, Walk, by_lookup, by_model, chances, walk, write_answers
from outpace.plan.measure import measure_drafts
from outpace.plan.models import open_draft, open_model
from outpace.speculation.proposers.ngram import NgramProposer
from tests.tiny_gguf import write_model

DEPTH, NEW = 3, 24


def answered(output: list[int], max_tokens: int = 64) -> Text:
    return Text([1, 2], SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens), frozenset(), output)


def test_a_walk_counts_as_an_engine_does():
    own = [9, 1, 2, 9, 4, 5, 9, 9]  # of the draft; the target wrote 0 to 7
    found = walk(answered(list(range(8))), 2, lambda at, depth: own[at : at + depth])
    # at 1: 1 and 2 agree, the target adds 3; at 4: 4 and 5 agree, it adds 6; at 7: 9 differs
    assert found.steps == 3 and found.drafted == [3, 2] and found.accepted == [2, 2]
    assert found.tokens_per_step == pytest.approx(1 + 4 / 3)
    assert chances([found]) == pytest.approx((2 / 3, 1.0))


def test_a_walk_ends_with_the_answer():
    found = walk(answered(list(range(5)), max_tokens=5), 4, lambda at, depth: list(range(at, at + depth)))
    assert found.drafted == [1, 1, 1, 0] and found.accepted == [1, 1, 1, 0], "the last token is the target's own"
    assert chances([]) == () and chances([Walk([0, 0], [0, 0], 3)]) == ()


def test_lookups_walk_along_the_text():
    text = Text(
        [1, 2, 3, 4], SamplingParams(temperature=0.0, seed=0, max_tokens=32), frozenset(), [1, 2, 3, 4, 1, 2, 3, 4]
    )
    found = walk(text, 2, by_lookup(NgramProposer(2, 4), text))
    assert found.num_drafts < found.steps and sum(found.accepted) >= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_agrees_as_in_the_engine(tmp_path, temperature):
    """The draft is the target in fewer bits, so that it agrees often and not always."""
    target, draft = write_model(tmp_path / "t.gguf"), write_model(tmp_path / "d.gguf", kind="Q4_0")
    options: dict[str, Any] = {"backend": "native", "max_context": 256, "threads": 1}
    prompts = [[5, 6, 7, 8, 9], [40, 41, 42], [100, 3, 100, 3]]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=NEW) for i in range(len(prompts))]
    loaded = backends.load(EngineConfig(model=str(target), draft=str(draft), **options), target, draft)
    assert loaded.draft is not None
    end_ids = loaded.target.tokenizer.end_ids
    texts = [Text(prompt, each, end_ids) for prompt, each in zip(prompts, params, strict=True)]
    write_answers(loaded.target.runner, texts)
    walks = [walk(text, DEPTH, by_model(loaded.draft.runner, text)) for text in texts]
    loaded.target.runner.close()
    loaded.draft.runner.close()
    with LLM(str(target), draft=str(draft), speculation="on", method="draft", depth=DEPTH, prefix_reuse=False,
             **options) as llm:  # fmt: skip
        outputs = [llm.generate([prompt], each)[0].outputs[0] for prompt, each in zip(prompts, params, strict=True)]
    assert [text.output for text in texts] == [list(output.token_ids) for output in outputs]
    for ours, output in zip(walks, outputs, strict=True):
        theirs, used = output.speculation, len(output.speculation.drafted_per_position)
        assert ours.drafted[:used] == theirs.drafted_per_position
        assert ours.accepted[:used] == theirs.accepted_per_position
    assert 0 < sum(sum(each.accepted) for each in walks) < sum(sum(each.drafted) for each in walks)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(UsageError, match="only a name; give its GGUF file or folder"):
        measure_drafts(open_model("llama-3.1-8b"), [], built_in("chat", 1), [0.0])
    target = open_model(str(write_model(tmp_path / "t.gguf")))
    with pytest.raises(UsageError, match="nothing to compare"):
        measure_drafts(target, [open_draft("self:int4", target)], built_in("chat", 1), [0.0])


@pytest.mark.model
def test_a_head_agrees_as_in_the_engine_and_the_command_reports_it(capsys):
    path = resolve_model(None)
    head = own_head(path)
    arguments = [
        str(path),
        str(head),
        "--measure",
        "--num-prompts",
        "2",
        "--max-tokens",
        str(NEW),
        "--temperature",
        "0.7",
    ]
    assert main(["plan", *arguments, "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = found["measured"]["smollm2-135m"]["0.7"]
    draft = next(each for each in found["drafts"] if each["name"] == "smollm2-135m")
    assert draft["acceptance"]["source"] == "measured" and "measured here" in found["assumptions"][0]
    prompts = [prompt for name in ("code_edit", "summarise") for prompt in built_in(name, 1)]
    accepted = drafted = 0
    with LLM(
        str(path), speculation="on", method="head", depth=8, threads=1, prefix_reuse=False, max_context=2048
    ) as llm:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.7, seed=i, max_tokens=NEW)
            counts = llm.chat(list(prompt.messages), params)[0].outputs[0].speculation
            accepted, drafted = accepted + counts.num_accepted, drafted + counts.num_drafted
    assert measured["num_prompts"] == 2
    assert measured["rate"]["value"] == pytest.approx(accepted / drafted, abs=1e-9)
