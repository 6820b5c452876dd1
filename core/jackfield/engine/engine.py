"""The engine: a model bound to a plan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rich.console import Console
from rich.progress import track

from jackfield.bridge.adapter import Adapter
from jackfield.bridge.image_reader import ImageReader
from jackfield.bridge.lora import check_name, find_lora
from jackfield.bridge.sounds import SoundReader
from jackfield.engine.adapters import Adapters
from jackfield.engine.assembly import assemble
from jackfield.engine.batch_limits import BatchLimits
from jackfield.engine.closing import drop, finish
from jackfield.engine.completions import Completion, Delta
from jackfield.engine.health import Health
from jackfield.engine.intake import Intake
from jackfield.engine.reading import Assistance
from jackfield.engine.report import Report
from jackfield.engine.requests import Reader, Request
from jackfield.engine.sequences import RunningSequence
from jackfield.engine.statistics import Statistics
from jackfield.engine.streaming import check_streamer, tell
from jackfield.engine.threads import give_back_threads
from jackfield.engine.tracing import Tracing
from jackfield.errors import (
    JackfieldError,
    SettingsError,
    UsageError,
)
from jackfield.parallel.ranks import Leader
from jackfield.planning.beside import Beside
from jackfield.planning.planning import Plan
from jackfield.requests.other_engines import no_attribute
from jackfield.requests.prompts import Prompt, is_batch, taken
from jackfield.requests.wishes import mapping, refuse_unnamed
from jackfield.tracing.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.parsing.formats import Format

logger = logging.getLogger("jackfield")


def _one(prompt: Any, otherwise: str) -> Any:
    """The one prompt, also where it is the only row of a batch. Raises UsageError.

    An empty list is no batch here but an empty prompt, which is refused where it is encoded.
    """
    if not is_batch(prompt) or len(prompt) == 0:
        return prompt
    if len(prompt) != 1:
        raise UsageError(otherwise)
    return prompt[0]


class Engine:
    """A model bound to a plan; it owns the loop. A context manager: leaving it gives all back.

    Requests may come from any number of threads and event loops; they run together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        tokenizer: Any | None,
        limits: BatchLimits,
        *,
        max_waiting: int | None = None,
        stall_after: float = 60.0,
        verify: int = 0,
        assistance: Assistance | None = None,
        heads: Any = None,
        leader: Leader | None = None,
        free: int | None = None,
        beside: Beside | None = None,
        images: ImageReader | str | None = None,
        sounds: SoundReader | str | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.tokenizer = tokenizer
        made = assemble(
            model,
            plan,
            tokenizer,
            limits,
            max_waiting=max_waiting,
            stall_after=stall_after,
            verify=verify,
            assistance=assistance,
            heads=heads,
            leader=leader,
            free=free,
            beside=beside,
            images=images,
            sounds=sounds,
        )
        self._assembly, self._restore = made, made.restore
        self._bound, self._loop, self._worker = made.bound, made.loop, made.worker
        self._max_waiting = max_waiting
        # Also for an engine that is dropped without being closed; must not refer to the engine.
        self._finalizer = weakref.finalize(self, drop, made.worker, made.restore)
        self._intake = Intake(made)
        self._one_trace = threading.Lock()
        give_back_threads()  # of what was computed to load

    @property
    def closed(self) -> bool:
        return self._worker.closed

    def when_closed(self, act: Callable[[], None]) -> None:
        """Have `act`, which must not refer to the engine, called after it was closed or dropped."""
        self._restore.append(act)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that a request may name; none where it was loaded without `adapters`."""
        held = self._bound.adapters
        return {} if held is None else held.named

    def load_adapter(self, name: str, location: str | Path) -> None:
        """Have requests name one adapter more, a LoRA in a folder or on the hub.

        Requests that run go on meanwhile. Raises UsageError for a name that is taken, where as many
        are held as may be, and without `adapters`; CheckpointError for files that do not fit.
        """
        held = self._held_adapters("load_adapter")
        check_name(name)
        held.add(name, find_lora(self.model.config, location))

    def unload_adapter(self, name: str) -> None:
        """Have no new request name an adapter; those that run with it end with it.

        Its memory is given back by the first step behind the last of these. Raises UsageError where
        there is none.
        """
        self._held_adapters("unload_adapter").remove(name)

    def _held_adapters(self, what: str) -> Adapters:
        self._check_open()
        held = self._bound.adapters
        if held is None or held.use() is not None:
            raise UsageError(
                f"{what} needs an engine for several adapters: load it with adapters={{}}"
            )
        if (size := self.plan.requirements.tp_size) > 1:
            raise UsageError(
                f"{what}: the {size} processes that share this model have the adapters that it was "
                "loaded with; load it with other adapters"
            )
        return held

    def enable_adapter(self) -> None:
        """Run with the adapter again. Raises UsageError while requests are open."""
        self._switch_adapter(on=True)

    def disable_adapter(self) -> contextlib.AbstractContextManager[Any]:
        """Run without the adapter, from now on, or within ``with engine.disable_adapter():``.

        Raises UsageError while requests are open, also where the ``with`` ends.

        A request runs with it or without it from its first token to its last, and nothing that was
        cached with it is read without it. An adapter that is merged cannot be switched.
        """
        back, switch = contextlib.ExitStack(), self._bound.adapter
        if switch is not None and (now := switch.use()) is not None and now.state == "on":
            back.callback(self.enable_adapter)
        self._switch_adapter(on=False)
        return back

    def _switch_adapter(self, *, on: bool) -> None:
        self._worker.while_idle(lambda: self._bound.switch_adapter(on=on))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *unnamed: Any,
        settings: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = False,
        streamer: Any = None,
        **common: Any,
    ) -> list[Completion]:
        """Complete every prompt; results in the order of the prompts.

        Prompts may also be what a tokenizer returns, as one argument or as `input_ids` and
        `attention_mask`: tensors or lists, with a row for each prompt, padded at the left.
        `common` settings hold for all prompts, `settings[i]` overrides them for prompt i. They
        are transformers' `GenerationConfig` fields, and `seed`, `stop`, `logprobs`,
        `presence_penalty`, `frequency_penalty`, `logits_processor`, `decoding` and `adapter` (of
        those that the engine was loaded with), `priority`, `deadline` (in seconds), `cache_salt`.
        Sampling is on when `do_sample`, `temperature`, or what narrows the choice asks for it
        (`top_k`, `top_p`, `min_p`, `top_h`, `typical_p`, `epsilon_cutoff`, `eta_cutoff`). The
        `num_return_sequences` completions of a prompt stand together. `progress` shows a bar on
        standard error. A `streamer` of transformers is put the prompt and each token, for one text.
        Raises SettingsError or PromptError before anything is computed.
        """
        called = time.perf_counter()
        refuse_unnamed(unnamed)
        found: Any = taken(prompts, common, self._intake.reads)
        batch: Sequence[Any] = found if is_batch(found) else [found]
        if settings is not None and len(settings) != len(batch):
            raise SettingsError(f"{len(settings)} settings for {len(batch)} prompts; give one each")
        self._check_open()
        if not batch:  # settings that are wrong are so for no prompt, too
            self._intake.check(common)
        own = settings or [{}] * len(batch)
        streams = streamer is not None
        sequences = [
            sequence
            for number, (prompt, mine) in enumerate(zip(batch, own, strict=True))
            for sequence in self._intake.sequences(
                prompt, {**common, **mapping(mine)}, number, streams=streams
            )
        ]
        for sequence in sequences:
            sequence.called = called
        if streams:
            check_streamer(streamer, len(sequences))
        pairs = [(s, Request(s.id, self._worker.cancel, streams=streams)) for s in sequences]
        try:
            size = max(1, self._max_waiting or len(pairs))
            for start in range(0, len(pairs), size):
                self._worker.submit(pairs[start : start + size], wait=True)
            if streams:
                return [tell(streamer, *pairs[0])]
            watched: Iterable[tuple[RunningSequence, Request]] = pairs
            if progress:
                watched = track(pairs, "Generating", console=Console(stderr=True))
            return [request.result() for _, request in watched]
        finally:
            for _, request in pairs:
                request.cancel()

    def submit(self, prompt: Prompt | None = None, **settings: Any) -> Request:
        """Start one request and return at once; the result is waited for on what is returned.

        Raises SettingsError or PromptError, QueueFullError where `max_waiting` requests wait.
        """
        called = time.perf_counter()
        prompt = _one(
            taken(prompt, settings, self._intake.reads),
            "submit takes one prompt; call it once for each prompt",
        )
        return self._start(self._sequence(prompt, settings, self._worker.check_room), called)

    def submit_samples(
        self,
        prompt: Prompt | None = None,
        *,
        before_image: Callable[[], None] | None = None,
        since: float | None = None,
        **settings: Any,
    ) -> list[Request]:
        """`submit` for `num_return_sequences` texts of one prompt, a request for each.

        The first one reads the prompt for all, where a cache finds prompts. `before_image` is
        called before each image of a chat is opened, and may raise where nobody waits any more.
        Their `deadline` counts from `since`, of `time.perf_counter`; None: from now. Raises what
        `before_image` and `submit` raise; all start, or none.
        """
        called = time.perf_counter() if since is None else since

        def look() -> None:
            self._worker.check_room()
            if before_image is not None:
                before_image()

        prompt = _one(
            taken(prompt, settings, self._intake.reads),
            "submit_samples takes one prompt; call it once for each prompt",
        )
        self._check_open()
        return self._start_all(
            self._intake.sequences(prompt, settings, streams=True, before_image=look), called
        )

    def stream(self, prompt: Prompt | None = None, **settings: Any) -> Iterator[Delta]:
        """Complete one prompt; yields a `Delta` per step, the last one with the completion.

        The request is checked at once and starts with the first `next`; closing the iterator
        cancels it.
        """
        prompt = _one(
            taken(prompt, settings, self._intake.reads),
            "stream takes one prompt; use generate for a list of prompts",
        )
        return self._stream(self._sequence(prompt, settings))

    def _stream(self, sequence: RunningSequence) -> Iterator[Delta]:
        request = self._start(sequence, time.perf_counter())
        try:
            yield from request
        finally:
            request.cancel()

    async def asubmit(self, prompt: Prompt | None = None, **settings: Any) -> Request:
        """`submit` for an event loop, which goes on while the prompt is read in another thread."""
        called = time.perf_counter()
        return self._start(await self._aside(prompt, settings), called)

    async def astream(self, prompt: Prompt | None = None, **settings: Any) -> AsyncIterator[Delta]:
        """`stream` for an event loop, to be read with ``async for``, which begins by reading the
        prompt in another thread: what `stream` raises is raised there.
        """
        called = time.perf_counter()
        request = self._start(await self._aside(prompt, settings), called)
        reader = Reader(request)  # where the loop is closed, nobody runs this function to its end
        try:
            async for delta in request:
                yield delta
        finally:
            reader.leave()

    async def _aside(self, prompt: Any, settings: dict[str, Any]) -> RunningSequence:
        """The sequence of a request, made in another thread than the one that awaits it."""
        self._intake.check_surroundings()  # of this thread
        left = threading.Event()

        def look() -> None:
            self._worker.check_room()
            if left.is_set():
                raise UsageError("nobody waits for this request any more")

        def read() -> RunningSequence:
            one = _one(
                taken(prompt, settings, self._intake.reads),
                "this takes one prompt; call it once for each",
            )
            try:
                return self._sequence(one, settings, look)
            finally:
                give_back_threads()  # of what read an image; another thread submits

        try:
            return await asyncio.to_thread(read)
        finally:
            left.set()

    def cancel(self, request: Request) -> None:
        """End a request; its completion has what there was. Nothing happens to one that ended."""
        request.cancel()

    def _sequence(
        self,
        prompt: Any,
        settings: Mapping[str, Any],
        before_image: Callable[[], None] | None = None,
    ) -> RunningSequence:
        self._check_open()
        return self._intake.sequence(prompt, settings, before_image=before_image)

    def _start(self, sequence: RunningSequence, called: float) -> Request:
        return self._start_all([sequence], called)[0]

    def _start_all(self, sequences: Sequence[RunningSequence], called: float) -> list[Request]:
        pairs = []
        for sequence in sequences:
            sequence.called, sequence.started = called, time.perf_counter()
            request = Request(sequence.id, self._worker.cancel, streams=True, engine=self)
            pairs.append((sequence, request))
        self._worker.submit(pairs, wait=False)
        return [request for _, request in pairs]

    def count_tokens(self, prompt: Prompt, **settings: Any) -> int:
        """How many tokens a prompt has, as a request of these settings reads it; nothing runs.

        Raises what `submit` raises for the prompt and the settings.
        """
        prompt = _one(taken(prompt, settings, self._intake.reads), "count_tokens takes one prompt")
        return self._sequence(prompt, settings).num_prompt_tokens

    @property
    def chat_format(self) -> Format:
        """How the model writes thoughts and calls of tools; looked for at the first call."""
        return self._intake.turns.form

    def token_bytes(self, token: int) -> bytes:
        """The text of one token as UTF-8; of a part of a character only its bytes."""
        return self._assembly.text.bytes_of(token)

    def explain(self) -> str:
        """The plan in words: what was chosen, what was passed over, and why."""
        sources = {
            "attention runs on": self._bound.attention.source,
            "weights:": self._bound.stored,
        }
        found = [f"  {what} {source}" for what, source in sources.items() if source]
        return "\n".join([str(self.plan), *found])

    def report(self) -> Report:
        """What was observed to run since the engine was made."""
        return self._assembly.observer.report()

    def statistics(self) -> Statistics:
        """What the engine has done and is doing; also logged (`jackfield.statistics`, INFO)."""
        return self._worker.statistics()

    def health(self) -> Health:
        """Whether it is alive, takes requests, and gets on."""
        return self._worker.health()

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Find out where the time of requests goes: ``with engine.trace() as trace:``.

        What was found is in `trace` behind the ``with``: print it, or `save` it. It begins and ends
        between two steps, while requests run or not. Of a long one the latest 200,000 spans are
        kept. Raises UsageError while another trace of this engine goes on.
        """
        if not self._one_trace.acquire(blocking=False):
            raise UsageError("a trace of this engine goes on already; end that one first")
        try:
            yield from Tracing(self._assembly, self._intake).run()
        finally:
            self._one_trace.release()

    def compile_ahead(self, *, prompts: bool = False) -> list[int]:
        """Compile decode steps of all sizes up to `max_batch_size`, before a request waits for one.

        With `prompts` also steps that read prompts, of as many tokens as the compiler takes them
        in (`native`: 128 in bfloat16, else 64). Returns the sizes, in tokens; none where nothing is
        compiled, or only when a step comes (all compilers but `native`). Steps with drafts are
        compiled when they first come. Raises ExecutionError where the model cannot be compiled,
        UsageError while requests are open.
        """
        sizes: list[int] = []
        most = self._loop.limits.max_batch_size
        ahead = partial(self._bound.compile_ahead, most, prompts=prompts)
        self._worker.while_idle(lambda: sizes.extend(ahead()))
        return sizes

    def close(self) -> None:
        """End every request, wait for the step that runs, give the model back as it was.

        A second call does nothing. Raises ExecutionError where the step hangs
        (`closing.CLOSE_WITHIN` seconds), which says in what, and what plugins raise; all else is
        given back all the same.
        """
        if self._finalizer.detach() is not None:
            finish(self._worker, self._restore)

    def _check_open(self) -> None:
        self._worker.check_open()

    if not TYPE_CHECKING:  # who checks types is told by that

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that failed: its own error
                return object.__getattribute__(self, name)
            raise no_attribute("'Engine' object", name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError("an engine runs a model and cannot be copied; load another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except JackfieldError as late:
            if error is None:
                raise
            logger.error("closing the engine failed as well: %s", late)  # `error` goes on
