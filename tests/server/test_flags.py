"""The settings of `outpace serve` from flags, files and the environment; wrong ones are refused in one sentence."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from outpace.cli import main
from outpace.commands.serve import configure
from outpace.config import EngineConfig
from outpace.errors import UsageError
from outpace.server.config import ServerConfig
from outpace.server.flags import (
    ALIASES,
    ENGINE_FIELDS,
    LACKING,
    RAY_FLAGS,
    SERVER_FIELDS,
    VALUES_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    add_flags,
)
from outpace.server.settings import gather


def settings(*words: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return gather(vars(parser.parse_args(words)), environment or {})


def configured(*words: str, **options: Any) -> tuple[dict[str, Any], ServerConfig]:
    return configure(settings(*words, **options))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    try:
        status = main(["serve", *words])
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        status = exit.code
    return status, capsys.readouterr().err


def test_with_no_flags_every_default_is_the_configurations_own():
    engine, server = configured()
    assert engine == {} and server == ServerConfig(model_names=("SmolLM2-135M-Instruct",))
    assert server.host == "127.0.0.1" and not server.allowed_origins and not server.log_prompts


def test_the_command_lines_of_the_articles():
    engine, server = configured(
        "--model", "target.gguf", "--speculative-model", "draft.gguf", "--num-speculative-tokens", "5",
        "--speculative-draft-tensor-parallel-size", "1", "--tensor-parallel-size", "1", "--use-v2-block-manager",
        "--dtype", "auto", "--max-model-len", "2048",
        "--spec-decoding-acceptance-method", "typical_acceptance_sampler",
        "--typical-acceptance-sampler-posterior-threshold", "0.08",
        "--typical-acceptance-sampler-posterior-alpha", "0.2",
    )  # fmt: skip
    expected = {"model": "target.gguf", "draft": "draft.gguf", "depth": 5, "dtype": "auto", "max_context": 2048}
    assert engine == expected | {"tensor_parallel_size": 1}
    speculation = server.default_speculation
    assert (speculation.acceptance, speculation.posterior_threshold, speculation.posterior_alpha) == (
        "typical",
        0.08,
        0.2,
    )
    assert server.model_names == ("target", "target.gguf")


def test_the_command_line_of_todays_vllm():
    engine, server = configured(
        "target.gguf", "--spec-method", "draft_model", "--spec-model", "draft.gguf", "--spec-tokens", "5",
        "--max-model-len", "2048", "--chat-template", "{{ messages[0].content }}", "--seed", "7", "--root-path", "/llm",
        "--enforce-eager", "--no-enable-chunked-prefill", "--trust-remote-code", "--disable-log-requests",
    )  # fmt: skip
    assert engine == {
        "model": "target.gguf", "method": "draft", "draft": "draft.gguf", "depth": 5, "max_context": 2048,
        "chat_template": "{{ messages[0].content }}", "default_seed": 7,
    }  # fmt: skip
    assert server.root_path == "/llm"


def test_flags_with_underscores_are_the_same(capsys):
    """As in vLLM. Values keep theirs."""
    status, error = refusal(capsys, "no_such/model.gguf", "--max_model_len=0", "--served_model_name", "my_model")
    assert status == 2 and error == "outpace: max_context must be a whole number at least 1; got 0\n"


def test_the_template_and_the_usage_of_streams_have_server_wide_defaults(tmp_path):
    values = {"enable_thinking": False}
    _, server = configured("--default-chat-template-kwargs", json.dumps(values), "--enable-force-include-usage")
    assert server.default_template_variables == values and server.always_include_usage
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"default-chat-template-kwargs": values}))
    _, server = configured("--config", str(file))
    assert server.default_template_variables == values and not server.always_include_usage


def test_run_and_serve_have_the_same_names_of_the_same_settings():
    from outpace.commands import run, serve

    found: list[dict[str, str]] = []
    for command in (run, serve):
        parser = argparse.ArgumentParser(conflict_handler="resolve")
        command.add_arguments(parser)
        options = parser._option_string_actions
        field_of = {spelling: options[spelling].dest for spelling in options if spelling.startswith("--")}
        found.append({spelling: ENGINE_FIELDS.get(name, name) for spelling, name in field_of.items()})
    for flag, others in ALIASES.items():
        assert {found[0][flag], *(found[0][other] for other in others)} == {found[1][flag]}
        assert all(found[1][other] == found[1][flag] for other in others)
    shared = set(found[0]) & set(found[1])
    assert len(shared) > 20
    assert [flag for flag in shared - {"--seed"} if found[0][flag] != found[1][flag]] == []


def test_a_flag_without_effect_is_noticed_in_the_log(capsys, monkeypatch, caplog):
    monkeypatch.setattr("outpace.server.logs.configure", lambda *_: None)  # pytest owns the log of this process
    with caplog.at_level("WARNING", logger="outpace.server"):
        refusal(capsys, "no/such/model.gguf", "--enforce-eager", "--no-enable-chunked-prefill",
                "--block-size", "16")  # fmt: skip
    notices = [record.message for record in caplog.records]
    assert notices == [
        "--enforce-eager has no effect here: it turns off CUDA graphs in vLLM",
        "--enable-chunked-prefill has no effect here: prompts are always computed in chunks",
        "--block-size has no effect here: the cache's pages have a fixed size",
    ]


def test_a_gpus_settings_go_to_the_engine():
    engine, _ = configured(
        "folder", "--backend", "torch", "--device", "cuda", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.85"
    )  # fmt: skip
    expected = {"backend": "torch", "device": "cuda", "dtype": "bfloat16", "gpu_memory_utilization": 0.85}
    assert engine == {"model": "folder"} | expected


def test_control_tokens_in_messages_are_allowed_only_by_a_flag():
    assert not configured()[1].allow_control_tokens
    assert configured("--allow-control-tokens")[1].allow_control_tokens


def test_ngram_is_spelt_as_vllm_did():
    engine, _ = configured("--speculative-model", "[ngram]", "--ngram-prompt-lookup-max", "3")
    assert engine == {"method": "ngram", "ngram_max": 3}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}, {"draft": "DIR", "depth": 3}),
        ({"model": "draft.gguf", "draft_tensor_parallel_size": 1}, {"draft": "draft.gguf"}),
        ({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
         {"method": "ngram", "ngram_max": 4, "ngram_min": 2}),
        ({"method": "suffix", "model": None, "disable_by_batch_size": 8},
         {"method": "suffix", "disable_by_batch_size": 8}),
    ],
)  # fmt: skip
def test_vllms_object_for_speculation_means_the_flags(tmp_path, values, expected):
    """On the command line, in the environment, and as a mapping in a file."""
    assert configured("--speculative-config", json.dumps(values))[0] == expected
    assert configured(environment={"OUTPACE_SERVE_SPECULATIVE_CONFIG": json.dumps(values)})[0] == expected
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"speculative-config": values}))
    assert configured("--config", str(file))[0] == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tensor-parallel-size", "0"], "tensor_parallel_size must be a whole number between 1 and 64"),
        (["--speculative-draft-tensor-parallel-size", "4"], "runs whole on the first rank, which sends its tokens"),
        (["--pipeline-parallel-size", "2"], "splits a model by --tensor-parallel-size only"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--quantization", "bitsandbytes"], "invalid choice: 'bitsandbytes' (choose from"),
        (["--speculative-model-quantization", "int3"], "invalid choice: 'int3' (choose from"),
        (["--load-format", "pt"], "GGUF and safetensors files only"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization must be a number between 0.01 and 1"),
        (["--port", "70000"], "between 0 and 65535"),
        (["--port", "http"], "invalid int value"),
        (["--request-timeout", "0"], "above 0 seconds"),
        (["--max-num-seqs", "0"], "max_sequences must be"),
        (["--speculation", "off", "--num-speculative-tokens", "4"], "speculation is off"),
        (["--typical-acceptance-sampler-posterior-alpha", "0.3"], "which is lossy"),
        (["--no-such-flag"], "unrecognized arguments"),
        (["--max-num-sequences", "4"], "did you mean --max-num-seqs?"),
        (["--speculative-modle=x"], "did you mean --speculative-model?"),
        (["--chat-template", "no/such/file"], "there is no chat template 'no/such/file'"),
        (["--root-path", "llm/"], "--root-path begins with a slash"),
        (["--seed", "-1"], "default_seed must be"),
        (["a.gguf", "--model", "b.gguf"], "named twice"),
        (["--api-key-file", "missing.txt"], "check --api-key-file"),
        (["--config", "missing.yaml"], "check --config"),
        (["--api-key", ""], "must not be empty"),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs is not a JSON object"),
        (["--default-chat-template-kwargs", '{"messages": 1}'], "cannot set messages, which the server sets itself"),
        (["--speculative-config", "{"], "--speculative-config is not JSON"),
        (["--speculative-config", "[" * 100_000], "--speculative-config is not JSON"),
        (["--speculative-config", "3"], "is not a JSON object"),
        (
            ["--speculative-config", '{"method": "mtp", "model": "x"}'],
            "has the method 'mtp', but this build has eagle3",
        ),
        (["--speculative-config", '{"method": []}'], "has the method []"),
        (["--speculative-config", '{"method": "eagle3"}'], "names no model, which eagle3 needs"),
        (["--speculative-config", '{"model": "x", "revision": "y"}'], "has the key 'revision', but this build reads"),
        (["--speculative-config", '{"model": 3}'], "has 3 as model, which must be a string"),
        (["--speculative-config", '{"model": "x", "num_speculative_tokens": true}'], "must be a whole number"),
        (
            ["--speculative-config", '{"model": "x", "draft_tensor_parallel_size": 2}'],
            "a draft model or head runs whole",
        ),
        (["--speculative-config", '{"model": "x"}', "--speculative-model", "y"], "the same as --speculative-model;"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_status_2(capsys, words, says):
    status, error = refusal(capsys, *words)
    assert status == 2 and says in error, error
    assert "Traceback" not in error


def test_a_model_that_is_not_there_is_status_1(capsys, monkeypatch):
    monkeypatch.setattr("outpace.server.logs.configure", lambda *_: None)  # pytest owns the log of this process
    status, error = refusal(capsys, "no/such/model.gguf")
    assert status == 1 and "there is no file" in error


def test_every_flag_goes_somewhere():
    """No flag is ignored: each is in a table or handled by name."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    names = {action.dest for action in parser._actions} - {"help"}
    by_name = {"model_argument", "served_model_name", "api_key", "api_key_file", "allowed_origins", "config"}
    by_name |= {"spec_decoding_acceptance_method"}
    by_name |= {"speculative_config", "generation_config", "override_generation_config", "default_chat_template_kwargs"}
    by_name |= {f"typical_acceptance_sampler_posterior_{what}" for what in ("threshold", "alpha")}
    by_table = {*ENGINE_FIELDS, *SERVER_FIELDS, *RAY_FLAGS, *LACKING, *WITHOUT_EFFECT, *VALUES_WITHOUT_EFFECT}
    assert names == by_name | by_table
    assert set(SERVER_FIELDS.values()) <= set(ServerConfig.__dataclass_fields__)
    assert set(ENGINE_FIELDS.values()) <= set(EngineConfig.__dataclass_fields__)


