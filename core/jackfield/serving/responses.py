"""``/v1/responses``: a conversation goes on, told as items; the server may keep what was said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from jackfield.engine.engine import Engine
from jackfield.serving.asking import Asking
from jackfield.serving.chat import Chat, reports
from jackfield.serving.errors import ApiError, refused, told
from jackfield.serving.output import Output
from jackfield.serving.runs import Run
from jackfield.serving.schema.items import (
    Json,
    Reference,
    as_json,
    messages,
    user_message,
)
from jackfield.serving.schema.responses import (
    LOGPROBS,
    MAX_ITEMS,
    ItemsQuery,
    ResponsesRequest,
    RetrieveQuery,
    in_fields_of_responses,
)
from jackfield.serving.store import Store, Stored


class Conversation:
    """The items that a body is about: those of the response that it goes on from, and its own.

    Raises ApiError for what is not stored.
    """

    def __init__(self, body: ResponsesRequest, store: Store, owner: str) -> None:
        earlier: list[Json] = []
        if (name := body.previous_response_id) is not None:
            try:
                earlier = store.get(owner, name).conversation
            except ApiError as error:
                raise refused(
                    f"{error.message} to go on from", "previous_response_id",
                    "previous_response_not_found",
                ) from None  # fmt: skip
        self.before = len(earlier)
        called = {item["call_id"] for item in earlier if item["type"] == "function_call"}
        own = [user_message(body.input)] if isinstance(body.input, str) else body.input
        self.items = [*earlier]
        for at, item in enumerate(own):
            if not isinstance(item, Reference):
                self.items.append(as_json(item))
            elif (stored := store.item(owner, item.id)) is None:
                raise refused(f"input.{at}: no item of this id is stored", f"input.{at}.id")
            else:
                self.items.append(stored)
            last = self.items[-1]
            if last["type"] == "function_call":
                called.add(last["call_id"])
            elif last["type"] == "function_call_output" and last["call_id"] not in called:
                raise refused(
                    f"input.{at}.call_id: no function_call before it has this call_id",
                    f"input.{at}.call_id",
                )
        if len(self.items) > MAX_ITEMS:
            raise refused(f"the conversation has more than {MAX_ITEMS} items", "input")


class Responding:
    """The answer to one body: events, the last of which has the whole response."""

    def __init__(
        self,
        body: ResponsesRequest,
        asking: Asking,
        engine: Engine,
        conversation: Conversation,
        store: Store,
    ) -> None:
        self.body, self._conversation = body, conversation
        self._store, self._owner = store, asking.owner
        self._kept = asking.settings.stored_responses > 0 and body.store is not False
        if body.store and not self._kept:
            raise refused("this server stores no responses; say store=false", "store")
        items = conversation.items
        if not engine.chat_format.reads_thoughts:  # the model is not told what it thought
            items = [item for item in items if item["type"] != "reasoning"]
        if not (said := messages(items, body.instructions)):
            raise refused("input has nothing that this model is told; say something", "input")
        try:
            self._chat = Chat(body.chat(said), asking, engine)
        except ApiError as error:
            raise in_fields_of_responses(error) from None
        self._output = Output(asking.id)
        self._id = f"resp_{asking.id}"
        self._now, self._created = asking.now, asking.now()

    @property
    def prompts(self) -> list[Any]:
        return self._chat.prompts

    def asked(self) -> dict[str, Any]:
        return self._chat.asked()

    async def chunks(self, run: Run) -> AsyncIterator[Json]:
        """The events; an error is told by one of its own, and by the failed response."""
        number = 0
        try:
            async for event in self._events(run):
                yield {**event, "sequence_number": number}
                number += 1
        except Exception as error:  # noqa: BLE001 - whoever reads a stream is told of its end
            for event in self._failed(told(error)):
                yield {**event, "sequence_number": number}
                number += 1

    async def whole(self, run: Run) -> Json:
        """The response. Raises ApiError."""
        last: Json = {}
        async for event in self._events(run):
            last = event
        found: Json = last["response"]
        return found

    async def _events(self, run: Run) -> AsyncIterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._about(kind, self._response("in_progress"))
        reason = None
        async for choice in self._chat.choices(run):
            for event in self._output.take(choice):
                yield event
            reason = choice["finish_reason"] or reason
        status = "completed" if reason in ("stop", "tool_calls") else "incomplete"
        for event in self._output.close(status):
            yield event
        why = {"reason": "max_output_tokens"} if reason == "length" else None
        yield self._about(status, self._keep(self._ended(status, why, run)))

    def _failed(self, error: ApiError) -> Iterator[Json]:
        yield {
            "type": "error", "code": error.code, "message": error.message, "param": error.param,
        }  # fmt: skip
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        why = {"code": code, "message": error.message, "param": error.param}
        output = self._output.cut()
        yield self._about("failed", self._keep(self._response("failed", error=why, output=output)))

    @staticmethod
    def _about(kind: str, response: Json) -> Json:
        return {"type": f"response.{kind}", "response": response}

    def _keep(self, response: Json) -> Json:
        if self._kept:
            conversation = self._conversation
            stored = Stored(response, tuple(conversation.items), conversation.before)
            self._store.put(self._owner, stored)
        return response

    def _ended(self, status: str, why: Json | None, run: Run) -> Json:
        more = {"jackfield": reports(run)} if self.body.include_report else {}
        return self._response(
            status,
            output=self._output.items,
            incomplete_details=why,
            completed_at=self._now() if status == "completed" else None,
            usage=self._usage(run),
            **more,
        )

    def _usage(self, run: Run) -> Json:
        found = run.usage()
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._chat.reasoning_tokens},
            "total_tokens": found["total_tokens"],
        }

    def _response(self, status: str, **more: Any) -> Json:
        """The response, with all that was asked for as it was understood."""
        body = self.body
        text = body.text and body.text.format
        tools = [tool.model_dump(exclude_none=True, by_alias=True) for tool in body.tools or ()]
        choice = body.tool_choice
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "background": False, "completed_at": None, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls, "metadata": body.metadata or {},
            "model": body.model, "output": [], "parallel_tool_calls": body.parallel_tool_calls
            is not False, "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": body.reasoning and body.reasoning.effort, "summary": None,
            },
            "safety_identifier": body.safety_identifier, "service_tier": "default",
            "store": self._kept, "temperature": body.temperature,
            "text": {
                "format": {"type": "text"} if text is None
                else text.model_dump(exclude_none=True, by_alias=True),
                "verbosity": "medium",
            },
            "tool_choice": "auto" if choice is None
            else choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
            "top_logprobs": body.top_logprobs or 0, "top_p": body.top_p,
            "truncation": "disabled", "usage": None, "user": body.user, **more,
        }  # fmt: skip


def retrieved(stored: Stored, asked: RetrieveQuery) -> Json:
    """A response as it was answered."""
    texts = (part for item in stored.response["output"] for part in item.get("content") or ())
    if LOGPROBS in (asked.include or ()) and not any(part.get("logprobs") for part in texts):
        raise refused(
            "include: this response was made without log-probabilities; make it with this include",
            "include",
        )
    return stored.response


def listed(stored: Stored, asked: ItemsQuery) -> Json:
    """A page of the items that a response answers, those of earlier responses included."""
    items = list(stored.items if asked.order == "asc" else reversed(stored.items))
    if asked.after is not None:
        at = next((n for n, item in enumerate(items) if item["id"] == asked.after), None)
        if at is None:
            raise refused("after: the response has no input item of this id", "after")
        items = items[at + 1 :]
    page = items[: asked.limit]
    return {
        "object": "list", "data": page, "has_more": len(items) > asked.limit,
        "first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None,
    }  # fmt: skip
