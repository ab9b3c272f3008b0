"""`outpace plan` as a user meets it: output, errors, speed of starting, the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from outpace.cli import main
from outpace.plan.html import as_html
from tests.tiny_gguf import write_model

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAIR = ["llama-3.1-70b", "llama-3.1-8b", "--gpu", "h100", "--gpus", "2"]


def plan(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return str(capsys.readouterr().out)


def report(capsys, *arguments: str):
    return json.loads(plan(capsys, *arguments, "--json"))


def test_the_articles_table_is_printed(capsys):
    text = plan(capsys, *PAIR, "--nominal")
    rows = re.findall(r"^(bf16|int8|int4) +(\w+) +([\d.]+) GB +(-?[\d.]+) GB", text, re.MULTILINE)
    assert rows == [
        ("bf16", "bf16", "156.0", "4.0"),
        ("int8", "bf16", "86.0", "74.0"),
        ("int8", "int8", "78.0", "82.0"),
        ("int4", "bf16", "51.0", "109.0"),
        ("int4", "int4", "39.0", "121.0"),
    ]


def test_text_begins_with_the_advice_and_fits_a_terminal(capsys):
    text = plan(capsys, *PAIR, "--precision", "int8", "--utilization", "0.92")
    assert text.startswith("Use ") and "assumed:" in text and "outpace serve" in text
    prose = [line for line in text.splitlines() if line.startswith(("-", "  ")) and "serve" not in line]
    assert max(map(len, prose)) <= 140


def test_json_is_one_strict_object_with_everything(capsys):
    found = report(capsys, *PAIR, "--precision", "int8")
    assert found["target"]["parameters"] == 70_553_706_496
    assert {"memory", "drafts", "advice", "assumptions", "precisions", "machine", "conditions"} <= set(found)
    assert found["drafts"][0]["by_load"][0]["concurrency"] == 1
    rooms = [each["plain"] for each in found["contexts"]]
    assert rooms == sorted(rooms, reverse=True) and len(rooms) == 4
    json.dumps(found, allow_nan=False)


def test_flags_change_the_plan(capsys):
    base = report(capsys, *PAIR, "--precision", "int8")
    wider = report(capsys, *PAIR, "--precision", "int8", "--kv-cache-dtype", "fp8")
    doubled = 2 * base["memory"]["cache_tokens"] / (1 + 4 / 128)  # a scale of 4 bytes for 128 numbers
    assert wider["memory"]["cache_tokens"] == pytest.approx(doubled, rel=0.01)
    assert report(capsys, *PAIR, "--precision", "int8", "--kv-cache-dtype", "FP8_E4M3")["memory"] == wider["memory"]
    assert "--kv-cache-dtype fp8" in wider["advice"]["commands"]["outpace"]
    more = report(capsys, *PAIR, "--precision", "int8", "--memory", "141", "--concurrency", "32", "--depth", "2")
    assert more["memory"]["left"] > base["memory"]["left"]
    assert {draft["speed"]["depth"] for draft in more["drafts"] if draft["kind"] == "draft"} == {2}
    given = report(capsys, *PAIR, "--precision", "int8", "--acceptance", "0.9", "0.8")
    sources = {draft["name"]: draft["acceptance"]["source"] for draft in given["drafts"]}
    assert sources["llama-3.1-8b"] == "given" and sources["a head"] == "guessed"


def test_reading_the_prompt_is_priced_and_said(capsys):
    pair = ["llama-3.1-8b", "llama-3.2-1b", "--cpu", "epyc-9654", "--context", "4096"]
    long, short = (report(capsys, *pair, "--output-tokens", n) for n in ("1000", "20"))
    speeds = [{each["name"]: each["speed"]["speedup"] for each in found["drafts"]} for found in (long, short)]
    assert speeds[0]["llama-3.2-1b"] > 1.05 * speeds[1]["llama-3.2-1b"]
    assert speeds[0]["ngram"] == speeds[1]["ngram"], "a lookup reads nothing"
    reading = next(each["reading"] for each in short["drafts"] if each["name"] == "llama-3.2-1b")
    assert reading["prompt_tokens"] == 2038 and reading["seconds"] > 0
    assert "It reads every prompt as well: " in plan(capsys, *pair, "--output-tokens", "1000", "--acceptance", "0.9")


def test_a_machine_that_the_table_lacks(capsys):
    own = ["--memory", "48", "--bandwidth", "900", "--tflops", "200"]
    assert report(capsys, "llama-3.1-8b", "--gpu", "my card", *own)["machine"]["name"] == "my card"


def test_a_gguf_file_on_a_cpu(capsys, tmp_path):
    path = write_model(tmp_path / "model.gguf", "qwen2", "Q8_0")
    found = report(capsys, str(path), "--cpu", "epyc-9654")
    assert found["machine"]["is_gpu"] is False and found["precisions"] == []
    assert str(tmp_path) not in json.dumps(found["advice"]), "a report does not name folders"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["llama-3.1-71b"], 1, "did you mean llama-3.1-70b"),
        (["no/where.gguf"], 1, "there is no file or folder no/where.gguf"),
        (["llama-3.1-8b", "--gpu", "h1000"], 2, "the table has no machine 'h1000'"),
        (["llama-3.1-8b", "--gpus", "-2"], 2, "--gpus must be at least 1; got -2"),
        (["llama-3.1-8b", "--gpus", "3"], 2, "do not divide over 3 GPUs"),
        (["llama-3.1-8b", "--memory", "-5"], 2, "--memory must be a number above 0"),
        (["llama-3.1-8b", "--concurrency", "1000000"], 2, "--concurrency must be at most 4096"),
        (["llama-3.1-8b", "--context", "0"], 2, "--context must be at least 1"),
        (["llama-3.1-8b", "--utilization", "1.2"], 2, "utilization must be above 0"),
        (["llama-3.1-8b", "--precision", "int3"], 2, "there is no precision 'int3'"),
        (["llama-3.1-8b", "--cache-precision", "int4"], 2, "the cache cannot be kept in 'int4'"),
        (["llama-3.1-8b", "llama-3.1-70b"], 2, "a draft must be smaller than its target"),
        (["llama-3.1-8b", "--acceptance", "80"], 2, "a share between 0 and 1"),
        (["llama-3.1-8b", "--temperature", "-1"], 2, "a temperature must be between 0 and 100; got -1"),
        (["llama-3.1-8b", "--temperature", "0", "nan"], 2, "a temperature must be between 0 and 100; got nan"),
        (["llama-3.1-8b", "--temperature", "inf"], 2, "a temperature must be between 0 and 100; got inf"),
        (["llama-3.1-8b", "--utilization", "nan"], 2, "utilization must be above 0"),
        (["llama-3.1-8b", "--bandwidth", "inf"], 2, "--bandwidth must be a number above 0, below a billion; got inf"),
        (["llama-3.1-8b", "--acceptance", "nan"], 2, "a share between 0 and 1"),
        (["llama-3.1-8b", "--gpus", "0"], 2, "--gpus must be at least 1; got 0"),
        (["llama-3.1-8b", "--cpu", "epyc-9654", "--gpus", "2"], 2, "epyc-9654 is not a GPU"),
        (["llama-3.1-8b", "--gpus", "4", "--draft-gpus", "3"], 2, "a draft runs on 1 GPU or on all 4; got 3"),
        (["llama-3.1-8b", "--gpu", ""], 2, "the table has no machine ''"),
        (["llama-3.1-8b", "--precision", ""], 2, "there is no precision ''"),
        (["llama-3.1-8b", "--draft-precision", "zz"], 2, "there is no precision 'zz'"),
        (["llama-3.1-8b", ""], 2, "a draft's name is empty"),
        (["  "], 2, "the model's name is empty"),
        (["x" * 5000], 1, "File name too long; check the name"),
        (["llama-3.1-8b", "x" * 5000], 1, "File name too long; check the name"),
        (["llama-3.1-8b", "self:bf16"], 2, "there is no draft 'self:bf16'; use one of self:int4"),
        (["llama-3.1-8b", "--context", "100", "--output-tokens", "5000"], 2, "is longer than its sequence of 100"),
        (["llama-3.1-8b", "--max-tokens", "-3"], 2, "--max-tokens must be at least 1; got -3"),
        (["llama-3.1-8b", "--here", "--threads", "0"], 2, "--threads must be between 1 and"),
        (["llama-3.1-8b", "--here", "--threads", "100000"], 2, "--threads must be between 1 and"),
        (["llama-3.1-8b", "--threads", "1"], 2, "add --here or --measure"),
        (["llama-3.1-8b", "--prompts", "p.jsonl"], 2, "--prompts is for --measure"),
        (["llama-3.1-8b", "--num-prompts", "3"], 2, "--num-prompts is for --measure"),
        (["llama-3.1-8b", "--backend", "torch"], 2, "--backend is for --measure"),
        (["llama-3.1-8b", "--measure", "--acceptance", "0.8"], 2, "leave out one of them"),
        (["llama-3.1-8b", "--measure", "--prompts", "/no/file"], 2, "cannot read the prompts /no/file"),
        (["llama-3.1-8b", "--depth", "0"], 2, "--depth must be between 1 and 64"),
        (["llama-3.1-8b", "--measure"], 2, "give its GGUF file or folder"),
        (["llama-3.1-8b", "--here", "--gpu", "h100"], 2, "leave out one of them"),
        (["llama-3.1-8b", "--candidates", "/no/such/dir"], 2, "is not a folder"),
        (["llama-3.1-8b", "--html", "/dev/null/x.html"], 2, "cannot write"),
    ],
)
def test_nonsense_gets_one_sentence(capsys, arguments, status, words):
    assert main(["plan", *arguments]) == status
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        '{"hidden_size": 64}', "{", "[]", "", "\0", "[" * 100_000, '{"hidden_size": NaN}', '{"peft_type": "LORA"}',
        '{"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}',
        *(json.dumps(LLAMA | changes) for changes in (
            {"num_hidden_layers": 0}, {"num_hidden_layers": 16.5}, {"num_hidden_layers": "4"},
            {"num_hidden_layers": 1_000_000_000}, {"hidden_size": -64}, {"vocab_size": True},
            {"num_key_value_heads": 3}, {"kv_lora_rank": 512}, {"quantization_config": "int4"},
            {"num_experts": 8, "first_k_dense_replace": 99}, {"num_experts": 8, "num_experts_per_tok": 0},
            {"sliding_window": 128, "layer_types": ["sliding_attention"] * 99},
        )),
    ],
)  # fmt: skip
def test_a_config_without_layers(capsys, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert f"{tmp_path / 'config.json'} " in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("size", [0, 20, 200, 2000, 20_000])
def test_a_truncated_file(capsys, tmp_path, size):
    path, whole = tmp_path / "model.gguf", write_model(tmp_path / "whole.gguf").read_bytes()
    path.write_bytes(whole[:size])
    for arguments in ([str(path)], [str(tmp_path / "whole.gguf"), str(path)]):
        assert main(["plan", *arguments, "--cpu", "epyc-9654"]) == 1
        printed = capsys.readouterr()
        assert str(path) in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("content", [b"hello world" * 100, b"\x08" + bytes(7) + b"{}      ", b"GGUF" + bytes(20)])
def test_a_file_of_another_kind(capsys, tmp_path, content):
    (tmp_path / "model.bin").write_bytes(content)
    assert main(["plan", str(tmp_path / "model.bin")]) == 1
    assert "model.bin" in capsys.readouterr().err


def test_folders_without_a_model(capsys, tmp_path):
    (tmp_path / "config.json").mkdir()
    for arguments, words in (
        ([str(tmp_path)], "config.json"),
        (["llama-3.1-8b", str(tmp_path)], "is a folder without a config.json"),
        (["llama-3.1-8b", "--candidates", str(tmp_path)], "has no GGUF file and no folder"),
    ):
        assert main(["plan", *arguments]) in (1, 2)
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_what_is_cut_short_is_told(capsys):
    assert "at most 4,096 tokens, all that llama-2-7b was trained for" in plan(
        capsys, "llama-2-7b", "--context", "9999"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: TARGET"),
        (["llama-3.1-8b", "--memory", "80GB"], "argument --memory: invalid float value: '80GB'"),
        (["llama-3.1-8b", "--context", "8k"], "argument --context: invalid int value: '8k'"),
        (["llama-3.1-8b", "--depth", "2.5"], "argument --depth: invalid int value: '2.5'"),
        (["llama-3.1-8b", "--workload", "poems"], "invalid choice: 'poems'"),
        (["llama-3.1-8b", "--gpuz", "1"], "did you mean --gpu?"),
    ],
)
def test_what_cannot_be_parsed_is_named_below_a_short_usage(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 2 and words in lines[1]


def test_different_tokenizers_are_bridged_and_the_price_is_told(capsys):
    pair = ("llama-3.1-70b", "qwen2.5-0.5b", "--gpu", "h200", "--gpus", "2", "--acceptance", "0.9")
    text = re.sub(r"\n\s+", " ", plan(capsys, *pair))
    assert "Use qwen2.5-0.5b" in text and ", as text" in text
    assert "the tokenizers differ: llama-3 and qwen2. Outpace bridges the tokenizers" in text
    assert re.search(r"Each draft token costs about \d+ us more", text)
    found = report(capsys, *pair, "--temperature", "0.8")
    [named] = [draft for draft in found["drafts"] if draft["name"] == "qwen2.5-0.5b"]
    assert named["bridge"]["way"] == "tokens" and named["bridge"]["token_seconds"] > 0
    assert "--draft Qwen/Qwen2.5-0.5B-Instruct" in found["advice"]["commands"]["outpace"]
    assert "vllm" not in found["advice"]["commands"]
    siblings = report(capsys, "llama-3.1-70b", "llama-3.2-1b", "--gpu", "h200", "--gpus", "2")
    assert siblings["drafts"][0]["bridge"] is None and "vllm" in siblings["advice"]["commands"]


def test_it_needs_no_torch_no_engine_and_no_server():
    code = (
        "import sys; import outpace.plan; assert 'numpy' not in sys.modules; "
        "from outpace.cli import main; main(['plan', 'llama-3.1-70b', 'llama-3.1-8b', '--gpus', '2']); "
        "heavy = [m for m in ('torch', 'outpace.engine.engine', 'outpace.server.app', 'pydantic', 'xllamacpp') "
        "if m in sys.modules]; assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


# ---- the page


@pytest.fixture
def made(capsys):
    return report(capsys, *PAIR, "--precision", "int8", "--utilization", "0.92")


def test_the_page_has_its_pictures_and_asks_for_nothing(made):
    page = as_html(made)
    assert page.count("<svg") == 2 and page.count('class="split"') >= 4
    assert "<script" not in page and "http" not in page and "url(" not in page
    assert "nan" not in page.lower().replace("finance", "") and "None" not in page
    spoiled = made | {"target": made["target"] | {"name": "<script>alert(1)</script>"}}
    assert "<script>" not in as_html(spoiled)


def test_a_page_without_any_usable_draft(capsys):
    page = as_html(report(capsys, "llama-3.1-405b", "--gpu", "l4"))
    assert "does not fit" in page and "<svg" not in page


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1100, 390])
def test_the_page_in_a_browser(made, tmp_path, width):
    path, image = tmp_path / "plan.html", tmp_path / "shot.png"
    path.write_text(as_html(made), encoding="utf-8")
    subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
         f"--window-size={width},3600", f"--screenshot={image}", path.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    pixels = np.asarray(pytest.importorskip("PIL.Image").open(image).convert("RGB")).astype(int)
    for colour in ((29, 78, 216), (194, 65, 12), (4, 120, 87)):  # weights, draft and cache of the split; lines
        near = np.abs(pixels - np.array(colour)).sum(axis=2) < 90
        assert near.sum() > 400, colour
