"""`verify=True`: the first steps of an engine are compared with the model computed again.

At each layer's attention, in the order in which a step goes: the queries (what runs between two
attentions: compiler, kernels), the keys and values that are read (the cache), the output (the
attention); last the logits. So the first difference shows which backend is at fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from jackfield.bridge.recomputation import (
    AttentionCall,
    Difference,
    Recomputation,
    Recomputed,
    difference,
)
from jackfield.engine.report import Verified
from jackfield.errors import (
    ExecutionError,
    JackfieldError,
    PlanError,
    UsageError,
    error_text,
    quoted,
)
from jackfield.guarded import fault

if TYPE_CHECKING:
    from jackfield.contracts import ModelInputs, PackedLayer, PackedStep
    from jackfield.engine.bound import BoundModel
    from jackfield.engine.loop import Loop
    from jackfield.engine.steps import RunningStep, ScheduledRunning
    from jackfield.planning.planning import Plan

STEPS = 8  # that are compared where the caller names no number
SEQUENCES = 4  # of a step
LONGEST = 2048  # tokens of a sequence: an eager attention makes the matrix of all scores
#: A cache may round a token's keys or values by this share of their length (`KVCache`).
ROUNDED = 0.25


class Call(NamedTuple):
    """One call of an attention, as the model made it; `pages` in the packed layout."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    pages: Pages | None


class Pages(NamedTuple):
    """What a layer's pages held for the sequences that are compared, by their number in a step."""

    step: PackedStep
    read: dict[int, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, layer: PackedLayer) -> Pages:
        """Copies: a cache may use the pages for its next layer when the attention has returned."""
        fed = [(row, span.kv_len) for row, span in enumerate(layer.step.spans) if span.query_len]
        rows = [row for row, length in fed[:SEQUENCES] if length <= LONGEST]
        read = {row: layer.gather(row) for row in rows}
        return cls(layer.step, {row: (k.clone(), v.clone()) for row, (k, v) in read.items()})


def steps_of(verify: bool | int) -> int:
    """How many steps are compared. Raises UsageError for what is no number of steps."""
    if isinstance(verify, bool):
        return STEPS if verify else 0
    if type(verify) is not int or verify < 0:
        raise UsageError(f"verify must be True, False or a number of steps, not {quoted(verify)}")
    return verify


def check_verifiable(plan: Plan) -> None:
    """Raise PlanError for a model that cannot be computed again from its tokens alone."""
    if why := plan.requirements.features.get("bidirectional_prefix"):
        raise PlanError(
            f"verify: {plan.requirements.architecture} reads a prompt in both directions ({why}), "
            "which cannot be told from the text behind it; drop verify"
        )


class Verification:
    """Compares the first `steps` steps of a loop; then it takes itself out of it.

    Raises PluginError from the step that was wrong, or ExecutionError where it is nobody's.
    """

    def __init__(self, bound: BoundModel, loop: Loop, steps: int) -> None:
        self._bound, self._loop, self._left = bound, loop, steps
        self._recomputed = Recomputation(bound.model, [*bound.layers, bound.attention])
        self._calls: dict[int, Call] = {}
        self._plan = bound.plan
        self.done = Verified()
        loop.verifying = self.check
        if not bound.plan.requirements.irregular:
            bound.attention.tap = self

    def begin(self) -> None:
        """A step begins."""
        self._calls.clear()

    def note(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        pages: PackedLayer | None,
    ) -> None:
        """A layer called."""
        # What a compiled step has in these is over when the attention has returned.
        read = None if pages is None else Pages.of(pages)
        self._calls[layer] = Call(query.clone(), key, value, output.clone(), read)

    def check(self, step: RunningStep, inputs: ModelInputs, logits: torch.Tensor) -> None:
        """Compare a step that has just been computed."""
        begin = time.perf_counter()
        calls, self._calls = self._calls, {}
        done = self.done
        steps, sequences, too_long = done.steps + 1, done.sequences, done.too_long
        worst, rounded = done.logits, done.rounded
        fed = [(i, feed) for i, feed in enumerate(step.scheduled) if feed.num_tokens]
        for i, feed in fed[:SEQUENCES]:
            if feed.start + feed.num_tokens + len(feed.drafts) > LONGEST:
                too_long += 1
                continue
            one = _Compared(self, i, feed, inputs, logits[i])
            one.compare(dict(sorted(calls.items())))
            worst, rounded = max(worst, one.logits_off), max(rounded, one.rounded)
            sequences += 1
        seconds = done.seconds + time.perf_counter() - begin
        self.done = Verified(steps, sequences, too_long, worst, rounded, seconds)
        self._left -= 1
        if not self._left:
            self._loop.verifying, self._bound.attention.tap = None, None

    def again(self, tokens: list[int], keep: int) -> tuple[Recomputed, Recomputed]:
        """See `Recomputation`. Raises ExecutionError where the model cannot."""
        try:
            return self._recomputed(tokens, keep)
        except Exception as error:
            raise ExecutionError(
                f"verify: the model cannot compute {len(tokens)} tokens again, alone and with its "
                f"own attention: {error_text(error)}; mend that, or drop verify"
            ) from error

    def blamed(self, kinds: tuple[str, ...], what: str) -> JackfieldError:
        """The error for what is the doing of the first of `kinds` that this plan has."""
        for kind in kinds:
            if kind == "kernel" and self._bound.layers:
                return fault(self._bound.layers[0].registered, what)
            if kind == "compiler" and self._bound.compiled is not None:
                return fault(self._plan["compiler"].registered, what)
            if kind in ("attention", "cache"):
                return fault(self._plan[kind].registered, what)
        return ExecutionError(f"{what}, and no backend computes that")


