"""``POST /v1/completions``: a text goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from jackfield.engine.completions import Delta
from jackfield.engine.engine import Engine
from jackfield.serving.asking import Asking
from jackfield.serving.chat import around, reports
from jackfield.serving.logprobs import of_text
from jackfield.serving.runs import Run
from jackfield.serving.schema.common import as_json
from jackfield.serving.schema.completions import CompletionRequest


class TextCompletion:
    """The answer to one body, in chunks or whole: the whole is folded from the same chunks."""

    def __init__(self, body: CompletionRequest, asking: Asking, engine: Engine) -> None:
        self.body = body
        self._engine = engine
        self._id = f"cmpl-{asking.id}"
        self._created = asking.now()
        self._asked = asking.completed(body.asked())
        self.include_usage = body.include_usage
        self._offsets: dict[int, int] = {}

    @property
    def prompts(self) -> list[Any]:
        return self.body.prompts

    def asked(self) -> dict[str, Any]:
        return self._asked

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id, "object": "text_completion", "created": self._created,
            "model": self.body.model,
        }  # fmt: skip

    async def chunks(self, run: Run) -> AsyncIterator[str]:
        """``text_completion`` objects, as JSON."""
        usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        with_choice = around(self._head, usage)
        async for choice in self._choices(run):
            yield with_choice(choice)
        if self.body.include_report:
            yield as_json({**self._head, "choices": [], "jackfield": reports(run), **usage})
        if self.include_usage:
            yield as_json({**self._head, "choices": [], "usage": run.usage()})

    async def _choices(self, run: Run) -> AsyncIterator[dict[str, Any]]:
        if self.body.echo:
            for number in range(len(self.prompts) * self.body.samples):
                yield _choice(number, self._echoed(number // self.body.samples))
        if self.body.max_tokens == 0:
            for number in range(len(self.prompts) * self.body.samples):
                yield _choice(number, "", finish_reason="length")
            return
        run.merges = True
        async for number, delta in run:
            logprobs = self._logprobs(number, delta)
            if delta.text or logprobs or delta.finish_reason:
                yield _choice(number, delta.text, logprobs, delta.finish_reason)

    def _echoed(self, number: int) -> str:
        prompt = self.prompts[number]
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self._engine.token_bytes, prompt)).decode(errors="replace")

    def _logprobs(self, number: int, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        found = of_text(self._engine, delta.logprobs, self._offsets.get(number, 0))
        self._offsets[number] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found

    async def whole(self, run: Run) -> dict[str, Any]:
        """The ``text_completion`` object."""
        count = len(self.prompts) * self.body.samples
        choices = [_choice(number, "") for number in range(count)]
        async for piece in self._choices(run):
            choice = choices[piece["index"]]
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"]:
                own = choice["logprobs"] = choice["logprobs"] or {k: [] for k in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    own[name] += values
        found = {**self._head, "choices": choices, "usage": run.usage()}
        return found | ({"jackfield": reports(run)} if self.body.include_report else {})


def _choice(
    number: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason,
    }  # fmt: skip
