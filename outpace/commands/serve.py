"""`outpace serve`: serves a model with the OpenAI API; many flags are the same as vLLM's."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.config import EngineConfig, SpeculationParams
from outpace.errors import UsageError, json_object
from outpace.models.chat_template import RESERVED_VARIABLES, read_template
from outpace.models.generation_config import GenerationChoice
from outpace.server import speculative_config
from outpace.server.config import ServerConfig
from outpace.server.flags import (
    ACCEPTANCE,
    ENGINE_FIELDS,
    LACKING,
    RAY_FLAGS,
    SERVER_FIELDS,
    VALUES_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    add_flags,
)
from outpace.server.settings import gather

_EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_DESCRIPTION = """\
Serve a model with the OpenAI API. Without a model, the embedded SmolLM2-135M-Instruct is served; it needs no GPU and
no account. Flags may also be set in a file (--config) or in the environment (OUTPACE_SERVE_PORT=8001 for --port 8001).
The command line overrides the environment, and the environment overrides the file.

examples:
  outpace serve
  outpace serve target.gguf --speculative-model draft.gguf --num-speculative-tokens 5
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    add_flags(parser)


def execute(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name != "command"}
    settings = gather(given, os.environ)
    if any(name in settings for name in RAY_FLAGS):
        return _serve_replicas(given, settings)
    engine, server = configure(settings)
    generation = _generation(settings)

    from outpace.llm import LLM
    from outpace.server import logs
    from outpace.server.launch import serve

    logs.configure(server.log_level, server.log_format)
    log = logging.getLogger("outpace.server")
    for name, reason in (WITHOUT_EFFECT | VALUES_WITHOUT_EFFECT).items():
        if name in settings:
            log.warning("--%s has no effect here: %s", name.replace("_", "-"), reason)
    with LLM(**engine) as llm:
        defaults = generation.settle(Path(llm.config.model))
        server = replace(server, default_sampling=defaults.values)
        log.info("sampling defaults: %s; the values of a request come first", defaults)
        llm.engine.calibrate()  # now, while nothing runs: under load the engine might never be idle
        llm.engine.measure_floor()
        log.info("configuration", extra={"facts": {**llm.config.as_dict(), **server.as_dict()}})
        if not server.api_keys and server.host not in ("127.0.0.1", "::1", "localhost"):
            log.warning("anyone who can connect to %s may use this server; set --api-key to require a key", server.host)
        return serve(llm, server)


def _serve_replicas(given: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    from outpace.ray.environment import set_defaults
    from outpace.ray.installed import check_ray
    from outpace.server import logs

    _, server = configure(settings)
    if "replicas" not in settings:
        raise UsageError(f"--{next(name for name in RAY_FLAGS if name in settings).replace('_', '-')} needs --replicas")
    check_ray("--replicas")
    if "ray_address" not in settings:
        set_defaults()  # before Ray is imported
    from outpace.ray.application import Replicas
    from outpace.ray.serving import Service, serve_replicas

    logs.configure(server.log_level, server.log_format)

    def read() -> Service:
        settings = gather(given, os.environ)  # anew: the file may have changed
        engine, server = configure(settings)
        engine.setdefault("threads", max(int(settings.get("replica_cpus", 1)), 1))
        fields = {field: settings[name] for name, field in RAY_FLAGS.items() if name in settings and field}
        return Service(engine, server, _generation(settings), Replicas(**fields))

    return serve_replicas(read, settings.get("ray_address"))


def _generation(settings: Mapping[str, Any]) -> GenerationChoice:
    return GenerationChoice.of(settings.get("generation_config"), settings.get("override_generation_config"))


def configure(settings: Mapping[str, Any]) -> tuple[dict[str, Any], ServerConfig]:
    """Split the settings into the engine's and the server's. Reports wrong usage before a model is loaded."""
    settings = speculative_config.expand(settings)
    for name, lacking in LACKING.items():
        if name in settings and settings[name] not in lacking.harmless:
            raise UsageError(lacking.sentence)
    engine = {field: settings[name] for name, field in ENGINE_FIELDS.items() if name in settings}
    if engine.get("draft") == "[ngram]":
        del engine["draft"]
        engine.setdefault("method", "ngram")
    EngineConfig(**engine)
    if "chat_template" in engine:
        read_template(engine["chat_template"])
    server = {field: settings[name] for name, field in SERVER_FIELDS.items() if name in settings}
    return engine, ServerConfig(
        model_names=_names(settings),
        api_keys=_keys(settings),
        allowed_origins=tuple(settings.get("allowed_origins", ())),
        default_speculation=_acceptance(settings),
        default_template_variables=_template_variables(settings),
        **server,
    )


def _names(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The names clients may use for the model: --served-model-name, or the file's name and its path as given."""
    if "served_model_name" in settings:
        return tuple(settings["served_model_name"])
    model = settings.get("model")
    return (_EMBEDDED_NAME,) if model is None else tuple(dict.fromkeys((Path(model).stem or model, model)))


def _keys(settings: Mapping[str, Any]) -> tuple[str, ...]:
    keys: Sequence[str] = settings.get("api_key", ())
    path = settings.get("api_key_file")
    if path is None:
        return tuple(keys)
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the API keys in {path}: {error}; check --api-key-file") from error
    in_file = [line for line in lines if line and not line.startswith("#")]
    if not in_file:
        raise UsageError(f"there is no API key in {path}; write one key per line")
    return (*keys, *in_file)


def _template_variables(settings: Mapping[str, Any]) -> dict[str, Any]:
    given, flag = settings.get("default_chat_template_kwargs"), "--default-chat-template-kwargs"
    values = {} if given is None else json_object(flag, given, '{"enable_thinking": false}')
    reserved = sorted(RESERVED_VARIABLES & set(values))
    if reserved:
        raise UsageError(f"{flag} cannot set {reserved[0]}, which the server sets itself; leave it out")
    return values


def _acceptance(settings: Mapping[str, Any]) -> SpeculationParams:
    method = settings.get("spec_decoding_acceptance_method", "rejection_sampler")
    prefix = "typical_acceptance_sampler_"
    given = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
    if given and ACCEPTANCE[method] != "typical":
        raise UsageError(
            f"--{prefix.replace('_', '-')}... has an effect only with "
            "--spec-decoding-acceptance-method typical_acceptance_sampler, which is lossy; add that, or leave both out"
        )
    return SpeculationParams(acceptance=ACCEPTANCE[method], **given)