# ---- files and the environment


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "port: 1001\nhost: 0.0.0.0\nmax_num_seqs: 3\nmodel: file.gguf\napi-key: [a, b]\nlog-prompts: false\n"
    )
    environment = {"OUTPACE_SERVE_PORT": "1002", "OUTPACE_SERVE_MODEL": "environment.gguf", "OTHER": "x"}
    found = settings("--config", str(file), "--port", "1003", environment=environment)
    assert found["port"] == 1003 and found["host"] == "0.0.0.0" and found["max_num_seqs"] == 3
    assert found["model"] == "environment.gguf" and found["api_key"] == ["a", "b"] and "log_prompts" not in found
    assert settings("--config", str(file), environment=environment)["port"] == 1002
    assert settings("mine.gguf", "--config", str(file), environment=environment)["model"] == "mine.gguf"
    assert settings(environment={"OUTPACE_SERVE_CONFIG": str(file)})["port"] == 1001


def test_toml_lists_and_switches(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        'served-model-name = ["one", "two"]\nenable-prefix-caching = false\nlog_prompts = true\nrequest-timeout = 2.5\n'
    )
    engine, server = configured("--config", str(file))
    assert engine == {"prefix_reuse": False}
    assert server.model_names == ("one", "two") and server.log_prompts and server.request_timeout == 2.5