class _Compared:
    """One sequence of one step."""

    def __init__(
        self,
        whole: Verification,
        row: int,
        feed: ScheduledRunning,
        inputs: ModelInputs,
        logits: torch.Tensor,
    ) -> None:
        self._whole, self._number, self._feed, self._inputs = whole, row, feed, inputs
        own = feed.sequence.tokens[: feed.start + feed.num_tokens]
        self._tokens = [*own, *feed.drafts]
        self._fed = feed.num_tokens + len(feed.drafts)
        self._logits = logits[-min(len(logits), self._fed) :]
        self.logits_off = self.rounded = 0.0

    def compare(self, calls: dict[int, Call]) -> None:
        exact, rounded = self._whole.again(self._tokens, len(self._logits))
        for layer, call in calls.items():
            if layer in exact.layers:
                self._layer(layer, call, exact.layers[layer], rounded.layers[layer])
        if self.rounded:
            return
        seen = difference(self._logits, exact.logits, rounded.logits)
        self.logits_off = seen.off
        if seen.token is not None:
            at = len(self._tokens) - len(self._logits) + seen.token
            kinds = ("compiler", "kernel") if calls else ("compiler", "attention")
            raise self._whole.blamed(kinds, self._told("logits", at, None, seen))

    def _layer(self, layer: int, call: Call, exact: AttentionCall, rounded: AttentionCall) -> None:
        first = self._feed.start
        queries = self._of_rows(call, call.query)
        if not self.rounded:
            seen = difference(queries, exact.query[first:], rounded.query[first:])
            if seen.token is not None:
                what = self._told("queries", first + seen.token, layer, seen)
                raise self._whole.blamed(("compiler", "kernel"), what)
        for name, read in self._read(call):
            late = slice(len(self._tokens) - len(read), None)
            right, other = getattr(exact, name)[late], getattr(rounded, name)[late]
            self._check_read(f"the {name}s", layer, read, right, other)
        if not self.rounded:
            output = self._of_rows(call, call.output, behind=True)
            seen = difference(output, exact.output[first:], rounded.output[first:])
            if seen.token is not None:
                what = self._told("outputs of the attention", first + seen.token, layer, seen)
                raise self._whole.blamed(("attention",), what)

    def _check_read(
        self,
        name: str,
        layer: int,
        read: torch.Tensor,
        right: torch.Tensor,
        rounded: torch.Tensor,
    ) -> None:
        """Keys or values may be rounded; another token's are about as far off as they are long."""
        if difference(read, right, rounded).token is None:
            return
        length = right.double().flatten(1).norm(dim=1)
        off = (read.double() - right.double()).flatten(1).norm(dim=1)
        share = (off / length.clamp(min=1e-30)).nan_to_num(nan=torch.inf)
        worst = float(share.max())
        if worst > ROUNDED:
            oldest = len(self._tokens) - len(read)
            at = oldest + int((share > ROUNDED).nonzero()[0])
            what = (
                f"verify: layer {layer} reads {name} of the token at position {at} that are off by "
                f"{worst:.0%} of their length (request {self._feed.sequence.id})"
            )
            raise self._whole.blamed(("cache",), what)
        self.rounded = max(self.rounded, worst)

    def _row(self) -> int:
        """Its row in the padded layout."""
        row_of = self._inputs.row_of
        return self._number if row_of is None else int(row_of[self._number])

    def _of_rows(self, call: Call, tensor: torch.Tensor, behind: bool = False) -> torch.Tensor:
        """What `tensor` has for the tokens that are fed, `[tokens, heads, head_dim]`."""
        if call.pages is not None:
            span = call.pages.step.spans[self._number]
            own = tensor[0] if behind else tensor[0].transpose(0, 1)
            return own[span.query_start : span.query_start + span.query_len]
        own = tensor[self._row()]
        return (own if behind else own.transpose(0, 1))[-self._fed :]

    def _read(self, call: Call) -> Iterator[tuple[str, torch.Tensor]]:
        """The keys and values that are read, `[tokens, heads, head_dim]`, up to the last token."""
        if call.pages is not None:
            read = [t.transpose(0, 1) for t in call.pages.read[self._number]]
        elif (columns := self._columns(call.key.shape[2])) is not None:
            row = self._row()
            read = [t[row].transpose(0, 1)[columns] for t in (call.key, call.value)]
        else:
            return
        yield from zip(("key", "value"), read, strict=True)

    def _columns(self, length: int) -> torch.Tensor | None:
        """Which of `length` columns of keys are this sequence's; None: unknown."""
        mask = self._inputs.kwargs["attention_mask"]
        if mask is None:
            there = len(self._tokens)
            return torch.arange(length)[-there:] if length <= there else None
        valid: torch.Tensor = mask[self._row()].bool().cpu()
        if length > len(valid):  # of fixed shape: columns to come stand behind
            return valid.nonzero()[:, 0]
        return valid[-length:].nonzero()[:, 0]

    def _told(self, what: str, at: int, layer: int | None, seen: Difference) -> str:
        where = "" if layer is None else f" of layer {layer}"
        return (
            f"verify: {what}{where} for the token at position {at} are off by {seen.off:.3g}, "
            f"where {seen.allowed:.2g} is due to rounding (request {self._feed.sequence.id})"
        )
