"""Compiles descriptions of structured output into parsers for a tokenizer, by llguidance.

Compiling takes about a millisecond and, for a hostile description, up to seconds. It happens in the caller's thread,
never in the engine's: `Engine.submit` gets the result. Compiled descriptions are kept, so that requests with the same
schema compile it once. JSON is written on one line, with a space after ":" and ",", as most models write it; the field
"x-guidance" of a schema can change that.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from outpace.backends.base import Tokenizer
from outpace.decoding.exact_tokenizer import ExactTokenizer
from outpace.decoding.forced_runs import ForcedRuns
from outpace.decoding.matcher import Matcher
from outpace.decoding.parser import Parser
from outpace.errors import UsageError
from outpace.stacks import run_on_stack
from outpace.structured import StructuredOutput, Thinking

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

MAX_CHARS = 128 << 10  # of a description; nothing that people write by hand is longer
KEPT_CHARS = 1 << 20  # of all compiled descriptions that are kept
# A chain of references recurses once a link, and 128 KiB hold about 6,000 links of at most 8 kB of stack each.
_STACK_BYTES = 256 << 20
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST_ERROR = 200
_LONGEST_TOKEN = 1024  # bytes; llguidance panics on a vocabulary with a longer one
# The tokens of JSON strings by their number of characters. Where a whole group is allowed, llguidance need not look at
# its tokens one by one. Its own groups end at 10 and 30; near the end of a string with `maxLength` none of them fits,
# and a mask took three times as long. They change no mask.
_STRING_CHAR = r'[^"\\\x00-\x1F\x7F]'
_TOKEN_GROUPS = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHAR}{{1,{longest}}}" for longest in (3, 6, 10, 15, 30)),
    f"{_STRING_CHAR}+",
]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled description. Any number of requests may use it."""

    template: Parser
    constraints: Constraints
    runs: ForcedRuns = field(default_factory=ForcedRuns)

    def matcher(self, stop_ids: frozenset[int]) -> Matcher:
        """A matcher for one completion, at its beginning."""
        made_for = self.constraints
        return Matcher(self.template, made_for.num_tokens, stop_ids | made_for.end_ids, made_for.tokenize, self.runs)


class Constraints:
    """Of one loaded model. Any thread may compile."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's, which may be larger than the tokenizer's."""
        self.end_ids = tokenizer.end_ids
        # llguidance needs an end token: where a model has none, one that no logits belong to.
        self.num_tokens = max(vocab_size, tokenizer.vocab_size) + (not self.end_ids)
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._ll_tokenizer: LLTokenizer | None = None  # takes half a second, so not before it is needed
        self._kept: OrderedDict[StructuredOutput, Constraint] = OrderedDict()
        self._num_kept_chars = 0
        self.tokenize = ExactTokenizer(tokenizer)

    def compile(self, structured: StructuredOutput) -> Constraint:
        """Raises UsageError if the description is invalid, not supported or cannot be satisfied."""
        with self._lock:
            known = self._kept.get(structured)
            if known is not None:
                self._kept.move_to_end(structured)
                return known
        num_chars = _num_chars(structured)
        if num_chars > MAX_CHARS:
            raise UsageError(
                f"the structured output's description has {num_chars} characters and at most {MAX_CHARS} are allowed; "
                "shorten it"
            )
        template = run_on_stack(_STACK_BYTES, lambda: self._parser(structured))
        made = Constraint(template, self)
        self._check_satisfiable(made)
        self._keep(structured, made, num_chars)
        return made

    def _keep(self, structured: StructuredOutput, made: Constraint, num_chars: int) -> None:
        with self._lock:
            if structured not in self._kept:
                self._kept[structured] = made
                self._num_kept_chars += num_chars
            while self._num_kept_chars > KEPT_CHARS:
                oldest, _ = self._kept.popitem(last=False)
                self._num_kept_chars -= _num_chars(oldest)

    def _parser(self, structured: StructuredOutput) -> Parser:
        from llguidance import LLMatcher

        try:
            grammar = _grammar(structured)
            if structured.after is not None:
                grammar = _after_thinking(grammar, structured.after)
        except (ValueError, UnicodeEncodeError) as problem:
            raise _refused(structured, str(problem)) from None
        parser = LLMatcher(self._adapted_tokenizer(), grammar, log_level=0, limits=_limits())
        if parser.is_error():
            raise _refused(structured, parser.get_error())
        return cast("Parser", parser)

    def _check_satisfiable(self, made: Constraint) -> None:
        matcher = made.matcher(frozenset())
        if not matcher.allows_text():
            if matcher.is_too_complex:
                raise UsageError("the structured output's description is too complex; simplify it")
            ending = matcher.ending(())
            found = "nothing" if ending is not None and ending.reason == "length" else "only empty output"
            raise UsageError(f"{found} satisfies the description of the structured output; change it")

    def _adapted_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = _adapted(self._tokenizer, self.tokenize, self.num_tokens)
            return self._ll_tokenizer


