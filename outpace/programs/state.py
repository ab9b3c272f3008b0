"""The state of a program: a text or conversation that grows by what the program adds and by what is generated.

Adding a generation does not wait for it. What is added after it is queued, and only reading waits. So the branches of a
fork run at the same time in a plain loop, and a program without branches of its own never wakes a thread between its
generations: the backend goes on with the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Condition
from typing import Any

from outpace.config import SamplingParams
from outpace.decoding.randomness import child_seed
from outpace.errors import OutpaceError, UsageError
from outpace.programs.parts import Answer, Backend, Call, Gen, Message, Part, Prompt, Select


@dataclass(frozen=True, slots=True)
class Setting:
    """What all states of one program have in common."""

    backend: Backend
    program: str
    params: SamplingParams
    priority: int


class State:
    """`s += text`, `s += gen(...)`, `s += select(...)`; `s[name]` waits for what was generated under that name.

    With messages (`s += user(...)`) it is a conversation, and what follows a message is the model's answer to it.
    """

    def __init__(self, setting: Setting, *, seed: int | None, prompt: Prompt | None = None) -> None:
        self._setting = setting
        self._seed = seed
        self._prompt = prompt or Prompt("")
        self._answers: dict[str, Answer] = {}
        self._values: dict[str, Any] = {}
        self._queue: deque[Part] = deque()
        self._call: Call | None = None  # the generation under way
        self._num_generations = 0
        self._num_forks = 0
        self._branches: list[State] = []
        self._error: OutpaceError | None = None
        self._changed = Condition()

    # ---- growing

    def __iadd__(self, part: Part) -> State:
        if not isinstance(part, str | Message | Gen | Select):
            raise UsageError(f"a state grows by text, messages, gen(...) and select(...); got {type(part).__name__}")
        with self._changed:
            self._check()
            self._queue.append(part)
            if self._call is None:
                self._proceed()
        return self

    def fork(self, count: int) -> Branches:
        """States that go on from here, each in its own way. Their common prefix is computed once."""
        if count < 1:
            raise UsageError(f"fork makes at least one branch; got {count}")
        self.wait()
        with self._changed:
            made = [self._branch(self._num_forks + i) for i in range(count)]
            self._num_forks += count
            self._branches += made
        return Branches(self, made)

    def _branch(self, number: int) -> State:
        # Branches with one seed would all say the same.
        seed = None if self._seed is None else child_seed(self._seed, 1 + number)
        branch = State(self._setting, seed=seed, prompt=self._prompt)
        branch._answers, branch._values = dict(self._answers), dict(self._values)
        branch._num_generations = self._num_generations
        return branch

    # ---- reading

    def __getitem__(self, name: str) -> Any:
        """What was generated or selected under this name; after `join`, a list with that of every branch."""
        with self._changed:
            self._changed.wait_for(lambda: (name in self._values and not self._will_write(name)) or self._is_idle)
            self._check()
            if name not in self._values:
                known = ", ".join(map(repr, self._values)) or "none"
                raise KeyError(f"nothing was generated under the name {name!r}; names so far: {known}")
            return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Keep a value of the program's own, to be found in the results."""
        with self._changed:
            self._values[name] = value

    def __contains__(self, name: str) -> bool:
        self.wait()
        return name in self._values

    def answer(self, name: str) -> Answer:
        """The text with its finish reason, scores and counts of tokens."""
        value = self[name]
        if name not in self._answers:
            raise KeyError(f"{name!r} is {value!r}, which was not generated in this state; ask its branches")
        return self._answers[name]

    @property
    def text(self) -> str:
        """The whole text; of a conversation, the open answer."""
        self.wait()
        return self._prompt.text

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a conversation, the open answer as the last one."""
        self.wait()
        return self._prompt.as_messages() if self._prompt.messages else []

    @property
    def so_far(self) -> str:
        """The text without waiting for what is still generated."""
        return self._prompt.text

    @property
    def values(self) -> dict[str, Any]:
        """All names and values so far, without waiting."""
        with self._changed:
            return dict(self._values)

    def wait(self) -> State:
        """Wait until all that was added is there. Raises the error that stopped it, if one did."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle)
            self._check()
        return self

    def wait_for_all(self) -> None:
        """Wait for this state and all its branches."""
        self.wait()
        for branch in self._branches:
            branch.wait_for_all()

    def cancel(self, error: OutpaceError) -> None:
        """Stop here, with all branches; who waits gets the error. What is finished stays."""
        with self._changed:
            if self._call is not None:
                self._setting.backend.cancel([self._call])
            self._fail(error)
        for branch in self._branches:
            branch.cancel(error)

    # ---- inside: `_changed` is held

    @property
    def _is_idle(self) -> bool:
        return self._call is None and not self._queue

    def _will_write(self, name: str) -> bool:
        due = [*self._queue, self._call.part] if self._call is not None else list(self._queue)
        return any(isinstance(part, Gen | Select) and part.name == name for part in due)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _proceed(self) -> None:
        """Take what is queued, up to the next generation, and start that."""
        while self._queue:
            part = self._queue.popleft()
            if isinstance(part, str):
                self._prompt = self._prompt.with_text(part)
            elif isinstance(part, Message):
                self._add_message(part)
            else:
                self._begin(part)
                return

    def _add_message(self, message: Message) -> None:
        before = self._prompt
        if before.text and not before.messages:
            raise UsageError("a conversation begins with a message; add system(...) or user(...) before any text")
        answered = (Message("assistant", before.text),) if before.text else ()
        self._prompt = Prompt("", (*before.messages, *answered, message))

    def _begin(self, part: Gen | Select) -> None:
        setting, params = self._setting, self._setting.params
        if self._seed is not None:
            params = replace(params, seed=self._seed)
        place = part.name if part.name is not None else f"#{self._num_generations}"
        if isinstance(part, Gen):
            params, place = part.params(params), part.place or f"{setting.program}/{place}"
        self._call = Call(
            part, self._prompt, params, place, setting.priority, self._num_generations > 0,
            lambda found: self._done(part, found),
        )  # fmt: skip
        self._num_generations += 1
        setting.backend.submit(self._call)

    def _done(self, part: Gen | Select, found: Answer | OutpaceError) -> None:
        with self._changed:
            if self._call is None or self._call.part is not part:
                return  # cancelled in the meantime
            self._call = None
            if isinstance(found, OutpaceError):
                self._fail(found)
                return
            self._prompt = self._prompt.with_text(found.text)
            if part.name is not None:
                self._answers[part.name], self._values[part.name] = found, found.text
            try:
                self._proceed()
            except OutpaceError as error:
                self._fail(error)
            if part.name is not None or self._is_idle:
                self._changed.notify_all()

    def _fail(self, error: OutpaceError) -> None:
        self._error = self._error or error
        self._call = None
        self._queue.clear()
        self._changed.notify_all()


class Branches(list[State]):
    """The states of a fork."""

    def __init__(self, parent: State, states: Sequence[State]) -> None:
        super().__init__(states)
        self._parent = parent
        self._known = set(parent.values)

    def join(self) -> Branches:
        """Wait for all branches. Then `parent[name]` is the list of what they generated under each new name, with None
        for a branch that has nothing under it. Their texts stay apart; the program adds what it needs."""
        found = [state.wait().values for state in self]
        for name in dict.fromkeys(name for values in found for name in values if name not in self._known):
            self._parent[name] = [values.get(name) for values in found]
        return self
