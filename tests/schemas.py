"""Arbitrary JSON schemas from a seed: nested, arrays, enums, bounds, patterns, optional, references and unions."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

Schema = dict[str, Any]
NAMES = ["id", "name", "kind", "size", "tags", "note", "left", "right", "é", "two words", 'quote"d', "a.b/c"]
PATTERNS = ["^[a-f]{1,4}$", "^[A-Z]{2}-[0-9]{2,3}$", "^(yes|no|maybe)$", "^x*y$", r"^\d{1,2}:\d{2}$"]
FORMATS = ["date", "time", "uuid", "ipv4"]


class SchemaMaker:
    """Every schema it makes can be satisfied by a short answer: strings and arrays have upper bounds."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._defs: dict[str, Schema] = {}

    def make(self) -> Schema:
        """A schema whose top level is most often an object."""
        rng = self._random
        for name in ("node", "leaf")[: rng.randrange(3)]:
            self._defs[name] = self._object(2) if name == "node" else self._scalar()
        made = self._object(3) if rng.random() < 0.8 else self._any(3)
        return made | ({"$defs": self._defs} if self._defs else {})

    def _any(self, depth: int) -> Schema:
        rng = self._random
        kinds: list[Callable[[], Schema]] = [self._scalar, self._scalar, self._enum, self._all_of]
        if depth:
            deeper = [self._object, self._array, self._tuple, self._union]
            kinds += [partial(make, depth - 1) for make in deeper]
        if self._defs:
            kinds.append(self._reference)
        return rng.choice(kinds)()

    def _object(self, depth: int) -> Schema:
        rng = self._random
        names = rng.sample(NAMES, rng.randrange(1, 5))
        made: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        made["required"] = [name for name in names if rng.random() < 0.6]
        made["additionalProperties"] = False
        return made

    def _array(self, depth: int) -> Schema:
        least = self._random.randrange(3)
        return {
            "type": "array",
            "items": self._any(depth),
            "minItems": least,
            "maxItems": least + self._random.randrange(3),
        }

    def _tuple(self, depth: int) -> Schema:
        first = [self._any(depth) for _ in range(self._random.randrange(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randrange(2, 4))]}

    def _all_of(self) -> Schema:
        least = self._random.randrange(-9, 9)
        return {"allOf": [{"type": "integer", "minimum": least}, {"maximum": least + self._random.randrange(1, 90)}]}

    def _reference(self) -> Schema:
        return {"$ref": f"#/$defs/{self._random.choice(sorted(self._defs))}"}

    def _enum(self) -> Schema:
        values = self._random.sample(["red", "green", 3, 4.5, None, True, "a b", "é", [1, "x"], {"k": 1}], 3)
        return self._random.choice([{"enum": values}, {"const": values[0]}])

    def _scalar(self) -> Schema:
        rng = self._random
        low = rng.randrange(-50, 50)
        return rng.choice(
            [
                {"type": "string", "maxLength": rng.randrange(1, 9)},
                {"type": "string", "minLength": 2, "maxLength": 6},
                {"type": "string", "pattern": rng.choice(PATTERNS)},
                {"type": "string", "format": rng.choice(FORMATS)},
                {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
                {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 5},
                {"type": "number", "minimum": low, "maximum": low + 1},
                {"type": "boolean"},
                {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
            ]
        )


def schemas(count: int, begin: int = 0) -> list[Schema]:
    return [SchemaMaker(seed).make() for seed in range(begin, begin + count)]
