"""The offline API: prompts in, completions out. Owns an engine, and encodes and decodes text for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace import backends
from outpace.config import EngineConfig, Method, Pooling, SamplingParams, SpeculationMode, SpeculationParams
from outpace.core import CompletionOutput, Delta, Request, RequestOutput, Timing, TokenLogprob, ToolCall
from outpace.decoding.constraints import Constraint
from outpace.decoding.randomness import child_seed
from outpace.engine.driver import Driver, Stream
from outpace.engine.engine import Engine
from outpace.errors import UsageError
from outpace.models.chat_template import read_template
from outpace.models.embedded import cache_dir
from outpace.models.prompts import ChatPrompt, encode, render
from outpace.models.resolve import resolve_model
from outpace.models.tool_calls import syntax_for
from outpace.models.tool_calls.history import UNKNOWN_SYNTAX
from outpace.models.tool_calls.tools import check_tools
from outpace.models.tool_calls.use import ToolUse, tool_use
from outpace.speculation.costs.file import CostFile
from outpace.speculation.proposers.base import NoDraft, Proposer
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.grammar import GrammarProposer
from outpace.speculation.proposers.head import HeadProposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.speculation.proposers.other_vocabulary import OtherVocabularyProposer
from outpace.speculation.proposers.prediction import PredictionProposer
from outpace.speculation.proposers.prediction_text import Prediction
from outpace.speculation.proposers.suffix import SuffixProposer
from outpace.speculation.proposers.text_bridge import ways_of
from outpace.speculation.proposers.tree import TreeProposer

log = logging.getLogger("outpace.llm")
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A loaded model.

    >>> llm = LLM()                                    # the embedded SmolLM2-135M-Instruct
    >>> llm.generate("The capital of France is")[0].outputs[0].text
    >>> LLM("target.gguf", draft="draft.gguf", speculation="on", depth=4)

    Further keyword arguments are the fields of `EngineConfig`. Several threads may use one LLM: their requests run in
    one batch. Control tokens that messages contain are plain text, unless `allow_control_tokens` is set; in the text
    of `generate` they are control tokens.
    """

    def __init__(
        self,
        model: str | None = None,
        draft: str | None = None,
        *,
        speculation: SpeculationMode = "auto",
        method: Method | None = None,
        depth: int | None = None,
        allow_control_tokens: bool = False,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise UsageError(f"LLM does not know the option {unknown[0]!r}; see outpace.config.EngineConfig")
        wanted = EngineConfig(model=model, draft=draft, speculation=speculation, method=method, depth=depth, **options)
        self._allow_control_tokens = allow_control_tokens
        template = read_template(wanted.chat_template) if wanted.chat_template is not None else None
        model_path = resolve_model(model)
        draft_path = resolve_model(draft) if draft is not None and wanted.self_draft is None else None
        loaded = backends.load(wanted, model_path, draft_path)
        self.config = loaded.config
        self._target, self._draft = loaded.target, loaded.draft
        self._has_other_vocabulary = loaded.has_other_vocabulary
        self.tokenizer = loaded.target.tokenizer
        if template is not None:
            self.tokenizer.chat_template = template
        self.description = loaded.target.description
        cost_file = CostFile.for_config(loaded.config, cache_dir())
        # A runner that verifies drafts where they were made needs them in its own vocabulary.
        followed = None if loaded.has_other_vocabulary else loaded.draft
        self.engine = Engine(loaded.target, self._proposers(), loaded.config, draft=followed, cost_file=cost_file)
        self.driver = Driver(self.engine)

    def _proposers(self) -> dict[str, Proposer]:
        proposers: list[Proposer] = [
            NoDraft(),
            GrammarProposer(),
            NgramProposer(self.config.ngram_min, self.config.ngram_max),
            SuffixProposer(self.config.suffix_store_tokens),
            PredictionProposer(),
        ]
        target = self._target.runner
        if target.capabilities.head is not None:
            proposers.append(HeadProposer(target, target.capabilities.head))
            if "tree" in self.config.methods and target.capabilities.head.has_trees:
                proposers.append(TreeProposer(target, target.capabilities.head))
            elif "tree" in self.config.methods:
                raise UsageError(
                    "this head cannot draft trees here: they need the torch backend on one device, without "
                    "batch_invariant; use method 'head'"
                )
        if self._draft is not None and self._has_other_vocabulary:
            verifier = target.capabilities.verifier
            bridged = OtherVocabularyProposer(self._draft, self.tokenizer, target.vocab_size, verifier)
            log.info("the draft's tokenizer is bridged: %s; `outpace costs` shows what it costs the host",
                     ways_of(bridged.shared.share))  # fmt: skip
            proposers.append(bridged)
        elif self._draft is not None:
            proposers.append(DraftModelProposer(self._draft, target.vocab_size, target.capabilities.verifier))
        return {proposer.name: proposer for proposer in proposers}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids) in one batch. Results are in the order of the prompts."""
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        encoded = [self._encode(prompt) for prompt in many]
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        return self._run(encoded, texts, _params_per_prompt(params, len(many)), progress)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "last") -> list[NDArray[np.float32]]:
        """The embedding of every prompt (text or token ids), of length 1: the hidden state of its last token after the
        final norm, or the mean of all."""
        # Nothing is drafted for a prompt, so costs need not be measured for it.
        plain = SpeculationParams(mode="off")
        params = SamplingParams(pooling=pooling, max_tokens=0, speculation=plain)
        return [output.embedding for output in self.generate(prompts, params) if output.embedding is not None]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        progress: bool | None = None,
        allow_control_tokens: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. `allow_control_tokens` replaces the setting of the LLM.

        `tools` and `tool_choice` are as in OpenAI's API; the calls of an answer are its `tool_calls`.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        use = self._tool_use(tools, tool_choice)
        rendered = [self._render(conversation, allow_control_tokens, use) for conversation in conversations]
        encoded = [self._encode(prompt) for prompt in rendered]
        texts = [prompt.text for prompt in rendered]
        each = _params_per_prompt(params, len(texts))
        if use is not None:
            each = [use.constrain(one, self.tokenizer) for one in each]
        outputs = self._run(encoded, texts, each, progress)
        if use is not None:
            for output in outputs:
                for one in output.outputs:
                    _separate_calls(one, use)
        return outputs

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Stream:
        """Stream one prompt or conversation, delta by delta. Closing the stream aborts the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise UsageError(f"stream gives one completion and n is {params.n}; use generate for several")
        given: Any = prompt
        is_plain = _is_one_prompt(given)
        encoded = self._encode(given) if is_plain else self.encode_chat(given)
        # Here, because no step runs while requests are submitted.
        constraint, prediction = self.engine.constraint_of(params), self.engine.read_prediction(params)
        return self.driver.submit(
            lambda: [self.engine.submit(encoded, params, constraint=constraint, prediction=prediction)]
        )

    def render_chat(self, messages: Sequence[Message]) -> str:
        """A conversation as the text the model was trained to continue."""
        return self._render(messages).text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as token ids."""
        return self._encode(self._render(messages))

    def close(self) -> None:
        """Free the models' memory. Nothing can be generated after that."""
        self.driver.close()
        self._target.runner.close()
        if self._draft is not None:
            self._draft.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tool_use(self, tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]) -> ToolUse | None:
        syntax = syntax_for(self.tokenizer.chat_template)
        checked = check_tools(tools)
        if syntax is None and checked:
            raise UsageError(UNKNOWN_SYNTAX)
        return None if syntax is None else tool_use(checked, choice, syntax=syntax)

    def _render(
        self, messages: Sequence[Message], allow_control_tokens: bool | None = None, use: ToolUse | None = None
    ) -> ChatPrompt:
        allowed = self._allow_control_tokens if allow_control_tokens is None else allow_control_tokens
        tools = () if use is None else use.tools
        return render(self.tokenizer, messages, tools=tools, allow_control_tokens=allowed)

    def _encode(self, prompt: Prompt | ChatPrompt) -> list[int]:
        self.driver.check_open()
        if isinstance(prompt, str | ChatPrompt):
            return encode(self.tokenizer, prompt, max_tokens=self.config.max_context)
        return _token_ids(prompt)

    def _run(
        self,
        encoded: Sequence[Sequence[int]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        progress: bool | None,
    ) -> list[RequestOutput]:
        groups: list[list[Request]] = []
        read = [(self.engine.constraint_of(each), self.engine.read_prediction(each)) for each in params]

        def submit_all() -> list[Request]:
            requests: list[Request] = []
            try:
                for tokens, each, (constraint, prediction) in zip(encoded, params, read, strict=True):
                    group = [self._submit(tokens, each, index, constraint, prediction) for index in range(each.n)]
                    groups.append(group)
                    requests += group
            except BaseException:
                self.driver.end(requests)
                raise
            return requests

        num_requests = sum(each.n for each in params)
        show = sys.stderr.isatty() and num_requests > 1 if progress is None else progress
        with self.driver.submit(submit_all) as stream, _Progress(num_requests, enabled=show) as bar:
            for delta in stream:
                bar.add(delta)
        return [
            RequestOutput(
                text,
                list(tokens),
                [completion(r, i) for i, r in enumerate(group)],
                prompt_scores(group[0]),
                None if group[0].pooled is None else group[0].pooled.embedding(),
            )
            for text, tokens, group in zip(texts, encoded, groups, strict=True)
        ]

    def _submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        index: int,
        constraint: Constraint | None,
        prediction: Prediction | None,
    ) -> Request:
        seed = None if params.seed is None else child_seed(params.seed, index)
        return self.engine.submit(tokens, params, seed=seed, constraint=constraint, prediction=prediction)