def _grammar(structured: StructuredOutput) -> str:
    from llguidance import LLMatcher

    if structured.json_schema is not None:
        schema = "{}" if structured.json_schema == "true" else cast(str, structured.json_schema)
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE)
    if structured.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON_STYLE)
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_escaped, structured.choice)))
    assert structured.grammar is not None
    return LLMatcher.grammar_from_lark(structured.grammar)


def _after_thinking(grammar: str, thinking: Thinking) -> str:
    """The grammar after free text. Lazy lexemes end at their first match, so tags are found in any text."""
    described = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
    closer = thinking.closer
    rules = {"SPACE": "/[ \\n]{0,4}/"}
    if isinstance(closer, int):
        thought = f"/(.|\\n)*/ <[{closer}]> SPACE"
    else:
        thought = "thought SPACE"
        rules["thought[lazy]"] = f"/(.|\\n)*{_escaped(closer)}/"
    if thinking.opener is None:
        rules["start"] = f"{thought} @described"
    elif isinstance(thinking.opener, int):
        rules["start"] = f"(<[{thinking.opener}]> {thought})? @described"
    else:
        rules["opening[lazy]"] = f"/[ \\n]{{0,4}}{_escaped(thinking.opener)}/"
        rules["start"] = f"(opening {thought})? @described"
    before = {"lark_grammar": "".join(f"{name}: {rule}\n" for name, rule in rules.items())}
    return json.dumps({"grammars": [before, {**described[0], "name": "described"}, *described[1:]]})


def _escaped(text: str) -> str:
    """A regex that matches only this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _limits() -> LLParserLimits:
    """Bounds for hostile descriptions. A lexer's state takes 1 to 2 kB; 10,000 items in a mask take up to 50 ms, and an
    object with 1,000 optional members needs that many."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, step_max_items=10_000, verbose_errors=False)


def _adapted(tokenizer: Tokenizer, tokenize: ExactTokenizer, num_tokens: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(tokenizer.end_ids) or [num_tokens - 1]
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, tokenize, num_tokens, ends[0]))
    return LLTokenizer(wrapper, eos_token=ends, slices=_TOKEN_GROUPS)


class _Vocabulary:
    """A tokenizer as llguidance's wrapper expects it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokenize: ExactTokenizer, num_tokens: int, eos_token_id: int) -> None:
        self._tokenize = tokenize
        self.eos_token_id = eos_token_id
        controls = {token.id: token.text for token in tokenizer.specials.controls.tokens}
        self.special_token_ids = sorted({*controls, *tokenizer.end_ids, eos_token_id})
        self.tokens = [*map(tokenizer.token_bytes, range(tokenizer.vocab_size))]
        self.tokens += [b""] * (num_tokens - tokenizer.vocab_size)
        for token in self.special_token_ids:  # grammars name control tokens by their text
            self.tokens[token] = controls.get(token, f"<|end-{token}|>").encode(errors="replace")
        # A token without text is in no mask. No real vocabulary has such long ones; a file from a stranger may.
        self.tokens = [text if len(text) <= _LONGEST_TOKEN else b"" for text in self.tokens]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenize(text)


def _num_chars(structured: StructuredOutput) -> int:
    given = (structured.json_schema, structured.regex, structured.grammar, *(structured.choice or ()))
    return sum(len(text) for text in given if isinstance(text, str))


def _refused(structured: StructuredOutput, problem: str) -> UsageError:
    """One sentence from llguidance's message, which may have many lines."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["it is not valid"]
    line = next((line for line in lines if line.startswith("error:")), lines[0])
    name = next(name for name in StructuredOutput.__slots__ if getattr(structured, name) not in (None, False))
    cause = line.removeprefix("error:").strip()[:_LONGEST_ERROR]
    return UsageError(f"this {name} cannot be used: {cause}; correct it, or leave out what is not supported")
