"""The engine: a model bound to a plan."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rich.console import Console
from rich.progress import track

from jackfield.contracts import Search
from jackfield.devices import input_device
from jackfield.engine.assistant import DraftModel
from jackfield.engine.bound import BoundModel, plug_all
from jackfield.engine.bounds import Bounds, shared
from jackfield.engine.checked import CheckedSchedule, checked
from jackfield.engine.completions import Completion, Delta
from jackfield.engine.decoder import Decoder
from jackfield.engine.loop import Loop
from jackfield.engine.observer import Observer
from jackfield.engine.report import Report
from jackfield.engine.requests import Reader, Request
from jackfield.engine.sequences import RunningGroup, RunningSequence
from jackfield.engine.statistics import Statistics
from jackfield.engine.streaming import check_streamer, tell
from jackfield.engine.worker import Health, Worker, drop, finish, linger_on
from jackfield.errors import (
    CacheFullError,
    JackfieldError,
    SettingsError,
    UsageError,
    quoted,
)
from jackfield.guarded import fault
from jackfield.planning.assistance import Assistance
from jackfield.planning.planning import Plan
from jackfield.planning.strategies import elsewhere, pick
from jackfield.registry.discovery import registry
from jackfield.requests import turns
from jackfield.requests.beam_settings import check_width
from jackfield.requests.honouring import Limits, refuse_unhonoured
from jackfield.requests.prompts import Prompt, is_batch, taken
from jackfield.requests.settings import resolve
from jackfield.requests.surroundings import refuse_autocast
from jackfield.requests.texts import Text, bridge
from jackfield.requests.turns import Turn
from jackfield.requests.wishes import Wishes, mapping, notice_selectors, wishes
from jackfield.sampling.structured import Structures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("jackfield")


def _one(prompt: Any, otherwise: str) -> Any:
    """The one prompt, also where it is the only row of a batch. Raises UsageError."""
    if not is_batch(prompt):
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
        bounds: Bounds,
        *,
        max_waiting: int | None = None,
        stall_after: float = 60.0,
        assistance: Assistance | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.tokenizer = tokenizer
        offered = (choice.backend.capabilities.settings for choice in plan.decodings.values())
        whose = model.name_or_path or type(model).__name__
        notice_selectors(model.generation_config, frozenset().union(*offered), whose)
        self._ids = itertools.count()
        self._text = Text(tokenizer, int(model.config.get_text_config(decoder=True).vocab_size))
        self._structures = Structures(tokenizer, self._text.vocab_size)
        # A backend that fails to bind must leave a live model as it was, so plugs come last.
        with contextlib.ExitStack() as failing:
            plugged = self._assemble(bounds, max_waiting, stall_after, assistance, failing)
            failing.pop_all()
        # Also for an engine that is dropped without being closed; must not refer to the engine.
        self._when_closed = plugged
        plugged.append(self._structures.close)
        self._finalizer = weakref.finalize(self, drop, self._worker, plugged)

    def _assemble(
        self,
        bounds: Bounds,
        max_waiting: int | None,
        stall_after: float,
        assistance: Assistance | None,
        failing: contextlib.ExitStack,
    ) -> list[Callable[[], None]]:
        """Bind everything, then plug it in. Returns what gives the models back.

        Leaving `failing` gives them back.
        """
        plan = self.plan
        room = shared(plan, bounds, assistance)
        bound = self._bound = BoundModel(self.model, plan, *room)
        scheduler = plan["scheduler"].registered
        schedule = CheckedSchedule(scheduler.bind(bound.context("scheduler")), str(scheduler))
        draft = None if assistance is None else self._assistant(assistance, bounds)
        self._loop = Loop(bound.forward, bound.cache, self._decoder(draft), schedule, bounds)
        plugged = plug_all([bound] if draft is None else [bound, draft.bound])
        for give_back in plugged:
            failing.callback(give_back)
        self._observer = Observer(plan, bound, self._loop, self._text, draft)
        self._worker = Worker(
            self._loop,
            self._observer.delta,
            max_waiting,
            stall_after,
            linger_on(input_device(self.model).type),
        )
        self._max_waiting = max_waiting
        return plugged

    @property
    def closed(self) -> bool:
        return self._worker.closed

    def when_closed(self, act: Callable[[], None]) -> None:
        """Have `act`, which must not refer to the engine, called after it was closed or dropped."""
        self._when_closed.append(act)

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
        if switch is not None and switch.use().state == "on":
            back.callback(self.enable_adapter)
        self._switch_adapter(on=False)
        return back

    def _switch_adapter(self, *, on: bool) -> None:
        self._worker.while_idle(lambda: self._bound.switch_adapter(on=on))

    def _assistant(self, assistance: Assistance, bounds: Bounds) -> DraftModel:
        bound = BoundModel(assistance.model, assistance.plan, *shared(assistance.plan, bounds))
        vocab_size = int(bound.model.config.get_text_config(decoder=True).vocab_size)
        other = Text(assistance.tokenizer, vocab_size)
        return DraftModel(bound, bridge(self._text, other))

    def _decoder(self, assistant: DraftModel | None) -> Decoder:
        """The strategies of the plan, bound and checked."""
        bound, drafting = {}, set()
        for name, choice in self.plan.decodings.items():
            context = replace(self._bound.context("decoding", choice), assistant=assistant)
            strategy = choice.registered.bind(context)
            if isinstance(strategy, Search) != choice.backend.capabilities.forks:
                what = f"bind returned {quoted(strategy)}, and only a Search declares forks=True"
                raise fault(choice.registered, what)
            bound[name] = checked(strategy, str(choice.registered), self._text.vocab_size)
            if choice.backend.capabilities.rollback:
                drafting.add(name)
        return Decoder(bound, frozenset(drafting), self._structures)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
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
        `presence_penalty`, `frequency_penalty`, `logits_processor`, `decoding` (one of those that
        the engine was loaded with), `priority`, `deadline` (in seconds), `cache_salt`. Sampling is
        on when `do_sample`, `temperature`, `top_k`, `top_p` or `min_p` asks for it. The
        `num_return_sequences` completions of a prompt stand together. `progress` shows a bar on
        standard error. A `streamer` of transformers is put the prompt and each token, for one text.
        Raises SettingsError or PromptError before anything is computed.
        """
        found: Any = taken(prompts, common)
        batch: Sequence[Any] = found if is_batch(found) else [found]
        if settings is not None and len(settings) != len(batch):
            raise SettingsError(f"{len(settings)} settings for {len(batch)} prompts; give one each")
        if not batch:  # settings that are wrong are so for no prompt, too
            self._check_open()
            _, wished, _, limits = self._wished(common)
            resolve(wished, 1, limits)
        own = settings or [{}] * len(batch)
        streams = streamer is not None
        sequences = [
            sequence
            for number, (prompt, mine) in enumerate(zip(batch, own, strict=True))
            for sequence in self._sequences(
                prompt, {**common, **mapping(mine)}, number, streams=streams
            )
        ]
        if streams:
            check_streamer(streamer, len(sequences))
        pairs = [(s, Request(s.id, self._worker.cancel, streams=streams)) for s in sequences]
        try:
            size = max(1, self._max_waiting or len(pairs))
            for start in range(0, len(pairs), size):
                self._hand_over(pairs[start : start + size], wait=True)
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
        prompt = _one(
            taken(prompt, settings), "submit takes one prompt; call it once for each prompt"
        )
        return self._start(self._sequence(prompt, settings, streams=True))

    def stream(self, prompt: Prompt | None = None, **settings: Any) -> Iterator[Delta]:
        """Complete one prompt; yields a `Delta` per step, the last one with the completion.

        The request is checked at once and starts with the first `next`; closing the iterator
        cancels it.
        """
        prompt = _one(
            taken(prompt, settings), "stream takes one prompt; use generate for a list of prompts"
        )
        return self._stream(self._sequence(prompt, settings, streams=True))

    def _stream(self, sequence: RunningSequence) -> Iterator[Delta]:
        request = self._start(sequence)
        try:
            yield from request
        finally:
            request.cancel()

    def astream(self, prompt: Prompt | None = None, **settings: Any) -> AsyncIterator[Delta]:
        """`stream` for an event loop: the same, to be read with ``async for``."""
        prompt = _one(
            taken(prompt, settings), "astream takes one prompt; call it once for each prompt"
        )
        return self._astream(self._sequence(prompt, settings, streams=True))

    async def _astream(self, sequence: RunningSequence) -> AsyncIterator[Delta]:
        request = self._start(sequence)
        reader = Reader(request)  # where the loop is closed, nobody runs this function to its end
        try:
            async for delta in request:
                yield delta
        finally:
            reader.leave()

    def cancel(self, request: Request) -> None:
        """End a request; its completion has what there was. Nothing happens to one that ended."""
        request.cancel()

    def _start(self, sequence: RunningSequence) -> Request:
        sequence.started = time.perf_counter()
        request = Request(sequence.id, self._worker.cancel, streams=True, engine=self)
        self._hand_over([(sequence, request)], wait=False)
        return request

    def _hand_over(self, pairs: Sequence[tuple[RunningSequence, Request]], *, wait: bool) -> None:
        before = self.report()
        for sequence, _ in pairs:
            sequence.report_before = before
        self._worker.submit(pairs, wait=wait)

    def _sequence(self, prompt: Any, asked: Mapping[str, Any], *, streams: bool) -> RunningSequence:
        """The one sequence of a request that has its own reader."""
        sequences = self._sequences(prompt, asked, streams=streams)
        if len(sequences) > 1:
            raise SettingsError(
                f"num_return_sequences={len(sequences)} has no single reader; use generate, or "
                "submit the prompt that many times"
            )
        return sequences[0]

    def _wished(self, asked: Mapping[str, Any]) -> tuple[Turn, Wishes, str, Limits]:
        """What is asked of a chat's turn and for the rest, by which decoding, within what."""
        turn, asked = turns.taken(asked)
        wished = wishes(asked, self.model.generation_config)
        decoding = pick(self.plan, wished)
        return turn, wished, decoding, self._limits(decoding)

    def _sequences(
        self, prompt: Any, asked: Mapping[str, Any], number: int = 0, *, streams: bool
    ) -> list[RunningSequence]:
        """The sequences of a request, checked; the first one reads the prompt for all."""
        self._check_open()
        self._bound.check_unchanged()
        refuse_autocast(input_device(self.model).type)
        turn, wished, decoding, limits = self._wished(asked)
        if prompt is None:  # maybe as it was given under a name that is answered
            refuse_unhonoured(wished, limits)
        ids = self._text.encode(prompt, self.plan.requirements.context_length, turn)
        settings = resolve(wished, len(ids), limits, number)
        if "decoding" in wished.given and (
            reason := self._loop.decoding.strategies[decoding].refuse(len(ids))
        ):
            raise SettingsError(f"decoding={decoding!r}: {reason}")
        width = self._loop.decoding.width(settings)
        copies = () if width is None else (width,)
        if width is not None:
            places = self._loop.bounds.max_batch_size
            check_width(width, settings.num_return_sequences, self._text.vocab_size, places)
        if reason := self._loop.cache.refuse(len(ids), settings.max_new_tokens, *copies):
            raise CacheFullError(f"{self.plan['cache'].registered.name}: {reason}")
        made: list[RunningSequence] = []
        for sample in range(width or settings.num_return_sequences):
            detokenizer = None
            if self.tokenizer is not None and (streams or settings.stop_strings):
                detokenizer = self._text.detokenizer(settings.stop_strings)
            leader = made[0] if made and width is None else None
            running = RunningSequence(
                next(self._ids), ids, settings, detokenizer, leader=leader, sample=sample
            )
            running.constraint = self._structures.start(settings.structure, settings.eos_token_ids)
            made.append(running)
        return made if width is None else RunningGroup(made, settings.num_return_sequences).outputs

    def _limits(self, decoding: str) -> Limits:
        return Limits(
            vocab_size=self._text.vocab_size,
            context_length=self.plan.requirements.context_length,
            honoured=self.plan.decodings[decoding].backend.capabilities.settings,
            decoding=decoding,
            has_tokenizer=self.tokenizer is not None,
            elsewhere=partial(elsewhere, registry(), self.plan),
        )

    def explain(self) -> str:
        """The plan in words: what was chosen, what was passed over, and why."""
        told = {"attention runs on": self._bound.port.source, "weights:": self._bound.stored}
        found = [f"  {what} {source}" for what, source in told.items() if source]
        return "\n".join([str(self.plan), *found])

    def report(self) -> Report:
        """What was observed to run since the engine was made."""
        return self._observer.report()

    def statistics(self) -> Statistics:
        """What the engine has done and is doing; also logged (`jackfield.statistics`, INFO)."""
        return self._worker.statistics()

    def health(self) -> Health:
        """Whether it is alive, takes requests, and gets on."""
        return self._worker.health()

    def close(self) -> None:
        """End every request, wait for the step that runs, give the model back as it was.

        A second call does nothing. Raises ExecutionError where the step hangs
        (`worker.CLOSE_WITHIN` seconds), which says in what, and what plugins raise; all else is
        given back all the same.
        """
        if self._finalizer.detach() is not None:
            finish(self._worker, self._when_closed)

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("the engine is closed; load the model again")

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
