"""Events of a stream, however their bytes are cut, and what they say."""

from __future__ import annotations

import itertools

import pytest

from jackfield.client.events import DONE, Events, piece_of

STREAM = 'data: {"a": "é"}\n\n: a remark\n\nevent: x\ndata:1\ndata: 2\n\ndata: [DONE]\n\n'
RIGHT = ['{"a": "é"}', "1\n2", DONE]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_they_are_cut(end: str, size: int) -> None:
    data = STREAM.replace("\n", end).encode()
    for offset in range(min(size, len(data))):
        events, cuts = Events(), [0, *range(offset or size, len(data), size), len(data)]
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)] + [b"\n"]
        assert [found for part in parts for found in events.feed(part)] == RIGHT


def test_an_event_that_was_cut_off_is_none() -> None:
    assert list(Events().feed(b'data: {"a": 1}\n')) == []


@pytest.mark.parametrize(
    "data",
    ["", "[]", "null", "3", '{"choices": 3}', '{"choices": ["a"]}', '{"choices": [{"delta": 1}]}',
     '{"error": {}}', "[" * 100_000],
)  # fmt: skip
def test_an_event_of_another_protocol_is_an_error(data: str) -> None:
    piece = piece_of(data)
    assert piece.error or piece.text == ""
    assert data == '{"error": {}}' or piece.error


def test_events_of_both_endpoints_are_read() -> None:
    chat = '{"choices": [{"delta": {"content": "a"}, "finish_reason": null}], "usage": null}'
    assert piece_of(chat).text == "a"
    assert piece_of('{"choices": [{"text": "b", "finish_reason": "stop"}]}').text == "b"
    assert piece_of('{"choices": [{"delta": {"reasoning_content": "c"}}]}').reasoning == "c"
    assert piece_of('{"choices": [], "usage": {"completion_tokens": 3}}').usage is not None
    assert piece_of('{"error": {"message": "full"}}').error == "full"
    assert piece_of('{"error": "full"}').error == "full"
