"""``/v1/responses`` by the real client: events, items, and what is stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

import jackfield
from jackfield.engine.engine import Engine
from jackfield.serving.keys import new_key

if TYPE_CHECKING:
    from openai import OpenAI
    from served import Served

ASK = "Sort these numbers: 41 7 88 23"
CHAT: Any = [{"role": "user", "content": ASK}]
LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
OBJECT = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
FORMAT: Any = {"format": {"type": "json_schema", "name": "n", "schema": OBJECT}}


def test_a_response_is_what_a_chat_says(client: OpenAI, server: Served) -> None:
    found = client.responses.create(model="demo", input=ASK)
    chat = client.chat.completions.create(model="demo", messages=CHAT)
    assert found.output_text == chat.choices[0].message.content == "7 23 41 88"
    assert (found.status, found.error, found.incomplete_details) == ("completed", None, None)
    assert found.usage is not None
    assert chat.usage is not None
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.output_tokens == chat.usage.completion_tokens
    assert found.usage.total_tokens == chat.usage.total_tokens
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_three_turns_are_the_chat_of_three_turns(client: OpenAI) -> None:
    asks = [ASK, "Sort these numbers: 9 3", "Spell this word: cat"]
    chat: Any = [{"role": "system", "content": "Be brief."}]
    replayed: list[Any] = []
    previous = None
    for ask in asks:
        chat.append({"role": "user", "content": ask})
        replayed.append({"role": "user", "content": [{"type": "input_text", "text": ask}]})
        right = client.chat.completions.create(model="demo", messages=chat)
        found = client.responses.create(
            model="demo", input=ask, instructions="Be brief.", previous_response_id=previous
        )
        again = client.responses.create(model="demo", input=replayed, instructions="Be brief.")
        said = right.choices[0].message.content
        assert found.output_text == again.output_text == said
        assert right.usage is not None
        for one in (found, again):
            assert one.usage is not None
            assert one.usage.input_tokens == right.usage.prompt_tokens
        chat.append({"role": "assistant", "content": said})
        replayed += [item.model_dump(exclude_none=True) for item in again.output]
        previous = found.id
    items = client.responses.input_items.list(previous or "", order="asc", limit=2)
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == [t for m in chat[1:-1] for t in [m["content"]]]


def comparable(response: Any) -> Any:
    """Without what is another for each response: ids, times, and what the cache had."""
    found = json.loads(response.model_dump_json())
    for key in ("id", "created_at", "completed_at"):
        assert found.pop(key) or key == "completed_at"
    found["usage"].pop("input_tokens_details")
    for item in found["output"]:
        assert item.pop("id")
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.0, "extra_body": {"seed": 5}},
        LOGPROBS,
        {"max_output_tokens": 3},
        {"max_output_tokens": 3, **LOGPROBS},
        {"text": FORMAT, "max_output_tokens": 30},
        {"input": [{"role": "user", "content": "Say \N{GRINNING FACE}"}], "max_output_tokens": 9},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_the_last_event_has_what_is_answered_whole(client: OpenAI, more: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": ASK, "max_output_tokens": 24, **more}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == f"response.{whole.status}"
    assert comparable(events[-1].response) == comparable(whole)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    told = [one.token for event in deltas for one in event.logprobs]
    part: Any = whole.output[0].content[0]  # type: ignore[union-attr, index]
    kept = [one.token for one in part.logprobs]
    assert told == kept[: len(told)]
    assert len(kept) - len(told) <= 1  # the EOS, which has no text
    assert bool(kept) == ("include" in more)
    if "include" in more:
        assert whole.usage is not None
        assert len(kept) == whole.usage.output_tokens
        assert all(len(one.top_logprobs) == 2 for one in part.logprobs)


def test_the_helper_for_streams_makes_the_response(client: OpenAI) -> None:
    with client.responses.stream(model="demo", input=ASK) as stream:
        snapshots = [event.snapshot for event in stream if event.type.endswith("text.delta")]  # type: ignore[union-attr]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == "7 23 41 88"
    assert final.status == "completed"


def test_the_asynchronous_client(server: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            found = await client.responses.create(model="demo", input=ASK)
            async with client.responses.stream(model="demo", input=ASK) as stream:
                final = await stream.get_final_response()
            items = [item async for item in client.responses.input_items.list(found.id)]
            assert [item.type for item in items] == ["message"]
            return [found.output_text, final.output_text]

    assert asyncio.run(ask()) == ["7 23 41 88"] * 2


class Answer(pydantic.BaseModel):
    n: int


def test_a_schema_is_kept_to(client: OpenAI) -> None:
    found = client.responses.create(model="demo", input=ASK, text=FORMAT)
    assert json.loads(found.output_text) == {"n": 7}
    assert json.loads(found.model_dump_json())["text"]["format"]["schema_"] == OBJECT
    free = client.responses.create(
        model="demo", input=ASK, text={"format": {"type": "json_object"}}, max_output_tokens=20
    )
    assert free.output_text.startswith("{")
    parsed = client.responses.parse(model="demo", input=ASK, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)


def events_of(text: str) -> list[tuple[str, Any]]:
    """What stands in a stream's bytes, each event checked for its form."""
    assert text.endswith("\n\n")
    found = []
    for one in text[:-2].split("\n\n"):
        name, data = one.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name[7:], json.loads(data[6:])))
    return found


