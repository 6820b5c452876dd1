"""What readers see of a running engine: deltas, completions, and what was observed to run."""

from __future__ import annotations

import threading
import time
from typing import Any

from jackfield.bridge.adapters import AdapterSwitch
from jackfield.bridge.attention import AttentionPort
from jackfield.errors import ExecutionError
from jackfield.loop import Loop
from jackfield.planning import Plan
from jackfield.prompts import Prompt, encode
from jackfield.report import Report, observe
from jackfield.sequences import Completion, Delta, Event, Sequence, Usage


class Text:
    """A tokenizer that several threads may use; None: there is none."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._lock = threading.Lock()  # a fast tokenizer refuses to be used by two at a time

    def encode(self, prompt: Prompt) -> list[int]:
        with self._lock:
            return encode(prompt, self.tokenizer, self.vocab_size)

    def decode(self, ids: list[int]) -> str:
        with self._lock:
            text: str = self.tokenizer.decode(  # type: ignore[union-attr]
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text


class Observer:
    """Looks at what the loop did. Belongs to one engine and must not refer to it.

    `stored` says what the quantizer was found to have done to the weights, `adapter` is the switch
    of what is on top of them.
    """

    def __init__(
        self,
        plan: Plan,
        port: AttentionPort,
        loop: Loop,
        text: Text,
        stored: str | None,
        adapter: AdapterSwitch | None = None,
    ) -> None:
        self._plan = plan
        self._port = port
        self._loop = loop
        self._text = text
        self._stored = stored
        self._adapter = adapter
        self._reached = False

    def report(self) -> Report:
        """What was observed to run since the engine was made."""
        attention = self._plan["attention"].registered
        others = ("cache", "decoding", "scheduler")
        return Report(
            (
                observe("attention", attention, self._port.tally, self._port.source),
                *(observe(k, self._plan[k].registered, self._loop.steps) for k in others),
                observe(
                    "quantizer", self._plan["quantizer"].registered, self._loop.steps, self._stored
                ),
            ),
            self._adapter.use() if self._adapter else None,
        )

    def check_reached(self) -> None:
        """After the first step: a chosen attention that a layer did not call is a wrong result."""
        if self._reached or not self._loop.steps:
            return
        if missed := sorted(self._port.expected - self._port.tally.layers):
            raise ExecutionError(
                f"{self._plan['attention'].registered} was not called by layers {missed}: the "
                "model does not run what was chosen"
            )
        self._reached = True

    def delta(self, event: Event) -> Delta:
        sequence = event.sequence
        done = sequence.finish_reason is not None
        return Delta(event.text, event.tokens, self._completion(sequence) if done else None)

    def _completion(self, sequence: Sequence) -> Completion:
        text = self._text_of(sequence)
        assert sequence.finish_reason is not None
        return Completion(
            text=text,
            token_ids=sequence.new_tokens,
            finish_reason=sequence.finish_reason,
            usage=Usage(
                sequence.prompt_length, sequence.num_new, time.perf_counter() - sequence.started
            ),
            report=self.report().since(sequence.report_before),
            logprobs=sequence.logprobs,
            error=sequence.error,
        )

    def _text_of(self, sequence: Sequence) -> str | None:
        """None where there is no tokenizer, and where it fails, which ends this request alone."""
        if sequence.detokenizer is not None:
            return sequence.detokenizer.text
        if self._text.tokenizer is None:
            return None
        try:
            return self._text.decode(sequence.new_tokens)
        except Exception as error:  # noqa: BLE001 - a tokenizer of whatever kind
            sequence.undecodable(error)
            return None
