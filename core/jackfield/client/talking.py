"""A conversation with a model of a server: what it is asked for, and its answer as it comes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from jackfield.client.address import Address, no_such_server, refusal, told
from jackfield.client.events import DONE, Events, Piece, piece_of
from jackfield.errors import ExecutionError, JackfieldError, UsageError

#: Our names of settings -> the protocol's; others go as they are, servers have fields of their own.
FIELDS = {"max_new_tokens": "max_tokens"}


def as_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as fields of a request. Raises UsageError for those that contradict one another."""
    found = {FIELDS.get(name, name): value for name, value in settings.items()}
    sample = found.pop("do_sample", None)
    if sample is False:
        if found.get("temperature", 0) > 0:
            raise UsageError("--no-do-sample and a temperature above 0 contradict; give one")
        found["temperature"] = 0
    elif sample:
        found.setdefault("temperature", 1)
    return found


@dataclass
class Talk:
    """Texts of one model of a server, streamed.

    `counts`: it says how many tokens there were, unless it does not know the field that asks so.
    """

    address: Address
    model: str
    fields: Mapping[str, Any]
    client: httpx.Client
    counts: bool = True

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> Generator[Piece, None, None]:
        """The pieces of the answer; closing the iterator stops it.

        Raises PromptError where the conversation is too long, UsageError for what the caller can
        mend, ExecutionError for an answer that breaks off.
        """
        yield from self.pieces("/chat/completions", {"messages": list(messages)})

    def body(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """What a request for a stream sends."""
        options = {"stream_options": {"include_usage": True}} if self.counts else {}
        return {"model": self.model, **own, "stream": True, **options, **self.fields}

    def pieces(self, path: str, own: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """`answer` of any endpoint, with the fields that are its own."""
        try:
            yield from self._ask(path, own)
        except httpx.HTTPError as error:
            raise self.address.unreachable(error) from None

    def _ask(self, path: str, own: Mapping[str, Any]) -> Iterator[Piece]:
        url = f"{self.address.base}{path}"
        with self.client.stream("POST", url, json=self.body(own)) as response:
            if response.is_error:
                content = response.read()
                if "stream_options" in str(told(content).get("message")) and self.counts:
                    self.counts = False
                    yield from self._ask(path, own)
                    return
                raise self._refused(response.status_code, content)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise no_such_server(self.address, response)
            yield from self._read(response)

    def _read(self, response: httpx.Response) -> Iterator[Piece]:
        events, ended = Events(), False
        for data in response.iter_bytes():
            for event in events.feed(data):
                if event == DONE:
                    return
                piece = piece_of(event)
                if piece.error is not None:
                    raise ExecutionError(f"{self.address.base}: {piece.error}")
                ended = ended or piece.finish_reason is not None
                yield piece
        if not ended:
            raise ExecutionError(f"the answer of {self.address.base} was cut off")

    def _refused(self, status: int, content: bytes) -> JackfieldError:
        names = []
        if status == 404:
            try:
                names = self.address.models(self.client)
            except JackfieldError:
                names = []
        return refusal(self.address, status, content, self.model, names)
