"""Which replica has seen the beginning of a text last, for sending a request where its prefix is cached.

A text is known by a chain of hashes, one per block of bytes, each of everything up to there. So equal beginnings have
equal chains, and the number of equal links is the length of the common beginning in blocks.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

_BLOCK_BYTES = 256  # about 64 tokens: shorter beginnings are cheap to compute again
_MOST_BLOCKS = 256  # of one text; what follows does not change where it goes
_MOST_LINKS = 1 << 17  # of all texts, the most recently used ones


def routed_text(body: bytes, tenant: str) -> bytes:
    """The part of a request that its prompt begins with, in the order of the prompt; empty if there is none.

    Different tenants share no cache, so their texts differ from the first byte.
    """
    try:
        given = json.loads(body)
    except ValueError:
        return b""
    if not isinstance(given, Mapping):
        return b""
    parts: list[Any] = [given.get(name) for name in ("tools", "system", "instructions")]
    parts += [given.get(name) for name in ("messages", "prompt", "input")]
    if all(part is None for part in parts):
        return b""
    return json.dumps([tenant, given.get("cache_salt"), *(part for part in parts if part is not None)]).encode()


def chain(text: bytes) -> list[bytes]:
    """A hash per whole block of the text, each of everything up to its end."""
    found, link = list[bytes](), b""
    for begin in range(0, min(len(text), _MOST_BLOCKS * _BLOCK_BYTES) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        link = blake2b(link + text[begin : begin + _BLOCK_BYTES], digest_size=12).digest()
        found.append(link)
    return found


def goes_to_cached(num_open: int, fewest_open: int, at_once: int) -> bool:
    """Whether a request goes to the replica that has its prefix and so many open requests, or to the least busy one.

    `at_once`: requests that a replica runs at once. Where it would have to wait although another replica is free, it
    does not: a wait takes longer than a prefill. If all are full, a little longer queue is worth the prefix.
    """
    return num_open < at_once or num_open <= fewest_open + 1


class PrefixIndex:
    def __init__(self, most_links: int = _MOST_LINKS) -> None:
        self._most = most_links
        self._replicas: OrderedDict[bytes, str] = OrderedDict()  # the replica that saw a link last

    def find(self, links: list[bytes], known: set[str]) -> tuple[str | None, int]:
        """The replica, one of `known`, that saw the longest beginning, and its length in blocks."""
        for length in range(len(links), 0, -1):
            replica = self._replicas.get(links[length - 1])
            if replica is not None and replica in known:
                return replica, length
        return None, 0

    def add(self, links: list[bytes], replica: str) -> None:
        for link in links:
            self._replicas[link] = replica
            self._replicas.move_to_end(link)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """A replica is gone, and its cache with it."""
        for link in [link for link, each in self._replicas.items() if each == replica]:
            del self._replicas[link]
