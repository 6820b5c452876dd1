"""A trace of an engine: hooks that are put in when it begins and taken out when it ends.

Without a trace nothing of this is there: no call asks whether one goes on. What is hooked are
attributes of the engine's own objects, private ones among them, and never what the model consists
of but kernels in the place of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.engine.assembly import Assembly
from jackfield.engine.encoded import EncodedCache
from jackfield.engine.step_features import StepFeatures
from jackfield.engine.traced_requests import follow, handing_out
from jackfield.errors import JackfieldError
from jackfield.tracing import accounts as kinds
from jackfield.tracing.accounts import Record, outer_first
from jackfield.tracing.device import device_of
from jackfield.tracing.hooks import Hooks
from jackfield.tracing.lives import Lives
from jackfield.tracing.recorder import Fed, Recorder, Span, Work
from jackfield.tracing.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.contracts import ModelInputs
    from jackfield.engine.intake import Intake
    from jackfield.engine.steps import Event, RunningStep
    from jackfield.registry.backends import Registered

_STEP = Work(kinds.STEP, "step")
_BETWEEN = Work(kinds.BETWEEN, "between steps")
#: Where a call's arguments have its layer.
_first, _third = itemgetter(0), itemgetter(2)


class Tracing:
    """One trace of an engine. Knows the engine's parts and not the engine, which may be dropped."""

    def __init__(self, assembly: Assembly, intake: Intake) -> None:
        self._worker, self._loop = assembly.worker, assembly.loop
        self._bound, self._observer = assembly.bound, assembly.observer
        self._structures, self._intake = assembly.structures, intake
        self._plan = assembly.bound.plan
        self._device, self._notes = device_of(assembly.bound.model)
        self._recorder = Recorder(None if self._device is None else self._device.stamp)
        self._lives, self._hooks = Lives(), Hooks()
        self._fed: Fed | None = None  # to the step that goes on
        self._overlaps = False  # of the engine, while nobody traces it
        self._began = self._ended = 0

    def run(self) -> Iterator[Trace]:
        """Yield the trace while it goes on."""
        trace = Trace()
        try:
            self._worker.between_steps(self.begin)
        except BaseException:
            self._leave()
            raise
        try:
            yield trace
        finally:
            self._leave()
            trace.end(self._record())

    def _leave(self) -> None:
        try:
            self._worker.between_steps(self.end)
        except JackfieldError:  # the engine is closed, and takes no step any more
            self.end()
        except BaseException:
            self.end()
            raise

    def begin(self) -> None:
        """Put the hooks in. Called between two steps."""
        self._began = self._recorder.clock()
        follow(self._loop, self._lives, self._hooks, self._recorder.clock)
        self._hook_loop()
        self._hook_cache()
        self._hook_decoding()
        self._hook_model()
        self._hook_worker()

    def end(self) -> None:
        """Take them out. A second call does nothing."""
        if self._ended:
            return
        try:
            self._hooks.remove()
            if self._device is not None:
                self._device.end()
        finally:
            self._ended = self._recorder.clock()
            self._requests = self._lives.told(self._ended)

    def _time(
        self,
        owner: Any,
        name: str,
        work: Work,
        detail: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> None:
        self._hooks.wrap(owner, name, lambda call: self._recorder.timed(call, work, detail))

    def _hook_loop(self) -> None:
        loop = self._loop
        # Else a step has parts of two in it.
        self._overlaps = loop.overlaps
        self._hooks.wrap(loop, "overlaps", lambda _: False)
        self._hooks.wrap(loop, "step", self._step)
        for name, said in (("_admit", "who enters"), ("_fitting", "who feeds how many tokens")):
            self._time(loop, name, Work(kinds.SCHEDULING, said))
        scheduler = _who(self._plan["scheduler"].registered)
        self._time(loop.scheduler, "schedule", Work(kinds.SCHEDULING, "scheduler", scheduler))
        self._hooks.wrap(loop, "forward", self._forward)
        if loop.verifying is not None:
            self._time(loop, "verifying", Work(kinds.VERIFYING, "verifying"))
        self._time(loop, "_emit", Work(kinds.EMITTING, "taking tokens"))
        self._time(loop, "_take", Work(kinds.TEXT, "text of a step"), lambda args: args[0].id)

    def _step(self, step: Callable[[], list[Event]]) -> Callable[[], list[Event]]:
        clock, note, cut = self._recorder.clock, self._recorder.note, self._recorder.cut

        def traced() -> list[Event]:
            begin, self._fed, fed = clock(), None, None
            try:
                events = step()
                fed = self._fed
                self._lives.stepped(clock())
                return events
            finally:
                note((_STEP, begin, clock(), fed, None))
                cut()

        return traced

    def _forward(self, forward: Callable[[ModelInputs], Any]) -> Callable[[ModelInputs], Any]:
        """The forward call; in the padded layout a cache of transformers is written in it."""
        timed = self._recorder.timed(forward, Work(kinds.FORWARD, "forward", where="device"))
        writes = self._writes()

        def traced(inputs: ModelInputs) -> Any:
            past = inputs.kwargs.get("past_key_values")
            if past is None:
                return timed(inputs)
            hooks = Hooks()
            own = getattr(past, "self_attention_cache", past)  # beside an encoder there are two
            hooks.wrap(own, "update", lambda call: self._recorder.timed(call, writes, _third))
            try:
                return timed(inputs)
            finally:
                hooks.remove()

        return traced

    def _writes(self) -> Work:
        return Work(
            kinds.WRITES, "cache write", _who(self._plan["cache"].registered), where="device"
        )

    def _hook_cache(self) -> None:
        cache, who = self._loop.cache, _who(self._plan["cache"].registered)
        self._hooks.wrap(cache, "prepare", self._prepare)
        if isinstance(self._loop.images, StepFeatures):
            self._time(self._loop.images, "_read", Work(kinds.ENCODING, "encoder", where="device"))
        elif isinstance(cache, EncodedCache):
            self._time(cache, "_read", Work(kinds.ENCODING, "encoder", where="device"))
        self._time(cache, "admit", Work(kinds.SCHEDULING, "room for a sequence", who))
        self._time(cache, "preempt", Work(kinds.SCHEDULING, "preemption", who))
        for name in ("commit", "fork", "release"):
            self._time(cache, name, Work(kinds.COMMITTING, f"cache {name}", who))

    def _prepare(self, prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
        who = _who(self._plan["cache"].registered)
        timed = self._recorder.timed(prepare, Work(kinds.PREPARING, "inputs", who))

        def traced(step: RunningStep) -> Any:
            self._fed = self._lives.fed(step)
            return timed(step)

        return traced

    def _hook_decoding(self) -> None:
        decoder = self._loop.decoding
        if decoder.drafting:
            self._time(decoder, "propose", Work(kinds.DRAFTING, "drafts"))
        for name in decoder.drafting:
            who = _who(self._plan.decodings[name].registered)
            work = Work(kinds.DRAFTING, f"{name} proposes", who)
            self._time(decoder.strategies[name], "propose", work)
        self._time(decoder, "expect", Work(kinds.SAMPLING, "what the sampler needs"))
        sampling = Work(kinds.SAMPLING, "sampling", where="device")
        self._time(decoder, "choose", sampling)
        self._time(decoder, "accept", sampling)
        self._time(decoder, "_found", Work(kinds.STRUCTURES, "waiting for what may follow"))
        advance = Work(kinds.STRUCTURES, "structure of a text")
        self._time(decoder, "_advance", advance, lambda args: args[0].id)
        if decoder.searcher is not None:
            self._time(decoder.searcher, "decide", Work(kinds.SEARCHING, "beams"))

    def _hook_model(self) -> None:
        """What is within a forward call."""
        bound, plan = self._bound, self._plan
        attention, writes = plan["attention"].registered, self._writes()
        attends = Work(
            kinds.ATTENTION, "attention", _who(attention, bound.attention.source), where="device"
        )

        def stand(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            if name == "write":
                return self._recorder.timed(call, writes, _first)
            return self._recorder.timed(call, attends, lambda args: args[0].layer_idx)

        if bound.attention.replace is not None:
            self._hooks.add(bound.attention.replace(stand))
        if bound.compiled is not None:
            who = _who(plan["compiler"].registered, bound.compiled.compilation.source)
            work = Work(kinds.COMPILED, "compiled step", who, where="device")
            self._time(bound.compiled, "_compiled", work)
        for layers in bound.layers:
            work = Work(kinds.KERNELS, "kernel", _who(layers.registered), where="device")
            if bound.compiled is not None:  # they are put in for each step that is not compiled
                self._hooks.wrap(layers, "_forwards", partial(self._each_timed, work))
                continue
            for module, _ in layers._forwards:
                self._time(module, "forward", work)

    def _each_timed(self, work: Work, forwards: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return [(module, self._recorder.timed(forward, work)) for module, forward in forwards]

    def _hook_worker(self) -> None:
        """What is between steps, and what other threads do."""
        worker, emitting = self._worker, Work(kinds.EMITTING, "handing out")
        self._hooks.wrap(worker, "_next", self._next)
        self._time(worker, "_deliver", emitting)
        handed_out = handing_out(self._lives, self._recorder.clock)
        self._hooks.wrap(worker, "_deliver", handed_out)
        self._hooks.wrap(self._loop, "reset", handed_out)
        self._time(worker, "_enter", Work(kinds.ENTERING, "requests come"))
        self._time(self._observer, "_text_of", Work(kinds.TEXT, "text of a request"))
        beside = self._recorder.timed_beside
        prompts = Work(kinds.ENTERING, "prompts and settings are read")
        self._hooks.wrap(self._intake, "sequences", lambda call: beside(call, prompts))
        masks = Work(kinds.STRUCTURES, "what may follow, by structures")
        self._hooks.wrap(self._structures, "_masks", lambda call: beside(call, masks))

    def _next(self, following: Callable[[], bool]) -> Callable[[], bool]:
        """What is done between two steps; while nobody runs or waits, the thread is idle."""
        clock, note, loop = self._recorder.clock, self._recorder.note, self._loop

        def traced() -> bool:
            busy, begin = bool(loop.running or loop.waiting), clock()
            found = following()
            if busy:
                note((_BETWEEN, begin, clock(), None, None))
            return found

        return traced

    def _record(self) -> Record:
        """What was found. Called by whoever traced, when the hooks are out."""
        blocks, beside = self._recorder.blocks(), self._recorder.beside()
        if self._device is not None:
            blocks = self._device.placed(blocks)
        spans = outer_first(span for block in blocks for span in block if span.end <= self._ended)
        begin = spans[0].begin if self._recorder.dropped and spans else self._began
        return Record(
            begin,
            self._ended,
            spans,
            beside,
            self._requests,
            _name_of(self._bound.model),
            None if self._device is None else str(self._device.device),
            list(self._said(spans, begin)),
        )

    def _said(self, spans: list[Span], begin: int) -> Iterator[str]:
        """What the reader has to know of the record."""
        yield from self._notes
        if self._overlaps:
            yield "steps wait for the last one's tokens here; without a trace they are begun before"
        if (size := self._plan.requirements.tp_size) > 1:
            yield f"rank 0 of {size} processes that share the model; all compute the same steps"
        if self._bound.attention.replace is None:
            yield f"{_who(self._plan['attention'].registered)} is part of the model's own code"
        if dropped := self._recorder.dropped:
            late = (begin - self._began) / 1e9
            yield f"{dropped} spans were dropped: what is told begins {late:.3f} s after the trace"
        if dropped := self._lives.dropped:
            yield f"the first {dropped} requests that ended are not told"


def _who(registered: Registered, source: str | None = None) -> str:
    whose = f", on {source}" if source else ""
    return (
        f"{registered.kind} {registered.name} "
        f"({registered.distribution} {registered.version}{whose})"
    )


def _name_of(model: PreTrainedModel) -> str:
    """As it was loaded: a hub id, or the folder's own name; else what it is."""
    where = model.name_or_path or ""
    return (Path(where).name if Path(where).is_absolute() else where) or type(model).__name__
