"""``POST /v1/chat/completions``: a conversation goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from jackfield.engine.completions import Delta
from jackfield.engine.engine import Engine
from jackfield.serving.asking import Asking
from jackfield.serving.logprobs import of_chat
from jackfield.serving.runs import Run
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.schema.common import as_json
from jackfield.serving.turns import turn_for

_OBJECT = "chat.completion"


class Chat:
    """The answer to one body, in chunks or whole: the whole is folded from the same chunks."""

    def __init__(self, body: ChatRequest, asking: Asking, engine: Engine) -> None:
        self.body = body
        self._engine = engine
        self._id = f"chatcmpl-{asking.id}"
        self._created = asking.now()
        self._turn = turn_for(body, asking, engine)
        self.include_usage = body.include_usage
        self.reasoning_tokens = 0

    @property
    def prompts(self) -> list[Any]:
        return [self._turn.prompt]

    def asked(self) -> dict[str, Any]:
        return self._turn.asked

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.body.model}

    async def chunks(self, run: Run) -> AsyncIterator[str]:
        """``chat.completion.chunk`` objects, as JSON."""
        head = self._head(f"{_OBJECT}.chunk")
        usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        with_choice = around(head, usage)
        for index in range(self.body.samples):
            yield with_choice(_choice(index, {"role": "assistant", "content": ""}))
        async for choice in self.choices(run):
            yield with_choice(choice)
        if self.body.include_report:
            yield as_json({**head, "choices": [], "jackfield": reports(run), **usage})
        if self.include_usage:
            yield as_json({**head, "choices": [], "usage": run.usage()})

    async def choices(self, run: Run) -> AsyncIterator[dict[str, Any]]:
        """What the chunks have of each text; `reasoning_tokens` counts those of thoughts."""
        parsers = [self._turn.parser(number) for number in range(self.body.samples)]
        run.merges = parsers[0].plain  # else which tokens are thoughts depends on the pieces
        unsaid = [0] * self.body.samples  # tokens whose text is held back
        async for index, delta in run:
            said = parsers[index].said(delta)
            if parsers[index].done and delta.completion is None:
                run.cancel(index)
            unsaid[index] += len(delta.token_ids)
            if said:
                thought = "reasoning_content" in said[0]
                self.reasoning_tokens += unsaid[index] if thought else 0
                unsaid[index] = 0
            logprobs = self._logprobs(delta)
            reason = parsers[index].finish_reason(delta)
            if not said and (logprobs or reason):
                said = [{}]
            for at, piece in enumerate(said):
                last = at == len(said) - 1
                yield _choice(index, piece, logprobs if at == 0 else None, reason if last else None)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.body.logprobs or not delta.logprobs:
            return None
        return {"content": of_chat(self._engine, delta.logprobs), "refusal": None}

    async def whole(self, run: Run) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        choices: list[dict[str, Any]] = [
            {
                "index": index, "message": {"role": "assistant", "content": None, "refusal": None},
                "logprobs": {"content": [], "refusal": None} if self.body.logprobs else None,
                "finish_reason": None,
            }
            for index in range(self.body.samples)
        ]  # fmt: skip
        async for piece in self.choices(run):
            _fold(choices[piece["index"]], piece)
        found = {**self._head(_OBJECT), "choices": choices, "usage": run.usage()}
        return found | ({"jackfield": reports(run)} if self.body.include_report else {})


def around(head: dict[str, Any], tail: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """Chunks with one choice each, as JSON: all but the choice is the same, and made once."""
    before, _, after = as_json({**head, "choices": [0], **tail}).rpartition("[0]")
    return lambda choice: f"{before}[{as_json(choice)}]{after}"


def _choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
    }  # fmt: skip


def _fold(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a stream to the choice that it is a piece of."""
    message, delta = choice["message"], piece["delta"]
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({k: v for k, v in call.items() if k != "index"})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if piece["logprobs"]:
        choice["logprobs"]["content"] += piece["logprobs"]["content"]
    if piece["finish_reason"]:
        choice["finish_reason"] = piece["finish_reason"]
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""


def reports(run: Run) -> dict[str, Any]:
    """What was observed to run for each text, for who asked for it."""
    return {
        "reports": [run.completions[n].report.to_dict() for n in sorted(run.completions)],
        "seconds": [round(run.completions[n].usage.seconds, 6) for n in sorted(run.completions)],
    }
