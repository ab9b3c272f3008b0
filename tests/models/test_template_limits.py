"""Templates that would take all memory or never end are stopped; ordinary ones write what plain jinja2 writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outpace.errors import ModelError
from outpace.models import template_limits
from outpace.models.chat_template import MAX_TEMPLATE, render_chat

ROOT = Path(__file__).parents[2]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hello\nyou", "tags": ["a", "b"], "more": {"x": 1, "y": [None, 2.5, True]}},
    {"role": "assistant", "content": "<think>hm</think>Hi, \u4f60\u597d"},
]


def render(template: str, **options: Any) -> str:
    return render_chat(template, MESSAGES, bos_token="<s>", eos_token="</s>", **options)


def refusal(template: str) -> str:
    with pytest.raises(ModelError) as caught:
        render(template)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence) < 700
    return sentence


def in_a_loop(start: str, step: str) -> str:
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"


TOO_LARGE = [
    "{{ messages|tojson(indent=10000000) }}",
    "{{ messages|map('tojson', indent=10**9)|list }}",
    "{{ messages|tojson(separators=(',' * 10**6, ':')) }}",
    "{{ 'x' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ 'x'|center(10**10) }}",
    "{{ 5|center(width=10**10) }}",
    "{{ 'x'|attr('center')(10**10) }}",
    "{{ '{:>{}}'.format(1, 10**10) }}",
    "{{ ('{0}' * 10000).format('x' * 10000) }}",
    "{{ ('%s' * 10000) % (('x' * 10000,) * 10000) }}",
    "{{ ('%(a)s' * 10000)|format(a='x' * 10000) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 1000) }}",
    "{{ ('a' * 1000000)|replace('a', 'b' * 1000) }}",
    "{{ ('b' * 1000000).join('a' * 100000) }}",
    "{{ range(1000)|join('b' * 100000) }}",
    "{{ ('a\n' * 100000)|indent(10**6) }}",
    "{{ ('\u2028' * 100000)|indent('x' * 1000) }}",
    "{{ [1]|batch(linecount=10**10, fill_with=1)|list }}",
    "{{ [1]|slice(10**10)|list }}",
    "{{ 'a\t'.expandtabs(10**10) }}",
    "{{ (5).to_bytes(10**10, 'little') }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 100000}) }}",
    "{{ strftime_now('%1000000Y' * 1000) }}",
    "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "{{ ('a' * 8000000).rfind('b' ~ 'a' * 4000000) }}",
    "{{ ('a' * 8000000)|list }}",
    "{{ [messages[1].items()] * 1000000 }}",
    "{% filter center(10**10) %}x{% endfilter %}",
    "{% set x = 'a' * 8000000 %}{{ x ~ x }}",
    "{% set x = 'a' * 8000000 %}{{ x + x }}",
    "{% set x = 'a' * 8000000 %}{{ x }}{{ x }}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set a = m(m('a' * 4000000)) %}",
    in_a_loop("'x'", "ns.x ~ ns.x"),
    in_a_loop("'x'", "ns.x + ns.x"),
    in_a_loop("[1]", "[ns.x, ns.x]"),
    in_a_loop("(1,)", "(ns.x, ns.x)"),
    in_a_loop("{}", "{'a': ns.x, 'b': ns.x}"),
    in_a_loop("1", "dict(a=ns.x, b=ns.x)"),
    "{% block a %}{% for i in range(100000) %}" + "x" * 100000 + "{% endfor %}{% endblock %}{{ self.a() }}",
    "{% set a %}{% for i in range(100000) %}" + "x" * 100000 + "{% endfor %}{% endset %}",
]


@pytest.mark.parametrize("template", TOO_LARGE, ids=lambda template: template[:60])
def test_a_value_that_would_be_too_large_is_never_made(template):
    assert "was stopped: it made a value of more than 8,388,608 characters; send less text, get" in refusal(template)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 10**10000 }}", "a number of more than 12,000 bits"),
        ("{{ 9**9**9 }}{{ (10**3000) * (10**3000) }}", "a number of more than 12,000 bits"),
        ("{{ 5|round(-10**10) }}", "a number of more than 12,000 bits"),
        ("{{ '%1000000000d' % 1 }}", "a format wider than 9999"),
        ("{{ '%*d' % (10**9, 1) }}", "a format wider than 9999"),
        ("{{ '{:>1000000000}'.format(1) }}", "a format wider than 9999"),
        (in_a_loop("[1]", "[ns.x]").replace("60", "99999"), "a list of more than 200 levels"),
        (in_a_loop("(1,)", "(ns.x,)").replace("60", "99999"), "a list of more than 200 levels"),
        (in_a_loop("{}", "{'a': ns.x}").replace("60", "99999"), "a list of more than 200 levels"),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "a namespace as a text"),
        (
            "{% set x = 'a' * 8000000 %}{% for i in range(1000) %}{% set y = x[1:] %}{% endfor %}",
            "it handled more than 536,870,912 characters",
        ),
        ("{{ 'a' * 8000000 }}{{ 1/0 }}", "division by zero"),
        ("{{ lipsum(10**7) }}", "'lipsum' is undefined"),
        ("{{ 'a'|urlize }}", "No filter named 'urlize'"),
        ("{{ raise_exception('a\n\x1b[31m' ~ 'b' * 100000) }}", "refused this conversation: a  [31mbbb"),
        ("x" * (MAX_TEMPLATE + 1), "has more than 131,072 characters"),
        ("{{ " + "(" * 50_000, "does not compile"),
    ],
    ids=lambda value: value[:40],
)
def test_other_limits(template, words):
    assert words in refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(100000) %}{% set b = range(100000)|map('string')|list|sort %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(monkeypatch, template):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    assert "was stopped: it ran for more than 0.2 seconds" in refusal(template)


@pytest.mark.parametrize("step", ["ns.x|batch(1)", "ns.x|slice(1)", "ns.x|map('list')", "ns.x|reverse"])
def test_generators_in_generators_do_not_end_the_process(step):
    template = in_a_loop("[1]", step).replace("60", "99999") + "{{ ns.x|list|length }}"
    program = f"from tests.models.test_template_limits import render\nprint(render({template!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 or "outpace.errors.ModelError: the model's chat template" in done.stderr


ORDINARY = [
    "{% for m in messages %}{{ loop.index0 }}{{ loop.length }}{{ m.role }}{{ '.' if loop.last else ',' }}{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ m['content']|trim }}{% else %}none{% endfor %}",
    "{% for m in messages|selectattr('role', 'equalto', 'user') %}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.s = ns.s ~ m.role %}"
    "{% endfor %}{{ ns.n }}{{ ns.s }}",
    "{{ messages[1:][::-1]|map(attribute='role')|map('upper')|join(', ') }}",
    "{{ messages[-1].content.split('</think>')[-1] }}{{ messages|map(attribute='role')|reject('eq', 'user')|first }}",
    "{{ messages[1].tags + ['c'] }}{{ [1, messages[0].role] }}{{ (1, bos_token) }}{{ {'a': eos_token} }}{{ [] ~ {} }}",
    "{% macro tag(name, close=false) %}<{{ '/' if close }}{{ name }}>{% endmacro %}{{ tag('a') ~ tag('a', true) }}",
    "{% set block %}a{{ 1 + 2 * 3 - 4 // 3 }}b{% endset %}{{ block }}{% filter upper %}x{{ 7 % 4 }}{% endfilter %}",
    "{% for k, v in messages[1].more.items() %}{{ k }}={{ v }};{% endfor %}{{ messages[1].more|dictsort }}",
    "{{ '%s is %05.1f' % ('a', 2.5) }}{{ '%s'|format('b') }}{{ '{0:>5}{x}'.format('c', x=1) }}{{ 'a'.center(5, '*') }}",
    "{{ 'a-b'.replace('-', '+') }}{{ 'a b'|title }}{{ 'a\nb'|indent(2) }}{{ 2 ** 10 }}{{ -3 | abs }}{{ 7 / 2 }}",
    "{% for item in [1, [2, [3]]] recursive %}{{ loop(item) if item is iterable else item }}{% endfor %}",
    "{% macro outer() %}{{ caller('in') }}{% endmacro %}{% call(x) outer() %}{{ x }}!{% endcall %}",
    "{% autoescape true %}{{ '<a>' ~ messages[0].content }}{{ '<b>'|safe }}{% endautoescape %}{{ '<c>' | e }}",
    "{% set a, b = 'x', ['y'] %}{{ a }}{{ b[0] }}{{ 'y' in b }}{{ missing }}{{ missing is defined }}{{ none }}",
    "{{ messages|length }}{{ range(5)|batch(2)|list }}{{ [3, 1]|sort }}{{ [[1], [2]]|sum(start=[]) }}",
    "{{ ['b', 'a']|map('upper')|sort|join('+') }}{{ [1.5]|first|round|int }}{{ 'abc'|reverse }}{{ dict(a=1) }}",
    "{% block b %}{% for i in range(3) %}{{ i }}{% endfor %}{% endblock %}{{ self.b() }}{{ cycler('a', 'b').next() }}",
]


@pytest.mark.parametrize("template", ORDINARY, ids=lambda template: template[:40])
def test_the_limits_change_nothing_in_what_an_ordinary_template_writes(template):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    expected = plain.render(messages=MESSAGES, bos_token="<s>", eos_token="</s>")
    try:
        assert render(template) == expected
    except ModelError as error:
        pytest.fail(f"{error} where {expected!r} is expected")


def test_a_long_conversation_is_no_bomb():
    messages = [{"role": "user", "content": f"{i} " + "x" * 1000} for i in range(1000)]
    template = (
        "{% set ns = namespace(s='', l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}"
        "{% set ns.s = ns.s ~ m.content %}{% endfor %}{{ ns.l|length }}{{ ns.s }}"
    )
    written = render_chat(template, messages, bos_token="", eos_token="")
    assert written == "1000" + "".join(message["content"] for message in messages)
