"""Estimates, before a template's operation runs, how large its result can be.

Python cannot interrupt a single operation such as `"x" * 10**10`. Operations that are not listed here have results of
about the size of their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from outpace.models.template_limits import ITEM_SIZE, TemplateLimitError, budget, check_size

MAX_BITS = 12_000  # of a number; Python writes none of more than 4,300 digits
_WIDTH = 9999  # the largest width in a format
_FAST = 1000  # comparisons that take as long as writing one character
_WIDE = re.compile(r"\d{5}")
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
_BRACE_FIELD = re.compile(r"\{([^{}]*)")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before an operation whose result may be much larger than its operands."""
    if operator == "+" or operator == "~":
        check_size(_size(left) + _size(right))
    elif operator == "*":
        _check_product(left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    elif operator == "%" and isinstance(left, str | bytes):
        check_size(_percent(left, right))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int) or isinstance(right, int):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        check_size(_size(value) * max(count, 0))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it made a number of more than {MAX_BITS:,} bits")


def check_call(name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Before a method of a text or number, or a filter: its own value is the first argument."""
    estimate = _ESTIMATES.get(name)
    if estimate is not None:
        try:
            size = estimate(*arguments, **options)
        except TypeError as error:
            raise TypeError(f"the {name} was called with arguments that it does not take") from error
        check_size(size)


def _size(value: object) -> int:
    return budget().measure(value).size


def _text(value: Any) -> str:
    """Filters accept any value, and write it as text first."""
    check_size(_size(value))
    return str(value)


def _width(value: Any, width: int = 80, *_: Any) -> int:
    return max(len(_text(value)), width)


def _expand_tabs(value: Any, tabsize: int = 8) -> int:
    return len(value) * max(tabsize, 1)


def _replace(value: Any, old: Any, new: Any, count: int = -1) -> int:
    found = value.count(old) if isinstance(value, bytes) else _text(value).count(_text(old))
    return _size(value) + found * _size(new)


def _join(value: Any, items: Any) -> int:
    return _size(items) + len(value) * len(items)


def _join_filter(items: Any, d: Any = "", attribute: Any = None) -> int:
    return _size(items) + _size(d) * len(items)


def _translate(value: Any, table: Any, *_: Any) -> int:
    largest = max([1, *(_size(each) for each in table.values())]) if isinstance(table, Mapping) else 1
    return len(value) * largest


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    text = _text(value)
    # Every kind of line break counts, not only \n.
    return len(text) + (len(text.splitlines()) + 2) * (len(width) if isinstance(width, str) else width)


def _json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = 0) -> int:
    extent = budget().measure(value)
    step = len(indent) if isinstance(indent, str) else int(indent or 0)
    return extent.size + extent.items * (step * (extent.depth + 1) + sum(len(each) for each in separators or ()))


def _percent(form: Any, values: Any) -> int:
    """Every field may print the largest value, in the largest width."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    fields = _PERCENT_FIELD.findall(text)
    if any("*" in field or _WIDE.search(field) for field in fields):
        raise TemplateLimitError(f"it used a format wider than {_WIDTH}")
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    largest = max([0, *(_size(each) for each in parts)])
    return len(text) + sum(largest + (_WIDTH if field else 0) for field in fields)


def _percent_filter(form: Any, *values: Any, **named: Any) -> int:
    return _percent(_text(form), named or values)


def _braces(form: str, *values: Any, **named: Any) -> int:
    if any(_WIDE.search(field) for field in _BRACE_FIELD.findall(form)):
        raise TemplateLimitError(f"it used a format wider than {_WIDTH}")
    parts = [*values, *named.values()]
    # A field may be a part of an argument, and an argument may be a width: {0[1]:{2}}.
    widths = [each for each in parts if isinstance(each, int)]
    largest = max([0, *map(_size, parts)]) + (max([_WIDTH, *widths]) if ":" in form else 0)
    return len(form) + form.count("{") * largest


def _braces_map(form: str, values: Mapping[str, Any]) -> int:
    return _braces(form, *values.values())


def _batch(value: Any, linecount: int, fill_with: Any = None) -> int:
    return ITEM_SIZE * linecount


def _slice(value: Any, slices: int, fill_with: Any = None) -> int:
    return ITEM_SIZE * slices


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> int:
    """Adding lists copies the sum so far for each of them."""
    return 0 if isinstance(start, int | float) else _size(value) * len(value)


def _round(value: Any, precision: int = 0, method: Any = "") -> int:
    _check_bits(4 * abs(precision))
    return 0


def _search_backwards(value: Any, sep: Any = None, *_: Any, **__: Any) -> int:
    """Python compares the whole text at every place, from the end on."""
    return len(value) * len(sep or "") // _FAST


def _strip_tags(value: Any) -> int:
    return len(value) ** 2 // _FAST


def _strftime(form: str) -> int:
    return len(form) * _WIDTH


def _to_bytes(value: int, length: int = 1, *_: Any, **__: Any) -> int:
    return length


def _slow(value: Any) -> int:
    """Filters that take a list of words in between."""
    return ITEM_SIZE * len(_text(value))


_ESTIMATES: dict[str, Callable[..., int]] = {
    "ljust": _width, "rjust": _width, "center": _width, "zfill": _width, "expandtabs": _expand_tabs,
    "replace": _replace, "join": _join, "translate": _translate, "format": _braces, "format_map": _braces_map,
    "rfind": _search_backwards, "rindex": _search_backwards, "rsplit": _search_backwards,
    "rpartition": _search_backwards, "striptags": _strip_tags, "to_bytes": _to_bytes, "strftime_now": _strftime,
    "filter center": _width, "filter indent": _indent, "filter replace": _replace, "filter join": _join_filter,
    "filter tojson": _json, "filter format": _percent_filter, "filter batch": _batch, "filter slice": _slice,
    "filter sum": _sum, "filter round": _round, "filter title": _slow, "filter wordcount": _slow,
}  # fmt: skip
