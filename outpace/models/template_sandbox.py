"""The jinja2 environment of chat templates: the immutable sandbox, with every operation under `template_limits.py`.

The syntax tree is rewritten before it is compiled, so that also lists, loops and `~`, which the sandbox does not
intercept, are counted. Not covered: one operation on values within the limits, such as sorting half a million
elements, is not interrupted, so a rendering may pass its deadline by about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from outpace.models.template_estimates import check_call, check_operator
from outpace.models.template_limits import budget, check_size

# Filters for web pages, whose time is not linear in their text, and a generator of filler text.
_UNUSED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_UNUSED_GLOBALS = ("lipsum",)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile and render inside `template_limits.limited()`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, *, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(optimized=False, finalize=_finalize, **options)
        for name in _UNUSED_FILTERS:
            del self.filters[name]
        for name in _UNUSED_GLOBALS:
            del self.globals[name]
        self.filters = {name: _counted(name, each) for name, each in {**self.filters, **filters}.items()}
        self.filters |= {_EACH: Each, _NEW: _new, _CONCAT: _concat}

    concat = staticmethod(lambda parts: _join_output(parts))  # joins what a template, a macro or a block wrote

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return budget().bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = tuple(map(_listed, args)) if name == "join" else args
            check_call(name, (owner, *args), kwargs)
        elif owner is None:
            check_call(name, args, kwargs)
        budget().spend(0)
        return budget().bounded(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Rewriter(self).visit(tree)
        return tree


# Names that no template can write.
_EACH, _NEW, _CONCAT = " each", " new", " concat"


class _Rewriter(NodeTransformer):
    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter(node.iter, _EACH)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._counted(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":  # the targets of an assignment
            return node
        return self._counted(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._counted(node, [each.value for each in node.items])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, _NEW) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno, environment=self._environment)
        return self._filter(parts, _CONCAT)

    def _counted(self, node: nodes.Expr, items: Sequence[nodes.Node]) -> nodes.Expr:
        is_constant = all(isinstance(item, nodes.Const) for item in items)
        self.generic_visit(node)
        return node if is_constant else self._filter(node, _NEW)

    def _filter(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self._environment)


class Each:
    """What a loop runs over; every turn is counted."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a TypeError tells jinja2 that there is no length

    def __iter__(self) -> Iterator[Any]:
        spend = budget().spend
        for value in self._values:
            spend(0)
            yield value


def _new(value: Any) -> Any:
    return budget().bounded(value)


def _concat(parts: tuple[Any, ...]) -> Any:
    check_size(sum(budget().measure(part).size for part in parts))
    has_markup = any(hasattr(part, "__html__") for part in parts)
    return budget().bounded((markup_join if has_markup else str_join)(parts))


def _join_output(parts: Iterable[str]) -> str:
    size, kept = 0, []
    for part in parts:
        size += len(part)
        check_size(size)
        kept.append(part)
    budget().spend(size)
    return "".join(kept)


def _finalize(value: Any) -> Any:
    """Before a value is written as text."""
    size = budget().measure(value).size
    check_size(size)
    budget().spend(0 if isinstance(value, str) else size)
    return value


def _listed(value: Any) -> Any:
    """A list in place of a generator: it can be measured, and generators of generators can overflow Python's stack."""
    return budget().bounded(list(value)) if isinstance(value, Iterator) else value


def _counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(original, "jinja_pass_arg")

    @wraps(original)  # also copies jinja2's mark for filters that take the context
    def checked(*arguments: Any, **options: Any) -> Any:
        own, given = arguments[: int(takes_context)], arguments[int(takes_context) :]
        given = tuple(map(_listed, given))
        for value in given[:1]:
            check_size(budget().measure(value).size)  # most filters write their value as text
        check_call(f"filter {name}", given, options)
        budget().spend(0)
        return budget().bounded(original(*own, *given, **options))

    return checked
