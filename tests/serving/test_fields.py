"""Every field that the client knows takes effect, or is refused by its name.

A new version of the client with new fields fails here, and says which they are.
"""

from __future__ import annotations

import ast
import functools
import json
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import httpx
import pytest
from fields import CHAT, TEXT, USER, Differs, Refused, Same, Shown, Table
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsStreaming as ChatParams,
)
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from response_fields import RESPONSES
from served import Served, serving
from test_tools import loads
from typing_extensions import get_type_hints, is_typeddict

pytest.importorskip("llguidance", reason="needs jackfield[structured]")


class Endpoint(NamedTuple):
    path: str
    params: Any
    table: Table
    body: dict[str, Any]


ENDPOINTS = {
    "chat": Endpoint("chat/completions", ChatParams, CHAT,
                     {"messages": [USER], "max_completion_tokens": 12}),
    "text": Endpoint("completions", TextParams, TEXT, {"prompt": "Hello", "max_tokens": 12}),
    "responses": Endpoint("responses", ResponseCreateParamsStreaming, RESPONSES,
                          {"input": "Hello", "max_output_tokens": 12}),
}  # fmt: skip


def dicts_in(hint: Any) -> Iterator[Any]:
    """The typed dictionaries that a field may have, in lists and alternatives too."""
    if is_typeddict(hint):
        yield hint
    elif get_origin(hint) is not Literal:
        for part in get_args(hint):
            yield from dicts_in(part)


def words_in(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for part in get_args(hint) for word in words_in(part)]


def kind_of(kind: Any) -> tuple[str, str]:
    """The field that says what a typed dictionary is, and what it says there."""
    hints = get_type_hints(kind)
    for name in ("role", "type"):
        if len(words := words_in(hints.get(name))) == 1:
            return name, words[0]
    return "", ""


def paths(kind: Any, table: Table, at: str = "", seen: tuple[Any, ...] = ()) -> Iterator[str]:
    """The fields of the client's parameters, but for those below what is refused whole."""
    for name, hint in get_type_hints(kind).items():
        if (known := kind_of(kind))[0] == name and known[1] and at:
            continue  # it is in the path
        path = f"{at}.{name}" if at else name
        yield path
        if is_whole(table, path):
            continue
        for inner in dicts_in(hint):
            if inner not in seen:
                word = kind_of(inner)[1]
                below = f"{path}[{word}]" if word else path
                yield below
                if not is_whole(table, below):
                    yield from paths(inner, table, below, (*seen, inner))


def is_whole(table: Table, path: str) -> bool:
    """Whether nothing below a path has a row: it is refused, or asks for nothing, as a whole."""
    rows = table.get(path, ())
    whole = any(isinstance(row, Refused | Same) and row.whole for row in rows)
    return whole or (bool(rows) and all(isinstance(row, Refused) for row in rows))


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_every_field_of_the_client_has_a_row(endpoint: Endpoint) -> None:
    found = set(paths(endpoint.params, endpoint.table))
    missing = [path for path in found if path not in endpoint.table and not said_by_kind(path)]
    assert not missing
    assert not endpoint.table.keys() - found


def said_by_kind(path: str) -> bool:
    """``type`` and ``role`` of an alternative are in its path."""
    return path.endswith(("].type", "].role"))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(loads("hermes")) as found:
        yield found


@pytest.fixture(scope="module")
def ask(server: Served) -> Any:
    """Asks once for each body: (status, answer)."""
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:

        @functools.cache
        def once(path: str, body: str) -> tuple[int, Any]:
            answer = client.post(path, json=json.loads(body))
            return answer.status_code, answer.json()

        def ask(endpoint: Endpoint, *more: Any) -> tuple[int, Any]:
            body = functools.reduce(operator.or_, more, {"model": "demo", **endpoint.body})
            return once(endpoint.path, json.dumps(body))

        yield ask


def answer(found: tuple[int, Any]) -> Any:
    """What the model was told and said: without what is another for each request, and echoes."""
    status, body = found
    assert status == 200, body
    said = {name: body.get(name) for name in ("choices", "output", "status")}
    text = re.sub(r'"(id|call_id)": "[^"]*"', "", json.dumps(said))
    counts = {k: v for k, v in body["usage"].items() if isinstance(v, int)}
    return text, counts


CASES = [
    (name, path, row)
    for name, endpoint in ENDPOINTS.items()
    for path, rows in endpoint.table.items()
    for row in rows
]


@pytest.mark.parametrize(
    ("name", "path", "row"),
    [pytest.param(*case, id=f"{case[0]}-{n}-{case[1]}") for n, case in enumerate(CASES)],
)
@pytest.mark.one_in(4)
def test_a_field_takes_effect_or_is_whole(ask: Any, name: str, path: str, row: Any) -> None:
    endpoint = ENDPOINTS[name]
    match row:
        case Differs(more, base):
            assert answer(ask(endpoint, base, more)) != answer(ask(endpoint, base))
        case Same(more, base):
            assert answer(ask(endpoint, base, more)) == answer(ask(endpoint, base))
        case Refused(more, param, right):
            status, body = ask(endpoint, more)
            assert (status, plain(body["error"]["param"])) == (right, param or plain(path)), body
        case Shown(test):
            file, function = test.split("::")
            assert function in functions_in(Path(__file__).with_name(file))


def plain(path: str) -> str:
    """A path without alternatives and places in lists."""
    return re.sub(r"\[[^]]*\]|\.\d+(?=\.|$)", "", path)


@functools.cache
def functions_in(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_results_of_tools_are_read(ask: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    told = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def said(content: Any) -> Any:
        result = {"role": "tool", "tool_call_id": "call_1", "content": content}
        return answer(ask(ENDPOINTS["chat"], {"messages": [*told, result]}))

    assert said("noon") != said("night")
    assert said("noon") == said([{"type": "text", "text": "noon"}])


def test_a_stream_of_texts(server: Served) -> None:
    body = {"model": "demo", **ENDPOINTS["text"].body}
    whole = httpx.post(f"{server.url}/v1/completions", json=body).json()
    streamed: Any = {"stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(f"{server.url}/v1/completions", json=body | streamed).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *chunks, last = (json.loads(line[6:]) for line in lines[:-2])
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]
    assert last["choices"] == []
    assert {k: v for k, v in last["usage"].items() if isinstance(v, int)} == {
        k: v for k, v in whole["usage"].items() if isinstance(v, int)
    }
