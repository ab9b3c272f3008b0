"""Programs on the engine in this process. One thread steps it; all generations under way are in one batch.

The calls of programs that were started earlier come first. So a program goes on with its next generation as soon as it
has the last one, while its prefix is still in the cache, and a few programs at a time run from begin to end instead of
all of them in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread

from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Request
from outpace.decoding.constraints import Constraint
from outpace.errors import OutpaceError, UsageError
from outpace.kv.prefix import common_prefix_length
from outpace.llm import LLM
from outpace.models.prompts import ChatPrompt, encode, render
from outpace.programs.parts import Answer, Call, Gen, Prompt, Select


@dataclass(frozen=True, slots=True)
class _Cancel:
    calls: Sequence[Call]


class _Stop:
    pass


@dataclass(slots=True, eq=False)
class _Running:
    """A call and its requests: one of a generation, one per choice of a selection."""

    call: Call
    requests: list[Request] = field(default_factory=list)
    num_unfinished: int = 0


class OnEngine:
    """A backend of programs; see `parts.Backend`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._inbox: SimpleQueue[Call | _Cancel | _Stop] = SimpleQueue()
        self._stream = llm.driver.submit(list)
        self._by_request: dict[int, _Running] = {}
        self._thread = Thread(target=self._run, name="outpace-programs", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        self._inbox.put(call)

    def cancel(self, calls: Sequence[Call]) -> None:
        self._inbox.put(_Cancel(calls))

    def close(self) -> None:
        self._inbox.put(_Stop())
        self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._by_request:
                    self._step()
        finally:
            self._stream.close()

    def _take_commands(self) -> bool:
        """Do all that is in the inbox; waits if nothing runs. False: stop."""
        while not self._inbox.empty() or not self._by_request:
            command = self._inbox.get()
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Cancel):
                self._cancel(command.calls)
            else:
                self._begin(command)
        return True

    def _begin(self, call: Call) -> None:
        running = _Running(call)
        try:
            part = call.part
            requests = self._generate(call) if isinstance(part, Gen) else self._score(call, part)
            running.requests = list(requests)
        except OutpaceError as error:
            call.done(error)
            return
        except Exception as error:  # of this call alone; the thread serves the others
            call.done(OutpaceError(f"the call could not be made ({type(error).__name__}: {error})"))
            return
        running.num_unfinished = len(running.requests)
        self._by_request.update((request.id, running) for request in running.requests)

    def _generate(self, call: Call) -> Sequence[Request]:
        engine, params = self._llm.engine, call.params
        tokens = self._encode(call.prompt)
        constraint: Constraint | None = engine.constraint_of(params)
        prediction = engine.read_prediction(params)
        return self._llm.driver.add(
            self._stream,
            lambda: [
                engine.submit(
                    tokens,
                    params,
                    priority=call.priority,
                    prediction=prediction,
                    constraint=constraint,
                    place=call.place,
                )
            ],
        )

    def _score(self, call: Call, part: Select) -> Sequence[Request]:
        """One request per choice, which gives the log-probabilities of the tokens after the common prefix of all.

        The tokens of a text are not always a prefix of those of a longer text, so the prefix may end before the choice.
        """
        before = self._encode(call.prompt) if call.prompt.text or call.prompt.messages else []
        each = [self._encode(call.prompt.with_text(choice)) for choice in part.choices]
        first = min(common_prefix_length(before, tokens) for tokens in each)
        if first == 0:
            raise UsageError("select needs text before it: the first token of a text has no probability")
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, speculation=SpeculationParams(mode="off"))

        def submit_all() -> list[Request]:
            for tokens in each:
                self._llm.engine.check(tokens, params)
            return [
                self._llm.engine.submit(tokens, params, priority=call.priority, scored_from=first) for tokens in each
            ]

        return self._llm.driver.add(self._stream, submit_all)

    def _encode(self, prompt: Prompt) -> list[int]:
        tokenizer = self._llm.tokenizer
        rendered: str | ChatPrompt = prompt.text
        if prompt.messages:
            is_open = bool(prompt.text)
            rendered = render(
                tokenizer,
                prompt.as_messages(),
                add_generation_prompt=not is_open,
                continue_final_message=is_open,
            )
        return encode(tokenizer, rendered, max_tokens=self._llm.config.max_context)

    def _step(self) -> None:
        try:
            deltas = self._stream.step()
        except Exception as error:  # the engine has ended all requests
            sentence = f"the engine failed ({type(error).__name__}: {error}), and ended all generations under way"
            self._fail_all(sentence if not isinstance(error, OutpaceError) else str(error))
            return
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finished(delta.request)
        if not deltas and not self._llm.engine.has_requests:
            self._fail_all("the engine was reset by another of its users; run the programs again")

    def _finished(self, request: Request) -> None:
        running = self._by_request.pop(request.id, None)
        if running is None:
            return  # cancelled
        running.num_unfinished -= 1
        if running.num_unfinished == 0:
            call = running.call
            call.done(
                _selected(call.part, running.requests)
                if isinstance(call.part, Select)
                else _generated(running.requests[0])
            )

    def _cancel(self, calls: Sequence[Call]) -> None:
        ended = [
            request
            for running in {id(each): each for each in self._by_request.values()}.values()
            for request in running.requests
            if running.call in calls
        ]
        for request in ended:
            self._by_request.pop(request.id, None)
        self._llm.driver.end(ended)

    def _fail_all(self, sentence: str) -> None:
        failed = {id(running): running for running in self._by_request.values()}
        self._by_request.clear()
        for running in failed.values():
            running.call.done(OutpaceError(sentence))


def _generated(request: Request) -> Answer:
    return Answer(
        request.writer.text,
        request.finish_reason,
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=request.num_shared,
        num_tokens=request.num_output,
        num_accepted=request.spec.num_accepted,
    )


def _selected(part: Select, requests: Sequence[Request]) -> Answer:
    answer = part.chosen([[entry.logprob for entry in request.prompt_logprobs] for request in requests])
    answer.num_prompt_tokens = sum(len(request.prompt) for request in requests)
    answer.num_cached_tokens = sum(request.num_shared for request in requests)
    return answer
