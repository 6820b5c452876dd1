"""What readers see of a running engine: deltas, completions, and what was observed to run."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from jackfield.bridge.adapter import AdapterUse
from jackfield.bridge.tokenizer import Text
from jackfield.engine.assistant import DraftModel
from jackfield.engine.bound import BoundModel
from jackfield.engine.completions import Completion, Delta, Usage
from jackfield.engine.introspection import Introspection
from jackfield.engine.loop import Loop
from jackfield.engine.report import Compiled, Observation, Ran, Report, observe
from jackfield.engine.sequences import RunningSequence
from jackfield.engine.speculation import Speculation, total
from jackfield.engine.steps import Event
from jackfield.engine.verifying import Verification
from jackfield.planning.planning import Plan
from jackfield.sampling.fenced import OwnFailure, fenced


class Observer:
    """Looks at what the loop did. Belongs to one engine and must not refer to it.

    `draft` is the model that proposes, where there is one.
    """

    def __init__(
        self,
        plan: Plan,
        bound: BoundModel,
        loop: Loop,
        text: Text,
        draft: DraftModel | None,
        verification: Verification | None,
        introspection: Introspection,
    ) -> None:
        self._plan = plan
        self._attention = bound.attention
        self._loop = loop
        self._text = text
        self._stored = bound.stored
        self._compiled = bound.compiled
        self._adapter = bound.adapter
        self._adapters = bound.adapters
        self._layers = bound.layers
        self._draft = draft
        self._verification = verification
        self._introspection = introspection
        self._marked: tuple[int, Report] | None = None  # and before which turn of the loop

    def report(self) -> Report:
        """What was observed to run since the engine was made."""
        attention = self._plan["attention"].registered
        steps = self._loop.steps
        return Report(
            (
                observe("attention", attention, self._attention.tally, self._attention.source),
                observe("cache", self._plan["cache"].registered, steps),
                *map(self._decoding, self._plan.decodings),
                observe("scheduler", self._plan["scheduler"].registered, steps),
                *(
                    observe("kernel", layers.registered, layers.calls, layers.source)
                    for layers in self._layers
                ),
                observe("quantizer", self._plan["quantizer"].registered, steps, self._stored),
                self._compiler(steps),
                *(self._draft.observations() if self._draft else ()),
            ),
            self._loop.decoding.speculation(),
            self._adapter.use() if self._adapter else None,
            self._verification.done if self._verification else None,
            self._adapters.steps() if self._adapters else {},
        )

    def mark(self) -> Report:
        """`report`, made once between two steps. Called by the thread that takes them."""
        turn = self._loop.turns
        if self._marked is None or self._marked[0] != turn:
            self._marked = (turn, self.report())
        return self._marked[1]

    def _compiler(self, steps: int) -> Observation:
        """How many steps it executed, and what it compiled for them."""
        registered = self._plan["compiler"].registered
        if self._compiled is None:
            return observe("compiler", registered, steps)
        made = self._compiled.compilation
        seen = observe("compiler", registered, self._compiled.steps, made.source)
        compiled = Compiled(made.graphs, made.seconds, num_bytes=made.num_bytes, kept=made.kept)
        if (whole := self._compiled.recorded) is not None:
            compiled = replace(
                compiled,
                whole=whole.played,
                rows=whole.sizes,
                given_up=whole.given_up or whole.paused,
            )
        return replace(seen, compiled=compiled)

    def _decoding(self, name: str) -> Observation:
        """The strategy that requests call `name`, and how many steps it took part in."""
        registered = self._plan.decodings[name].registered
        calls = self._loop.decoding.calls[name]
        return replace(observe("decoding", registered, calls), name=name)

    def delta(self, event: Event) -> Delta:
        sequence = event.sequence
        done = sequence.finish_reason is not None
        completion = self._completion(sequence) if done else None
        count = len(event.tokens) if sequence.settings.logprobs is not None else 0
        own = sequence.logprobs[len(sequence.logprobs) - count :]
        heard = sequence.heard if sequence.streams else None
        end = 0 if heard is None else heard.told(event.tokens)
        return Delta(event.text, event.tokens, completion, own, heard, end)

    def _completion(self, sequence: RunningSequence) -> Completion:
        text = self._text_of(sequence)
        seconds = time.perf_counter() - sequence.started
        told = self._introspection.of(sequence)
        assert sequence.finish_reason is not None
        first = sequence.first_token_at
        return Completion(
            text=text,
            token_ids=sequence.new_tokens,
            finish_reason=sequence.finish_reason,
            usage=Usage(
                sequence.num_prompt_tokens,
                sequence.num_new,
                seconds,
                sequence.num_found or 0,
                None if first is None else first - sequence.started,
            ),
            ran=self._ran(sequence),
            logprobs=sequence.logprobs,
            error=sequence.error,
            score=sequence.score,
            logits=torch.stack(sequence.logits) if sequence.logits else None,
            scores=torch.stack(sequence.scores) if sequence.scores else None,
            hidden_states=told.hidden_states,
            attentions=told.attentions,
            heard=sequence.heard,
        )

    def _ran(self, sequence: RunningSequence) -> Ran:
        """What ran since the request came; the report of it is made by whoever reads it."""
        group = sequence.group
        return Ran(
            sequence.report_before,
            self.mark(),
            sequence.settings.decoding,
            None if group is None else group.width,
            self._drafted(sequence),
            None if sequence.adapter is None else AdapterUse(sequence.adapter.adapter, "on"),
        )

    def _drafted(self, sequence: RunningSequence) -> Speculation | None:
        """What its own drafts did, and whether its strategy rests."""
        if not self._loop.decoding.drafting:
            return None
        name = sequence.settings.decoding
        own = tuple(one for one in self._loop.decoding.resting if one.decoding == name)
        return total([sequence.drafted], resting=own)

    def _text_of(self, sequence: RunningSequence) -> str | None:
        """None where there is no tokenizer, and where it fails, which ends this request alone."""
        if sequence.detokenizer is not None:
            return sequence.detokenizer.text
        if self._text.tokenizer is None:
            return None
        try:
            return fenced("text", sequence.id, lambda: self._decoded(sequence))
        except OwnFailure as failure:
            sequence.fail(failure)
            return None

    def _decoded(self, sequence: RunningSequence) -> str:
        return self._text.decoder(sequence.settings)(sequence.text_tokens)
