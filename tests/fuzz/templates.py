"""Hostile chat templates: random programs of jinja2's syntax, with large numbers."""

from __future__ import annotations

import random
from pathlib import Path

NUMBERS = ("0", "1", "-1", "2", "7", "1000", "10**6", "10**9", "10**30", "1.5", "-10**9")
TEXTS = ("''", "'a'", "'a b\\n'", "'<|im_end|>'", "'\\u4f60'", "'%s'", "'%9999999d'", "'{}'", "'{:>99999999}'", "'\\t'")
NAMES = (
    "messages", "messages[0]", "messages[0].content", "messages[2].tool_calls", "tools", "tools[0].function.parameters",
    "bos_token", "missing", "none", "true", "ns.x", "x", "range",
)  # fmt: skip
METHODS = (
    "center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "split", "rsplit", "splitlines", "format",
    "translate", "encode", "title", "rfind", "items", "keys", "values", "get", "copy", "count", "to_bytes", "append",
    "__class__", "mro", "striptags", "partition", "removeprefix", "format_map",
)  # fmt: skip
FILTERS = (
    "abs", "attr", "batch", "capitalize", "center", "default", "dictsort", "e", "filesizeformat", "first", "float",
    "forceescape", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map",
    "max", "min", "pprint", "random", "reject", "replace", "reverse", "round", "safe", "select", "slice", "sort",
    "string", "striptags", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "urlize",
    "wordcount", "wordwrap", "xmlattr",
)  # fmt: skip
OPERATORS = ("+", "-", "*", "*", "/", "//", "%", "**", "~", "~", "==", "<", "in", "and", "or")
STEPS = ("ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x]", "(ns.x, x)", "[ns.x]", "ns.x|batch(1)", "ns.x|map('upper')")
CALLS = ("range", "namespace", "dict", "lipsum", "cycler", "joiner", "strftime_now", "raise_exception", "m", "loop")


def expression(rng: random.Random, depth: int) -> str:
    if depth <= 0:
        return rng.choice((rng.choice(NUMBERS), rng.choice(TEXTS), rng.choice(NAMES)))
    kind = rng.randrange(8)
    inner = expression(rng, depth - 1)
    if kind <= 1:
        return f"({inner} {rng.choice(OPERATORS)} {expression(rng, depth - 1)})"
    if kind == 2:
        return f"({inner}|{rng.choice(FILTERS)}{arguments(rng, depth)})"
    if kind == 3:
        return f"({inner}).{rng.choice(METHODS)}{arguments(rng, depth)}"
    if kind == 4:
        return f"{rng.choice(CALLS)}{arguments(rng, depth)}"
    if kind == 5:
        return rng.choice((f"[{inner}, {inner}]", f"({inner}, {inner})", f"{{'a': {inner}, 'b': {inner}}}"))
    if kind == 6:
        return f"({inner})[{rng.choice((':', '1:', '::-1', '0', '-1', ':10**9'))}]"
    return f"({inner} * 100000)"


def arguments(rng: random.Random, depth: int) -> str:
    found = [expression(rng, depth - 2) for _ in range(rng.randrange(3))]
    if rng.random() < 0.2:
        found.append(rng.choice(("indent=10**7", "width=10**9", "start=[]", "attribute='role'", "d='x' * 10**6")))
    return f"({', '.join(found)})" if found else rng.choice(("", "()"))


def statement(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(9)
    value, inside = expression(rng, rng.randrange(4)), body(rng, depth - 1) if depth > 0 else "text"
    if kind <= 2:
        return f"{{{{ {value} }}}}"
    if kind == 3:
        return f"{{% for x in {value} %}}{inside}{{% endfor %}}"
    if kind == 4:
        return f"{{% for i in range({rng.choice(('3', '60', '99999'))}) %}}{inside}{{% endfor %}}"
    if kind == 5:
        return f"{{% set ns.x = {rng.choice((*STEPS, value))} %}}"
    if kind == 6:
        return f"{{% set x %}}{inside}{{% endset %}}"
    if kind == 7:
        return f"{{% macro m(x) %}}{inside}{{{{ m(x) }}}}{{% endmacro %}}"
    return f"{{% if {value} %}}{inside}{{% else %}}{inside}{{% endif %}}"


def body(rng: random.Random, depth: int) -> str:
    return "".join(statement(rng, depth) for _ in range(rng.randrange(1, 4)))


def random_template(rng: random.Random) -> str:
    kind = rng.randrange(12)
    if kind == 0:
        piece = rng.choice(
            ("{{ a }}", "{% if a %}", "(", "{{ (", "{#", "{{ a ~ ", " ", "\n", "{{ '", "-", "{% set x=1 %}")
        )
        return piece * rng.choice((1, 300, 10_000))
    made = "{% set ns = namespace(x='x') %}" + body(rng, 3)
    if kind == 1:  # damage that knows nothing of the syntax
        at = rng.randrange(len(made))
        made = made[:at] + rng.choice("{}%#'\"\\\0\ud7ff()[]|") + made[at + rng.randrange(5) :]
    return made


def write_hostile(rng: random.Random, folder: Path) -> Path:
    path = folder / "hostile.jinja"
    path.write_text(random_template(rng), encoding="utf-8", newline="")
    return path
