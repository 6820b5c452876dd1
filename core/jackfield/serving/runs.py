"""The requests of one body while they run: started together, read as one, gone when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jackfield.bridge.image_parts import has_images
from jackfield.engine.completions import Completion, Delta
from jackfield.engine.engine import Engine
from jackfield.engine.requests import Request
from jackfield.serving.errors import ApiError, as_api_error, broken, of_text, refused
from jackfield.serving.metrics import Metrics
from jackfield.serving.pool import Served
from jackfield.serving.schema.common import Sampling
from jackfield.serving.settings import ServerSettings

logger = logging.getLogger("jackfield.serving")

#: Prompts are encoded, templates rendered and schemas compiled in these, beside the event loop.
READERS = ThreadPoolExecutor(4, thread_name_prefix="jackfield-read")
#: Chats with images are read in these, for seconds each, so that no text is behind them.
IMAGE_READERS = ThreadPoolExecutor(2, thread_name_prefix="jackfield-see")


class Run:
    """Texts that an engine makes for one body. Close it, whatever happens; then nothing is left.

    `prompt` is the field of `body` with the prompt (`as_api_error`). At its end `said` is
    told what was made, with `log_texts` also the texts. What comes of a text is looked at every
    `stream_interval` seconds, the first and the last at once; `merges`: as one delta.
    """

    def __init__(
        self,
        served: Served,
        metrics: Metrics,
        body: Sampling,
        prompt: str,
        said: dict[str, Any],
        settings: ServerSettings,
    ) -> None:
        self._served, self._counted = served, metrics.tokens_of(served.name)
        self._last: dict[int, float] = {}  # when something came of each text
        self._names, self._prompt = body.names, prompt
        self._given = body.model_fields_set
        self._said, self._texts = said, settings.log_texts
        self._interval = settings.stream_interval
        self._stack = contextlib.AsyncExitStack()
        self._requests: list[Request] = []
        self._readers: list[asyncio.Task[None]] = []
        self._engine: Engine | None = None
        self._read = 0  # tokens of prompts that are read and not gone on with
        self._closed = False
        self.completions: dict[int, Completion] = {}
        self.began = time.perf_counter()
        self.prompts = 1  # how many there are
        self.merges = False

    async def open(self) -> Engine:
        """The engine, which stays until this is closed. Raises ApiError."""
        self._engine = await self._stack.enter_async_context(self._served.lease())
        return self._engine

    async def start(
        self, engine: Engine, prompts: Sequence[Any], asked: Mapping[str, Any], limit: int
    ) -> None:
        """Start the texts of all prompts, or none. Raises ApiError."""
        self.prompts = len(prompts)
        count = len(prompts) * asked.get("num_return_sequences", 1)
        if count > limit:
            field = "prompt" if len(prompts) > 1 else "n"
            raise refused(f"{count} texts are asked for; at most {limit} run for a request", field)
        at = 0  # which of the prompts is read
        began = time.perf_counter()
        ends = began + (asked.get("deadline") or math.inf)

        def look() -> None:
            if self._closed:
                raise ApiError(503, "nobody waits for it any more")
            if time.perf_counter() > ends:
                why = f"its deadline of {asked['deadline']:g} s passed while it was read"
                raise ApiError(504, why, code="deadline")

        def submit() -> None:
            nonlocal at
            for at in range(len(prompts)):
                look()
                if asked.get("max_new_tokens") == 0:  # the prompts alone are asked for
                    one = {**asked, "max_new_tokens": 1, "num_return_sequences": 1}
                    self._read += engine.count_tokens(prompts[at], **one)
                else:
                    self._requests += engine.submit_samples(
                        prompts[at], before_image=look, since=began, **asked
                    )
            if self._closed:  # while this thread was busy with what nobody waits for any more
                self._cancel()

        threads = IMAGE_READERS if any(map(has_images, prompts)) else READERS
        try:
            await asyncio.get_running_loop().run_in_executor(threads, submit)
        except ApiError:
            raise
        except Exception as error:
            model, names = self._served.name, self._names
            found = as_api_error(self._cause(error), model, names, self._prompt)
            if len(prompts) > 1 and found.param == self._prompt:
                which = f"{self._prompt}.{at}"
                found = refused(f"{which}: {found.message}", which, found.code)
            raise self._logged(found) from error

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """(number of the text, what came of it), as it comes. Raises ApiError."""
        try:
            if len(self._requests) == 1:
                async for delta in self._deltas(self._requests[0]):
                    yield 0, self._seen(0, delta)
                return
            async for number, delta in self._merged():
                yield number, self._seen(number, delta)
        except ApiError:
            raise
        except Exception as error:  # in a step, which is not of this request alone
            raise self._logged(broken(self._cause(error), self._served.name)) from error

    def _deltas(self, request: Request) -> AsyncIterator[Delta]:
        return request.paced(self._interval, merged=self.merges)

    async def _merged(self) -> AsyncIterator[tuple[int, Delta]]:
        queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(2 * len(self._requests))

        async def read(number: int, request: Request) -> None:
            try:
                async for delta in self._deltas(request):
                    await queue.put((number, delta))
            except Exception as error:  # noqa: BLE001 - raised where the queue is read
                await queue.put((number, error))

        self._readers = [asyncio.create_task(read(n, r)) for n, r in enumerate(self._requests)]
        left = len(self._readers)
        while left:
            number, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            left -= found.completion is not None
            yield number, found

    def _seen(self, number: int, delta: Delta) -> Delta:
        if delta.token_ids:
            now = time.perf_counter()
            if not self._last:
                self._said["first_token"] = round(now - self.began, 4)
            self._counted.came(len(delta.token_ids), now, self._last.get(number), self.began)
            self._last[number] = now
        if (completion := delta.completion) is not None:
            self.completions[number] = completion
            if completion.finish_reason == "error":
                why = completion.error or "the text cannot be made"
                raise self._logged(of_text(why, self._served.name, self._names, self._given))
            if completion.finish_reason == "cancelled" and completion.error is not None:
                raise ApiError(504, completion.error, code="deadline")
        return delta

    def _cause(self, error: BaseException) -> BaseException:
        return error if self._engine is None else self._served.cause(self._engine, error)

    def _logged(self, error: ApiError) -> ApiError:
        if error.status >= 500:
            logger.error("%s", error.message)
        return error

    def usage(self) -> dict[str, Any]:
        """Tokens of all texts that have ended; each prompt counts once."""
        done = [self.completions[n] for n in sorted(self.completions)]
        per_prompt = max(1, len(self._requests) // max(1, self.prompts))
        firsts = [c.usage for c in done[::per_prompt]]
        prompt = self._read + sum(usage.prompt_tokens for usage in firsts)
        found = sum(usage.cached_tokens for usage in firsts)
        made = sum(c.usage.completion_tokens for c in done)
        return {
            "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": found},
        }  # fmt: skip

    def cancel(self, number: int) -> None:
        """End one text; what it has comes as its last piece."""
        self._requests[number].cancel()

    async def close(self) -> None:
        """Cancel what runs and give the engine back; a second call does nothing."""
        self._closed = True
        self._cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self._stack.aclose()
        self._said["usage"] = self.usage()
        ended = [self.completions[n].finish_reason for n in sorted(self.completions)]
        self._said["finish"] = ended
        if self._texts:
            self._said["texts"] = [self.completions[n].text for n in sorted(self.completions)]

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()
