"""Grammars of calls: what a syntax writes is allowed, what no reader would take for a valid call is not."""

from __future__ import annotations

import pytest

from outpace.decoding.constraints import Constraints
from outpace.models.tool_calls import SYNTAXES
from outpace.models.tool_calls.grammar import call_grammar, json_rule
from outpace.models.tool_calls.syntax import Call, CallSyntax
from outpace.models.tool_calls.tools import check_tools
from outpace.structured import StructuredOutput
from tests.fakes import EOS
from tests.scripted_model import ScriptedTokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/place"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "minLength": 2}},
    "x-guidance": {"whitespace_flexible": True},  # the client cannot change how calls are written
}
TOOLS = check_tools(
    [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "clock"}},
    ]
)
OSLO, ROME, NOW = Call("weather", {"city": "Oslo"}), Call("weather", {"city": 'R "{', "days": 2}), Call("clock", {})
WRONG = [
    Call("rm", {}),
    Call("weather", {}),
    Call("weather", {"city": 3}),
    Call("weather", {"city": "x"}),
    Call("weather", {"city": "Oslo", "more": 1}),
    Call("clock", {"x": 1}),
]
CONTROLS = {"mistral": ["[TOOL_CALLS]"], "llama3_json": ["<|python_tag|>"]}


class Judge:
    """Says which answers a grammar allows."""

    def __init__(self, syntax: CallSyntax, *, controls: list[str] | None = None, **options: object) -> None:
        tokenizer = ScriptedTokenizer("", *(controls or CONTROLS.get(syntax.name, [])))
        ids = {token.text: token.id for token in tokenizer.specials.controls.tokens if token.id != EOS}
        grammar = call_grammar(syntax, TOOLS, controls=ids, **options)  # type: ignore[arg-type]
        self._tokenizer = tokenizer
        self._constraint = Constraints(tokenizer, tokenizer.vocab_size).compile(StructuredOutput(grammar=grammar))

    def allows(self, answer: str) -> bool:
        """Whether the whole answer is allowed, and may end there."""
        tokens = self._tokenizer.encode(answer, add_special=False)
        matcher = self._constraint.matcher(frozenset({EOS}))
        if matcher.count_allowed(tokens) < len(tokens):
            return False
        return matcher.ending(tokens) is not None or matcher.count_allowed([*tokens, EOS]) == len(tokens) + 1


@pytest.fixture(params=SYNTAXES)
def syntax(request) -> CallSyntax:
    return SYNTAXES[request.param]


def test_a_required_answer_has_calls_and_nothing_else(syntax):
    judge = Judge(syntax, is_required=True)
    for calls in ([OSLO], [NOW], [OSLO, ROME, NOW]):
        assert judge.allows(syntax.write(calls))
        assert not judge.allows("Hello. " + syntax.write(calls))
        assert not judge.allows(syntax.write(calls) + "\nHello.")
        assert not judge.allows(syntax.write(calls)[:-1])
    for answer in ("", "Hello.", syntax.opener):
        assert not judge.allows(answer)


def test_text_is_free_until_a_call_begins(syntax):
    judge = Judge(syntax, is_required=False)
    for text in ("", "Hello.", "a " + syntax.opener[:-1] + " b", "é🙂", "{}", '{"name": "x"}'):
        assert judge.allows(text)
    for calls in ([OSLO], [NOW], [OSLO, ROME, NOW]):
        assert judge.allows(syntax.write(calls))
        assert not judge.allows(syntax.write(calls) + "\nHello.")
    if not syntax.begins_bare:
        assert judge.allows("Hello.\n" + syntax.write([OSLO]))
        assert not judge.allows(syntax.opener) and not judge.allows(syntax.opener + " Hello.")


@pytest.mark.parametrize("is_required", [False, True])
def test_calls_that_break_their_schema_are_forbidden(syntax, is_required):
    judge = Judge(syntax, is_required=is_required)
    for call in WRONG:
        if not (syntax.begins_bare and call.name == "rm" and not is_required):  # without an opener that is only JSON
            assert not judge.allows(syntax.write([call])), call
        assert not judge.allows(syntax.write([OSLO, call])), call


@pytest.mark.parametrize("is_required", [False, True])
def test_the_number_of_calls_is_limited(syntax, is_required):
    for limit in (1, 2):
        judge = Judge(syntax, is_required=is_required, max_calls=limit)
        assert judge.allows(syntax.write([NOW] * limit)) and not judge.allows(syntax.write([NOW] * (limit + 1)))


@pytest.mark.parametrize("is_required", [False, True])
def test_openers_and_closers_may_be_control_tokens_or_text(syntax, is_required):
    answer = ("" if is_required or not syntax.begins_bare else syntax.opener) + syntax.write([OSLO, NOW])
    for controls in (["<think>"], [syntax.opener], [syntax.opener, syntax.closer]):
        judge = Judge(syntax, is_required=is_required, controls=[control for control in controls if control])
        assert judge.allows(answer) and judge.allows(f"Hm. {answer}") is not is_required


def test_other_control_tokens_of_the_model_stay_allowed(syntax):
    judge = Judge(syntax, is_required=False, controls=["<think>"])
    assert judge.allows(f"<think>Hm.<think>{syntax.write([OSLO])}") and judge.allows("<think>Hm.<think> Hello.")
    assert not Judge(syntax, is_required=True, controls=["<think>"]).allows(f"<think>{syntax.write([OSLO])}")


def test_content_of_another_form_takes_the_place_of_text(syntax):
    rule = json_rule({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    judge = Judge(syntax, is_required=False, content=rule)
    opener = syntax.opener if syntax.begins_bare else ""  # not optional then
    assert judge.allows('{"name": "x"}')
    assert judge.allows(opener + syntax.write([OSLO])) and judge.allows(opener + syntax.write([NOW]))
    for answer in ("Hello.", '{"name": 1}', "Hm. " + syntax.write([OSLO]), "Hm. " + '{"name": "x"}'):
        assert not judge.allows(answer)
    assert not Judge(syntax, is_required=True, content=rule).allows('{"name": "x"}')