def test_the_bytes_of_a_stream(server: Served) -> None:
    plainly = {"stream_options": {"include_obfuscation": False}}
    body = {"model": "demo", "input": ASK, "stream": True, **plainly, **LOGPROBS}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.text)
    kind: Any = pydantic.TypeAdapter(ResponseStreamEvent)
    for n, (name, data) in enumerate(events):
        assert data["type"] == name
        assert data["sequence_number"] == n
        kind.validate_python(data, strict=True)
    names = [name for name, _ in events]
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert "[DONE]" not in answer.text  # the stream ends with its last typed event


def failing_after(steps: int) -> Callable[..., Engine]:
    def load(*args: Any, **more: Any) -> Engine:
        engine = jackfield.load(*args, **more)
        inner, left = engine._loop.forward, [steps]

        def forward(inputs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("the card is gone")
            return inner(inputs)

        engine._loop.forward = forward
        return engine

    return load


def test_an_error_is_an_event_and_a_response_that_failed(serve: Callable[..., Served]) -> None:
    server = serve(load=failing_after(4))
    body = {"model": "demo", "input": ASK, "stream": True}
    with httpx.Client(base_url=f"{server.url}/v1") as client:
        events = events_of(client.post("/responses", json=body).text)
        (error, told), (last, failed) = events[-2:]
        assert (error, last) == ("error", "response.failed")
        assert told["sequence_number"] == len(events) - 2
        assert "the card is gone" in told["message"]
        response = Response.model_validate(failed["response"])
        assert response.error is not None
        assert response.error.code == "server_error"
        assert response.output_text == "7 23"[: len(response.output_text)] != ""
        assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
        stored = client.get(f"/responses/{response.id}").json()
        assert stored == failed["response"]


def test_a_stored_response_is_had_again_until_it_is_deleted(client: OpenAI) -> None:
    asked = {"metadata": {"of": "me"}, "user": "ann", "safety_identifier": "ann-1"}
    found = client.responses.create(model="demo", input=ASK, **asked)  # type: ignore[call-overload]
    assert {name: getattr(found, name) for name in asked} == asked
    assert client.responses.retrieve(found.id) == found
    client.responses.delete(found.id)
    for act in (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            act(found.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input="x", previous_response_id=found.id)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


def test_what_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    found = client.responses.create(model="demo", input=ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


def test_the_store_forgets_what_was_not_used_for_longest(serve: Callable[..., Served]) -> None:
    server = serve(stored_responses=2)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client:
        first, second = (client.responses.create(model="demo", input=ASK) for _ in range(2))
        third = client.responses.create(model="demo", input=ASK, previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        items = list(client.responses.input_items.list(third.id))
        assert len(items) == 3
        fourth = client.responses.create(model="demo", input=ASK, previous_response_id=third.id)
        assert len(list(client.responses.input_items.list(fourth.id))) == 5  # the first is gone


def test_a_server_that_stores_nothing_says_so(serve: Callable[..., Served]) -> None:
    server = serve(stored_responses=0)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.responses.create(model="demo", input=ASK)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(found.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="demo", input=ASK, store=True)
        assert caught.value.param == "store"


def test_nobody_has_what_another_stored(serve: Callable[..., Served]) -> None:
    (mine, my_hash), (theirs, their_hash) = new_key(), new_key()
    server = serve(keys={"me": {"sha256": my_hash}, "them": {"sha256": their_hash}})
    me, them = (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        for key in (mine, theirs)
    )
    with me, them:
        found = me.responses.create(model="demo", input=ASK)
        assert me.responses.retrieve(found.id) == found
        for act in (
            them.responses.retrieve,
            them.responses.delete,
            them.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                act(found.id)
        refused: list[Any] = [
            {"input": "x", "previous_response_id": found.id},
            {"input": [{"type": "item_reference", "id": found.output[0].id}]},
        ]
        for asked in refused:
            with pytest.raises(openai.BadRequestError):
                them.responses.create(model="demo", **asked)
        assert me.responses.retrieve(found.id) == found


def test_an_item_is_referred_to_by_its_id(client: OpenAI) -> None:
    first = client.responses.create(model="demo", input=ASK)
    again: Any = [
        {"role": "user", "content": ASK},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "Sort these numbers: 9 3"},
    ]
    right = client.responses.create(
        model="demo", input="Sort these numbers: 9 3", previous_response_id=first.id
    )
    found = client.responses.create(model="demo", input=again)
    assert found.output_text == right.output_text
    assert found.usage is not None
    assert right.usage is not None
    assert found.usage.input_tokens == right.usage.input_tokens


def test_items_are_listed_in_pages(client: OpenAI) -> None:
    texts = [f"Sort these numbers: {n} 1" for n in range(5)]
    found = client.responses.create(
        model="demo", input=[{"role": "user", "content": text} for text in texts]
    )
    for order, right in (("asc", texts), ("desc", texts[::-1])):
        page = client.responses.input_items.list(found.id, limit=2, order=order)  # type: ignore[arg-type]
        assert [item.content[0].text for item in page] == right  # type: ignore[union-attr]
        assert len(page.data) == 2


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_tokens_that_the_cache_had_are_counted(server: Served, path: str) -> None:
    ask = "Sort these numbers: " + "31 4 15 9 26 " * 20
    said: Any = (
        {"input": ask} if path == "responses" else {"messages": [{**CHAT[0], "content": ask}]}
    )
    found = []
    for key in (f"one of {path}", f"one of {path}", f"another of {path}"):
        body = {"model": "demo", "prompt_cache_key": key, **said}
        usage = httpx.post(f"{server.url}/v1/{path}", json=body).json()["usage"]
        details = usage["input_tokens_details" if "input" in said else "prompt_tokens_details"]
        found.append(details["cached_tokens"])
    assert found[0] == found[2] == 0
    assert found[1] > 100


def test_a_response_cannot_be_cancelled(client: OpenAI, server: Served) -> None:
    found = client.responses.create(model="demo", input="Hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(found.id)
    with pytest.raises(openai.NotFoundError, match="no response 'resp_none'"):
        client.responses.cancel("resp_none")
    for more in ({"content": b"{}", "headers": {"Content-Type": "application/json"}}, {}):
        answer = httpx.post(f"{server.url}/v1/responses/resp_none/cancel", **more)
        assert answer.status_code == 404
    assert httpx.post(f"{server.url}/v1/elsewhere").status_code == 404