def test_lists_in_the_environment_are_separated_by_commas():
    _, server = configured(environment={"OUTPACE_SERVE_API_KEY": "a, b", "OUTPACE_SERVE_ALLOWED_ORIGINS": "x,y"})
    assert server.api_keys == ("a", "b") and server.allowed_origins == ("x", "y")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "prot: 8000", r"no flag for prot; did you mean --port\?"),
        ("a.yaml", "colour: red", "no flag for colour; `outpace serve --help` lists them"),
        ("a.yaml", "port: eight", "invalid int value"),
        ("a.yaml", "- port", "must hold flags"),
        ("a.yaml", "port: [1, ", "is not valid"),
        ("a.toml", "port = ", "is not valid"),
        ("a.txt", "port: 1", "should end in"),
        ("a.yaml", "config: b.yaml", "names another configuration"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, name, text, says):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        settings("--config", str(file))


def test_an_unknown_variable_is_refused():
    with pytest.raises(UsageError, match="OUTPACE_SERVE_PROT"):
        settings(environment={"OUTPACE_SERVE_PROT": "1"})


def test_keys_from_a_file_join_those_of_the_command_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for the team\nalpha\n\n  beta  \n")
    _, server = configured("--api-key", "zero", "--api-key-file", str(file))
    assert server.api_keys == ("zero", "alpha", "beta")
    assert "beta" not in str(server.as_dict()) and "beta" not in repr(server)
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="no API key"):
        configured("--api-key-file", str(file))


def test_help_groups_flags_and_says_defaults(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert exit.value.code == 0
    for title in ("models:", "speculation:", "network and limits:", "logs and configuration:"):
        assert title in shown
    assert "(default: 127.0.0.1)" in shown and "(default: 8000)" in shown and "LOSSY" in shown


def test_serving_is_not_imported_by_other_commands():
    import subprocess

    code = (
        "import sys, outpace.cli, outpace.llm; sys.exit(any(m in sys.modules for m in ('fastapi', 'uvicorn', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60).returncode == 0


def test_replicas_need_ray_and_their_flags_need_replicas(monkeypatch, capsys):
    assert main(["serve", "--max-replicas", "3"]) == 2
    assert "--max-replicas needs --replicas" in capsys.readouterr().err
    monkeypatch.setattr("outpace.ray.installed.find_spec", lambda _: None)
    assert main(["serve", "--replicas", "2"]) == 2
    assert "--replicas needs Ray, which is not installed; pip install 'outpace[ray]'" in capsys.readouterr().err
