"""The engine: a model bound to a plan."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from jackfield.bridge.attention import AttentionPort, decoder_configs
from jackfield.bridge.forward import forward_of
from jackfield.bridge.requirements import pick_device, requirements_of
from jackfield.bridge.source import ModelSource, find
from jackfield.bridge.weights import load_model, load_tokenizer
from jackfield.contracts import BindContext, PackedKVCache
from jackfield.detokenize import Detokenizer
from jackfield.discovery import registry
from jackfield.errors import (
    CacheFullError,
    ExecutionError,
    SettingsError,
    UsageError,
)
from jackfield.inbox import Inbox
from jackfield.loop import Event, Loop
from jackfield.planning import Plan, decide
from jackfield.prompts import Prompt, encode, is_batch
from jackfield.report import Report, observe
from jackfield.selection import AUTO, Selectable
from jackfield.sequences import Completion, Delta, Usage
from jackfield.sequences import Sequence as Running
from jackfield.settings import Limits, resolve

if TYPE_CHECKING:
    from torch.nn import Module

#: The ids of configs that an engine has changed and will give back; models may share one.
_in_use: set[int] = set()


def load(
    model: str | Path | PreTrainedModel,
    *,
    attn_implementation: Selectable = AUTO,
    cache_implementation: Selectable = AUTO,
    decoding: Selectable = AUTO,
    dtype: str = AUTO,
    device_map: str = AUTO,
    revision: str | None = None,
    tokenizer: Any | None = None,
    max_batch_size: int = 32,
    prefill_chunk_size: int | None = None,
) -> Engine:
    """Decide, load, bind.

    `model` is a hub id, a folder, "demo" (the model inside the package) or a live transformers
    model, which is given back as it was when the engine is closed. Each selection is "auto",
    ``plugin:name``, ``plugin:distribution/name``, with ``?option=value`` at its end, or a list of
    these (declared fallbacks); a bare name means the same as ``plugin:name``. `dtype` is "auto"
    or a name such as "bfloat16", `device_map` "auto" or one device such as "cuda:0".
    `max_batch_size` is how many sequences run together at most, `prefill_chunk_size` how many
    tokens of each prompt one forward call reads at most (None: the whole prompt).

    Raises a UsageError (SelectionError, OptionError, PlanError, CheckpointError) before any
    weight is loaded, or CheckpointError where the weights themselves are broken.
    """
    if isinstance(model, PreTrainedConfig):
        raise UsageError("a config has no weights; jackfield.plan takes one, load takes a model")
    for name, size in (
        ("max_batch_size", max_batch_size),
        ("prefill_chunk_size", 1 if prefill_chunk_size is None else prefill_chunk_size),
    ):
        if type(size) is not int or size < 1:
            raise UsageError(f"{name} must be a whole number, at least 1, not {size!r}")
    source = find(model, revision)
    needs = requirements_of(source, dtype=dtype, device=device_map)
    selections = {
        "attention": attn_implementation,
        "cache": cache_implementation,
        "decoding": decoding,
    }
    plan = decide(registry(), needs, selections)
    if prefill_chunk_size is not None and (reason := needs.whole_prompt):
        raise UsageError(
            f"prefill_chunk_size={prefill_chunk_size}: {needs.architecture} reads a prompt in one "
            f"piece ({reason}); drop prefill_chunk_size"
        )
    if tokenizer is None:
        tokenizer = load_tokenizer(source)
    model = _weights(source, plan, device_map)
    return Engine(model, plan, tokenizer, max_batch_size, prefill_chunk_size)


def _weights(source: ModelSource, plan: Plan, device_map: str) -> PreTrainedModel:
    if source.live is None:
        return load_model(source, plan.requirements.dtype, pick_device(device_map, source))
    if not _in_use.isdisjoint(map(id, decoder_configs(source.live))):
        raise UsageError(
            "this model, or one that shares its config, already runs in an engine; close that one "
            "first, or give the model a config of its own"
        )
    if str(source.live.dtype).removeprefix("torch.") != plan.requirements.dtype:
        raise UsageError(
            f"the model is in {source.live.dtype} and is used as it is; convert it yourself, or "
            "drop dtype"
        )
    return source.live


def _give_back(model: PreTrainedModel, unplug: Callable[[], None], trained: list[Module]) -> None:
    unplug()
    for module in trained:
        module.training = True
    _in_use.difference_update(map(id, decoder_configs(model)))


class Engine:
    """A model bound to a plan; it owns the loop. A context manager: leaving it gives all back.

    `generate` and `stream` may be called from several threads; steps are taken one at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        tokenizer: Any | None,
        max_batch_size: int,
        prefill_chunk_size: int | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.tokenizer = tokenizer
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._reached = False
        self._stepping = False
        self._withdrawn: list[Running] = []
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        # A backend that fails to bind must leave a live model as it was, so the plug comes last.
        cache = plan["cache"].registered.bind(self._context("cache"))
        strategy = plan["decoding"].registered.bind(self._context("decoding"))
        self._port = AttentionPort(
            plan["attention"].registered,
            self._context("attention"),
            model,
            cache if isinstance(cache, PackedKVCache) else None,
        )
        unplug = self._port.plug(model)
        # Also for an engine that is dropped without being closed; must not refer to the engine.
        trained = [module for module in model.modules() if module.training]
        self._give_back = weakref.finalize(self, _give_back, model, unplug, trained)
        self._give_back.atexit = False
        model.eval()
        _in_use.update(map(id, decoder_configs(model)))
        self._loop = Loop(forward_of(model), cache, strategy, max_batch_size, prefill_chunk_size)
        self.closed = False

    def _context(self, kind: str) -> BindContext:
        return BindContext(
            model=self.model,
            config=self.model.config,
            requirements=self.plan.requirements,
            options=self.plan[kind].options,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        settings: Sequence[Mapping[str, Any]] | None = None,
        **common: Any,
    ) -> list[Completion]:
        """Complete every prompt; results in the order of the prompts.

        `common` settings hold for all prompts, `settings[i]` overrides them for prompt i. They
        are transformers' `GenerationConfig` fields, and `seed`, `stop`, `logprobs`,
        `presence_penalty`, `frequency_penalty`. Sampling is on when `do_sample`, `temperature`,
        `top_k`, `top_p` or `min_p` asks for it. Raises SettingsError or PromptError before
        anything is computed.
        """
        batch: Sequence[Any] = prompts if is_batch(prompts) else [prompts]
        if settings is not None and len(settings) != len(batch):
            raise SettingsError(f"{len(settings)} settings for {len(batch)} prompts; give one each")
        own = settings or [{}] * len(batch)
        sequences = [
            self._sequence(prompt, {**common, **mine}, streams=False)
            for prompt, mine in zip(batch, own, strict=True)
        ]
        inboxes = self._submit(sequences)
        try:
            return [self._completed(inbox) for inbox in inboxes]
        finally:
            self._withdraw(sequences)

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Delta]:
        """Complete one prompt; yields a `Delta` per step, the last one with the completion.

        The request is checked at once and starts with the first `next`; closing the iterator
        cancels it.
        """
        if is_batch(prompt):
            raise UsageError("stream takes one prompt; use generate for a list of prompts")
        sequence = self._sequence(prompt, settings, streams=True)
        return self._stream(sequence)

    def _stream(self, sequence: Running) -> Iterator[Delta]:
        (inbox,) = self._submit([sequence])
        try:
            while True:
                delta = self._next(inbox)
                yield delta
                if delta.completion is not None:
                    return
        finally:
            self._withdraw([sequence])

    def _sequence(self, prompt: Any, asked: Mapping[str, Any], *, streams: bool) -> Running:
        self._check_open()
        ids = encode(prompt, self.tokenizer, self._vocab_size)
        settings = resolve(self.model.generation_config, asked, len(ids), self._limits)
        if reason := self._loop.cache.refuse(len(ids), settings.max_new_tokens):
            raise CacheFullError(f"{self.plan['cache'].registered.name}: {reason}")
        detokenizer = None
        if self.tokenizer is not None and (streams or settings.stop_strings):
            detokenizer = Detokenizer(self._decode, settings.stop_strings)
        return Running(next(self._ids), ids, settings, detokenizer)

    @property
    def _limits(self) -> Limits:
        decoding = self.plan["decoding"]
        return Limits(
            vocab_size=self._vocab_size,
            context_length=self.plan.requirements.context_length,
            honoured=decoding.backend.capabilities.settings,
            decoding=decoding.registered.name,
            has_tokenizer=self.tokenizer is not None,
        )

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(  # type: ignore[union-attr]
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _submit(self, sequences: Sequence[Running]) -> list[Inbox]:
        with self._lock:
            self._check_open()
            before = self.report()
            for sequence in sequences:
                sequence.report_before = before
                self._inboxes[sequence.id] = Inbox()
                self._loop.submit(sequence)
            return [self._inboxes[sequence.id] for sequence in sequences]

    def _completed(self, inbox: Inbox) -> Completion:
        while True:
            if (completion := self._next(inbox).completion) is not None:
                return completion

    def _next(self, inbox: Inbox) -> Delta:
        """The next delta of one request. Whoever has none to read takes a step, for everybody."""
        while True:
            with self._lock:
                if inbox.deltas:
                    return inbox.deltas.popleft()
                if inbox.failure is not None:
                    raise inbox.error()
                self._check_open()
                self._step()

    def _step(self) -> None:
        """One step of the loop. Where it fails, every request fails with the cause.

        Also one that finished in it: its last delta may be lost. What was delivered stays.
        """
        self._stepping = True
        try:
            events = self._loop.step()
            self._check_reached()
            for event in events:
                self._inboxes[event.sequence.id].deltas.append(self._delta(event))
        except BaseException as error:
            for inbox in self._inboxes.values():
                inbox.failure = error
            self._loop.reset()
            if not isinstance(error, Exception):
                raise
        finally:
            self._stepping = False
            self._withdraw(self._withdrawn)
            self._withdrawn.clear()

    def _check_reached(self) -> None:
        """After the first step: a chosen attention that a layer did not call is a wrong result."""
        if self._reached:
            return
        if missed := sorted(self._port.expected - self._port.tally.layers):
            raise ExecutionError(
                f"{self.plan['attention'].registered} was not called by layers {missed}: the model "
                "does not run what was chosen"
            )
        self._reached = True

    def _delta(self, event: Event) -> Delta:
        sequence = event.sequence
        done = sequence.finish_reason is not None
        return Delta(event.text, event.tokens, self._completion(sequence) if done else None)

    def _completion(self, sequence: Running) -> Completion:
        text = None
        if sequence.detokenizer is not None:
            text = sequence.detokenizer.text
        elif self.tokenizer is not None:
            text = self._decode(sequence.new_tokens)
        assert sequence.finish_reason is not None
        return Completion(
            text=text,
            token_ids=sequence.new_tokens,
            finish_reason=sequence.finish_reason,
            usage=Usage(
                sequence.prompt_length,
                sequence.num_new,
                time.perf_counter() - sequence.started,
            ),
            report=self.report().since(sequence.report_before),
            logprobs=sequence.logprobs,
            error=sequence.error,
        )

    def _withdraw(self, sequences: Sequence[Running]) -> None:
        with self._lock:
            if self._stepping:  # a stream that is collected while this very thread takes a step
                self._withdrawn.extend(sequences)
                return
            for sequence in sequences:
                self._inboxes.pop(sequence.id, None)
                self._loop.cancel(sequence)

    def explain(self) -> str:
        """The plan in words: what was chosen, what was passed over, and why."""
        source = self._port.source
        return f"{self.plan}\n  attention runs on {source}" if source else str(self.plan)

    def report(self) -> Report:
        """What was observed to run since the engine was made."""
        choices = self.plan.choices
        return Report(
            (
                observe(
                    "attention",
                    choices["attention"].registered,
                    self._port.tally,
                    self._port.source,
                ),
                observe("cache", choices["cache"].registered, self._loop.steps),
                observe("decoding", choices["decoding"].registered, self._loop.steps),
            )
        )

    def close(self) -> None:
        """Give the model back as it was. A second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._loop.reset()
            self._give_back()

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("the engine is closed; load the model again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
