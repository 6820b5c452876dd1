"""Items and events made of any pieces of a chat: texts, thoughts, calls."""

from __future__ import annotations

from typing import Any

import pydantic
from hypothesis import given
from hypothesis import strategies as st
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from jackfield.serving.chat import _fold
from jackfield.serving.output import Output
from jackfield.serving.schema.items import messages

EVENTS: Any = pydantic.TypeAdapter(ResponseStreamEvent)
TEXT = st.text("ab {é\n", min_size=1, max_size=4)
SAID = st.one_of(
    st.lists(st.builds(lambda t: {"content": t}, TEXT), min_size=1, max_size=3),
    st.lists(st.builds(lambda t: {"reasoning_content": t}, TEXT), min_size=1, max_size=3),
    st.lists(TEXT, max_size=3).map(lambda pieces: ["call", *pieces]),
    st.just([{}]),
)


def choices(said: list[list[Any]]) -> list[dict[str, Any]]:
    """As a chat tells it; each piece has a log-probability, known by its number."""
    found: list[dict[str, Any]] = []
    calls = -1
    for group in said:
        for piece in group:
            if isinstance(piece, dict):
                delta = piece
            elif piece == "call" and piece is group[0]:
                calls += 1
                begun = {"name": f"f{calls}", "arguments": ""}
                delta = {"tool_calls": [{"index": calls, "id": f"call_{calls}", "type": "function",
                                         "function": begun}]}  # fmt: skip
            else:
                delta = {"tool_calls": [{"index": calls, "function": {"arguments": piece}}]}
            one = {"token": f"{len(found)}", "bytes": [], "logprob": -1.0, "top_logprobs": []}
            found.append({"index": 0, "delta": delta, "logprobs": {"content": [one]},
                          "finish_reason": None})  # fmt: skip
    return found


def response(**more: Any) -> dict[str, Any]:
    return {
        "id": "resp_1", "object": "response", "created_at": 0, "model": "m", "output": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], **more,
    }  # fmt: skip


def text_of(item: dict[str, Any]) -> tuple[str, str]:
    if item["type"] == "function_call":
        return item["name"], item["arguments"]
    (part,) = item["content"]
    return part["type"], part["text"]


@given(st.lists(SAID, max_size=6), st.sampled_from(["completed", "incomplete"]))
def test_events_add_up_to_the_items(said: list[list[Any]], status: str) -> None:
    output, pieces = Output("an answer"), choices(said)
    events = [{"type": "response.created", "response": response()}]
    events += [event for choice in pieces for event in output.take(choice)]
    events += output.close(status)
    last = {"type": "response.completed", "response": response(output=output.items)}
    events.append(last)
    state = ResponseStreamState(input_tools=omit, text_format=omit)  # type: ignore[var-annotated]
    snapshot: Any = None
    for n, event in enumerate(events):
        read = EVENTS.validate_python({**event, "sequence_number": n}, strict=True)
        if event is last:
            snapshot = state._ResponseStreamState__current_snapshot.output  # type: ignore[attr-defined]
        state.handle_event(read)
    Response.model_validate(last["response"])
    for n, (own, item) in enumerate(zip(snapshot, output.items, strict=True)):
        if item["type"] != "reasoning":  # which the client does not add up
            assert text_of(own.to_dict()) == text_of(item)
        deltas = [e["delta"] for e in events if "delta" in e and e["output_index"] == n]
        assert "".join(deltas) == text_of(item)[1]
    begun = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert begun == [item["id"] for item in output.items]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == output.items
    assert [item["status"] for item in output.items[:-1]] == ["completed"] * (len(begun) - 1)
    assert output.items[-1]["status"] == status


@given(st.lists(SAID, max_size=6))
def test_items_say_what_the_chat_says(said: list[list[Any]]) -> None:
    output, pieces = Output("an answer"), choices(said)
    for choice in pieces:
        for _ in output.take(choice):
            pass
    list(output.close("completed"))
    whole: dict[str, Any] = {"message": {"role": "assistant", "content": None},
                             "logprobs": {"content": []}}  # fmt: skip
    for choice in pieces:
        _fold(whole, choice)
    told = [message.plain() for message in messages(output.items, None)]
    message = whole["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(m.get(name) or "" for m in told) == (message.get(name) or "")
    calls = [call for m in told for call in m.get("tool_calls", ())]
    assert calls == message.get("tool_calls", [])
    kept = [
        one["token"]
        for item in output.items
        if item["type"] == "message"
        for one in item["content"][0]["logprobs"]
    ]
    assert len(set(kept)) == len(kept)
    texts = {str(n) for n, choice in enumerate(pieces) if choice["delta"].get("content")}
    assert texts <= set(kept) <= texts | {str(n) for n, c in enumerate(pieces) if not c["delta"]}


def test_a_turn_of_thought_text_and_calls_is_one_message() -> None:
    said = [[{"reasoning_content": "hm"}], [{"content": "Let me"}], ["call", "{}"], ["call", "[]"]]
    output = Output("an answer")
    for choice in choices(said):
        list(output.take(choice))
    list(output.close("completed"))
    assert [item["type"] for item in output.items] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    results = [
        {"type": "function_call_output", "call_id": f"call_{n}", "output": f"{n}"} for n in (0, 1)
    ]
    first, *others = (m.plain() for m in messages([*output.items, *results], None))
    assert first == {
        "role": "assistant", "content": "Let me", "reasoning_content": "hm",
        "tool_calls": [
            {"id": f"call_{n}", "type": "function",
             "function": {"name": f"f{n}", "arguments": arguments}}
            for n, arguments in enumerate(("{}", "[]"))
        ],
    }  # fmt: skip
    assert others == [
        {"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}"} for n in (0, 1)
    ]


def test_what_is_cut_short_is_incomplete() -> None:
    output = Output("an answer")
    assert output.cut() == []
    for choice in choices([[{"content": "ab"}]]):
        list(output.take(choice))
    (item,) = output.cut()
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"] == "ab"
