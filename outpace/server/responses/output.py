"""The output items of a response, built from what the model says: its thinking, messages, and calls of functions.

Every change is an event. A stream sends the events; a whole reply needs only the items at the end. Events share the
items, which change: write each event before the next one is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from outpace.models.tool_calls.reader import CallDelta, Found

Event = dict[str, Any]  # with its type, without its number in the stream
Entry = dict[str, Any]  # log-probabilities of one token


class Output:
    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False  # the last item may still grow
        self._entries: list[Entry] = []  # not yet in an item
        self._num_missing = 0  # bytes of text whose entries are not yet in an item
        self._has_call = False

    def add_thinking(self, text: str) -> Iterator[Event]:
        if not self._is_last_open("reasoning"):
            reasoning = {"type": "reasoning", "id": f"rs_{uuid4().hex}", "status": "in_progress", "summary": []}
            yield from self._open_with_part(reasoning, {"type": "reasoning_text", "text": ""})
        self._part["text"] += text
        yield self._about_part("response.reasoning_text.delta", {"delta": text})

    def add(self, found: Found, entries: list[Entry], num_skipped: int = 0) -> Iterator[Event]:
        """What a piece of the answer adds. Its text comes before its calls.

        So many bytes of the answer before this text are in no message: their entries are left out.
        """
        self._entries += entries
        self._skip_entries(num_skipped)
        if found.content:
            yield from self._add_text(found.content)
        for call in found.calls:
            yield from self._add_to_call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """The end of the answer; its last item gets this status. An answer without items gets an empty message."""
        if not self.items:
            yield from self._open_message()
        if self._is_last_open("message") and self._entries and not self._has_call:
            yield self._text_delta("", self._take_entries(len(self._entries)))  # the end token's, or a stop string's
        yield from self.close(status)

    # ---- messages

    def _add_text(self, text: str) -> Iterator[Event]:
        if not self._is_last_open("message"):
            yield from self._open_message()
        self._part["text"] += text
        self._num_missing += len(text.encode())
        yield self._text_delta(text, self._take_entries(self._num_spelled()))

    def _open_message(self) -> Iterator[Event]:
        message = {"type": "message", "id": f"msg_{uuid4().hex}", "status": "in_progress", "role": "assistant"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._open_with_part(message, part)

    def _text_delta(self, text: str, entries: list[Entry]) -> Event:
        self._part["logprobs"] += entries
        return self._about_part("response.output_text.delta", {"delta": text, "logprobs": entries})

    def _num_spelled(self) -> int:
        """How many of the waiting entries spell the text so far. The tokens of calls have no entries in an item, and
        which tokens these are must not depend on how the answer is divided into pieces."""
        if self._has_call:
            return 0
        num = 0
        while num < len(self._entries) and self._num_missing > 0:
            self._num_missing -= len(self._entries[num]["bytes"])
            num += 1
        return num

    def _take_entries(self, num: int) -> list[Entry]:
        taken, self._entries = self._entries[:num], self._entries[num:]
        return taken

    def _skip_entries(self, num_bytes: int) -> None:
        """A token that is partly in the text keeps its entry."""
        num = 0
        while num < len(self._entries) and 0 < num_bytes >= len(self._entries[num]["bytes"]):
            num_bytes -= len(self._entries[num]["bytes"])
            num += 1
        del self._entries[:num]
        self._num_missing += num_bytes

    # ---- calls

    def _add_to_call(self, call: CallDelta) -> Iterator[Event]:
        if call.name is not None:
            self._has_call = True
            ids = {"id": f"fc_{uuid4().hex}", "call_id": f"call_{uuid4().hex[:24]}"}
            item = {"type": "function_call", **ids, "name": call.name, "arguments": "", "status": "in_progress"}
            yield from self._open(item)
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            yield self._about_item("response.function_call_arguments.delta", {"delta": call.arguments})

    # ---- messages and thinking, which have one part each

    def _open_with_part(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
        yield from self._open({**item, "content": []})
        self.items[-1]["content"].append(part)
        yield self._about_part("response.content_part.added", {"part": part})

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    def _about_part(self, name: str, fields: Event) -> Event:
        return self._about_item(name, {"content_index": 0, **fields})

    def _close_part(self) -> Iterator[Event]:
        part = self._part
        done: Event = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._about_part(f"response.{part['type']}.done", done)
        yield self._about_part("response.content_part.done", {"part": part})

    # ---- all items

    def _is_last_open(self, kind: str) -> bool:
        """Whether the last item has this type and may still grow."""
        return self._is_open and bool(self.items[-1]["type"] == kind)

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self.close("completed")
        self.items.append(item)
        self._is_open = True
        added = {"output_index": len(self.items) - 1, "item": item}
        yield {"type": "response.output_item.added", **added}

    def close(self, status: str) -> Iterator[Event]:
        """End the last item, if it is not."""
        if not self._is_open:
            return
        item = self.items[-1]
        self._is_open = False
        if "content" in item:
            yield from self._close_part()
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._about_item("response.function_call_arguments.done", done)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _about_item(self, name: str, fields: Event) -> Event:
        return {"type": name, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