class _Progress:
    """A progress bar over requests, with tokens per second."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._total = total
        self._num_tokens = 0

    def __enter__(self) -> _Progress:
        if self._enabled:
            from time import perf_counter

            from tqdm import tqdm

            self._clock, self._begin = perf_counter, perf_counter()
            self._bar = tqdm(total=self._total, unit="request", dynamic_ncols=True)
        return self

    def add(self, delta: Delta) -> None:
        if self._enabled:
            self._num_tokens += len(delta.token_ids)
            if delta.finish_reason:
                rate = self._num_tokens / max(self._clock() - self._begin, 1e-9)
                self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                self._bar.update(1)

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._bar.close()


def completion(request: Request, index: int = 0) -> CompletionOutput:
    """The output of a request so far, finished or not."""
    began = request.submitted_at
    return CompletionOutput(
        index=index,
        text=request.writer.text,
        token_ids=request.tokens[len(request.prompt) :],
        finish_reason=request.finish_reason,
        logprobs=request.writer.logprobs if request.params.logprobs is not None else None,
        speculation=request.spec,
        timing=Timing(
            time_to_first_token=None if request.first_token_at is None else request.first_token_at - began,
            total=None if request.finished_at is None else request.finished_at - began,
        ),
    )


def prompt_scores(request: Request) -> list[TokenLogprob | None] | None:
    """The log-probabilities of the prompt, one per token; None if they were not asked for."""
    return None if request.params.prompt_logprobs is None else [None, *request.prompt_logprobs]


def _separate_calls(output: CompletionOutput, use: ToolUse) -> None:
    found = use.read(output.text)
    output.text, output.tool_calls = found.content, [ToolCall(call.name or "", call.arguments) for call in found.calls]


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt: a text, or token ids, also of numpy."""
    if isinstance(prompts, str):
        return True
    _check_is_list(prompts)
    return len(prompts) > 0 and not isinstance(prompts[0], str | Mapping) and not hasattr(prompts[0], "__len__")


def _check_is_list(prompt: Any) -> None:
    if isinstance(prompt, bytes | bytearray | Mapping) or not hasattr(prompt, "__len__"):
        raise UsageError(f"a prompt is a text or a list of token ids; this one is of type {type(prompt).__name__}")


def _token_ids(prompt: Sequence[int]) -> list[int]:
    _check_is_list(prompt)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise UsageError(f"token ids are whole numbers; this prompt has {token!r}")
    return [int(token) for token in prompt]


def _params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UsageError(f"there are {count} prompts and {len(params)} sampling parameters; give one, or one each")
    return list(params)
