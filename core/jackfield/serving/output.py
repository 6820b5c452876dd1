"""The output of a response while it grows: items, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jackfield.serving.schema.items import Json, id_of_output


class Output:
    """Makes items of the pieces of a chat's stream: a message, a thought, or calls of functions.

    Events are without their `sequence_number`. Log-probabilities go with the text that they are of;
    those of thoughts and calls are not told. The ids of items are made of `answer`, that of the
    answer.
    """

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self.items: list[Json] = []
        self._open: _Texts | _Call | None = None
        self._logprobs: list[Json] = []

    def take(self, choice: Json) -> Iterator[Json]:
        """The events of one choice of a chunk."""
        delta = choice["delta"]
        self._logprobs += (choice["logprobs"] or {}).get("content") or ()
        if thought := delta.get("reasoning_content"):
            yield from self._say(_Thoughts, thought)
        if text := delta.get("content"):
            yield from self._say(_Message, text)
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)

    def close(self, status: str) -> Iterator[Json]:
        """The end; a response that says nothing says an empty text. `status` is the last item's."""
        if self._open is None and not self.items:
            yield from self._begin(_Message(len(self.items)))
        if isinstance(self._open, _Message):
            self._open.logprobs += self._logprobs  # of tokens that have no text, as of the EOS
        yield from self._end(status)

    def cut(self) -> list[Json]:
        """The items, of which the last one may be incomplete, where nothing more will come."""
        for _ in self._end("incomplete"):
            pass
        return self.items

    def _say(self, kind: type[_Message | _Thoughts], text: str) -> Iterator[Json]:
        if type(self._open) is not kind:
            yield from self._end("completed")
            yield from self._begin(kind(len(self.items)))
        assert isinstance(self._open, _Texts)
        logprobs, self._logprobs = self._logprobs, []
        yield self._open.grow(text, logprobs)

    def _call(self, call: Json) -> Iterator[Json]:
        function = call["function"]
        if "id" in call:
            yield from self._end("completed")
            made = _Call(len(self.items), call["id"], function["name"])
            yield from self._begin(made)
        self._logprobs = []
        assert isinstance(self._open, _Call)
        if arguments := function.get("arguments"):
            yield self._open.grow(arguments)

    def _begin(self, item: _Texts | _Call) -> Iterator[Json]:
        self._open = item
        item.item["id"] = id_of_output(item.item["type"], self._answer, len(self.items))
        self.items.append(item.item)
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Json]:
        if self._open is None:
            return
        yield from self._open.end(status)
        self._open = None


class _Item:
    """One item; `item` is itself, finished by `end`."""

    def __init__(self, index: int, item: Json) -> None:
        self.item = {"id": "", **item, "status": "in_progress"}
        self._index = index

    def event(self, kind: str, **more: Any) -> Json:
        return {
            "type": f"response.{kind}", "item_id": self.item["id"], "output_index": self._index,
            **more,
        }  # fmt: skip

    def added(self) -> Json:
        return {
            "type": "response.output_item.added", "output_index": self._index,
            "item": dict(self.item),
        }  # fmt: skip

    def done(self, status: str) -> Json:
        self.item["status"] = status
        return {
            "type": "response.output_item.done", "output_index": self._index, "item": self.item,
        }  # fmt: skip


class _Texts(_Item):
    """An item of one part with a text; `name` is that of its events."""

    name: str

    def __init__(self, index: int, item: Json) -> None:
        super().__init__(index, {**item, "content": []})
        self.logprobs: list[Json] = []
        self._pieces: list[str] = []

    def part(self) -> Json:
        return {"type": self.name, "text": "".join(self._pieces)}

    def more(self, logprobs: list[Json]) -> Json:
        """What events about a text have beside it."""
        del logprobs
        return {}

    def begin(self) -> Iterator[Json]:
        yield self.added()
        yield self.event("content_part.added", content_index=0, part=self.part())

    def grow(self, text: str, logprobs: list[Json]) -> Json:
        self._pieces.append(text)
        self.logprobs += logprobs
        return self.event(f"{self.name}.delta", content_index=0, delta=text, **self.more(logprobs))

    def end(self, status: str) -> Iterator[Json]:
        part = self.part()
        more = self.more(list(self.logprobs))
        yield self.event(f"{self.name}.done", content_index=0, text=part["text"], **more)
        yield self.event("content_part.done", content_index=0, part=part)
        self.item["content"] = [part]
        yield self.done(status)


class _Message(_Texts):
    name = "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index, {"type": "message", "role": "assistant"})

    def part(self) -> Json:
        return {**super().part(), "annotations": [], "logprobs": list(self.logprobs)}

    def more(self, logprobs: list[Json]) -> Json:
        return {"logprobs": logprobs}


class _Thoughts(_Texts):
    name = "reasoning_text"

    def __init__(self, index: int) -> None:
        super().__init__(index, {"type": "reasoning", "summary": []})


class _Call(_Item):
    def __init__(self, index: int, call_id: str, name: str) -> None:
        item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        super().__init__(index, item)
        self._pieces: list[str] = []

    def begin(self) -> Iterator[Json]:
        yield self.added()

    def grow(self, arguments: str) -> Json:
        self._pieces.append(arguments)
        return self.event("function_call_arguments.delta", delta=arguments)

    def end(self, status: str) -> Iterator[Json]:
        self.item["arguments"] = arguments = "".join(self._pieces)
        yield self.event(
            "function_call_arguments.done", arguments=arguments, name=self.item["name"]
        )
        yield self.done(status)
