"""From a body to its answer: what every endpoint does, whoever brings the bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jackfield.api
from jackfield.engine.engine import Engine
from jackfield.serving.asking import Asking
from jackfield.serving.chat import Chat
from jackfield.serving.completions import TextCompletion
from jackfield.serving.events import Wire, stream, typed_stream
from jackfield.serving.metrics import Metrics
from jackfield.serving.pool import Load, Pool
from jackfield.serving.responses import Conversation, Responding
from jackfield.serving.runs import Run
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.schema.common import Sampling
from jackfield.serving.schema.completions import CompletionRequest
from jackfield.serving.schema.responses import ResponsesRequest
from jackfield.serving.settings import ServerSettings
from jackfield.serving.store import Store

Answer = Chat | TextCompletion | Responding


class Answering:
    """What answers are made with: models, their settings, counters, and what is stored.

    The pool is to be entered in the event loop in which it is asked.
    """

    def __init__(self, settings: ServerSettings, load: Load = jackfield.api.load) -> None:
        self.settings = settings
        self.pool, self.metrics = Pool(settings, load), Metrics()
        self.store = Store(settings.stored_responses, settings.stored_bytes)


@dataclass(frozen=True)
class Endpoint:
    """What may be asked by POST at one path.

    `schema` is that of its bodies, whose field `prompt` has the prompt; `wire` makes events of the
    chunks of an answer. `begin` looks at what a body is about, and returns what answers it once
    there is an engine; both raise ApiError.
    """

    schema: type[Sampling]
    prompt: str
    wire: Wire
    begin: Callable[[Any, Asking, Store], Callable[[Engine], Answer]]


def _chat(body: ChatRequest, asking: Asking, _: Store) -> Callable[[Engine], Answer]:
    return lambda engine: Chat(body, asking, engine)


def _text(body: CompletionRequest, asking: Asking, _: Store) -> Callable[[Engine], Answer]:
    return lambda engine: TextCompletion(body, asking, engine)


def _response(body: ResponsesRequest, asking: Asking, store: Store) -> Callable[[Engine], Answer]:
    conversation = Conversation(body, store, asking.owner)
    return lambda engine: Responding(body, asking, engine, conversation, store)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(ChatRequest, "messages", stream, _chat),
    "/v1/completions": Endpoint(CompletionRequest, "prompt", stream, _text),
    "/v1/responses": Endpoint(ResponsesRequest, "input", typed_stream, _response),
}


class Exchange:
    """One body, and the answer to it. Close it, whatever happens; then nothing of it runs.

    `said` is told what was asked for and made, for a log. Raises ApiError where there is no such
    model, or the body is about what is not there.
    """

    def __init__(
        self, path: str, body: Sampling, asking: Asking, said: dict[str, Any], made: Answering
    ) -> None:
        self._endpoint = ENDPOINTS[path]
        prompt = self._endpoint.prompt
        said |= {"model": body.model, "user": body.user}
        if asking.settings.log_texts:
            said[prompt] = body.model_dump(mode="json")[prompt]
        served = made.pool[body.model]
        said["model"] = served.name  # which may have been asked for by its source
        self._begun = self._endpoint.begin(body, asking, made.store)
        self._samples = asking.settings.max_samples
        self.run = Run(served, made.metrics, body, prompt, said, asking.settings)

    async def start(self) -> Answer:
        """Have the engine begin; what answers. Raises ApiError."""
        engine = await self.run.open()
        answer = self._begun(engine)
        await self.run.start(engine, answer.prompts, answer.asked(), self._samples)
        return answer

    def events(self, answer: Answer) -> AsyncIterator[str]:
        """The answer as it goes over the wire while it is made."""
        return self._endpoint.wire(answer.chunks(self.run))

    async def close(self) -> None:
        await self.run.close()
