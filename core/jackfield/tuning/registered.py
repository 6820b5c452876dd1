"""The ladder of a registry: what the plan's own verdicts allow, less what bounds rule out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jackfield.api import Prepared, prepare
from jackfield.benchmarking.roofline import limits
from jackfield.benchmarking.workload import Workload
from jackfield.bridge.devices import is_here
from jackfield.devices import free_bytes, numbered
from jackfield.errors import UsageError
from jackfield.planning.planning import Plan
from jackfield.planning.solving import ARGUMENTS
from jackfield.planning.spec import PlanSpec
from jackfield.planning.verdicts import Verdict, explain
from jackfield.registry.discovery import registry
from jackfield.requests.arguments import OF_A_PLAN
from jackfield.spelling import Selection
from jackfield.tuning.candidates import Candidate, Dropped, Rung
from jackfield.units import in_units

DTYPES = ("float32", "bfloat16", "float16")
DEVICE_KINDS = ("cuda", "xpu", "mps", "cpu")
NAMED = "as you named it"
#: rung -> kind of backends
KINDS = {
    "attention": "attention", "cache": "cache", "compile": "compiler", "quantize": "quantizer",
}  # fmt: skip
#: Weights of fewer bytes may stay in the caches of a CPU, whose bandwidth is not what is measured.
CACHED = 1 << 28
#: Of the memory that is free, what weights and requests may take.
SHARE = 0.9


class RegisteredLadder:
    """`fixed` are arguments that the caller named, and that are not tuned."""

    def __init__(
        self, model: str, fixed: Mapping[str, Any], workload: Workload, *, quantize: bool
    ) -> None:
        self._model, self._fixed, self._workload = model, fixed, workload
        self._quantize = quantize
        self._rates: dict[str, tuple[float, float]] = {}
        self._seen = {_key(self._prepared(fixed))}

    def _prepared(self, arguments: Mapping[str, Any]) -> Prepared:
        return prepare(self._model, **arguments)

    def rung(self, name: str, best: Mapping[str, Any]) -> Rung:
        """What can be tried; raises nothing of what `best` has been planned with."""
        plan = self._prepared(best).plan
        if name in KINDS:
            return self._backends(name, KINDS[name], best, plan)
        found = getattr(self, f"_{name}")(best, plan)
        assert isinstance(found, Rung)
        return found

    def _backends(self, name: str, kind: str, best: Mapping[str, Any], plan: Plan) -> Rung:
        argument, now = ARGUMENTS[kind], plan[kind].registered.name
        if argument in self._fixed:
            return Rung(now, why_none=NAMED)
        if kind == "quantizer" and not self._quantize:
            return Rung(now, why_none="weights are quantized with --quantize only")
        spec = PlanSpec(**{n: v for n, v in best.items() if n in OF_A_PLAN})
        tried, dropped = [], []
        for verdict in explain(self._model, spec).verdicts:
            if verdict.kind != kind or verdict.verdict == "chosen":
                continue
            address = _address(verdict)
            where = next(self._possible(best, {argument: address}), None)
            if where is not None:
                tried.append(Candidate(name, verdict.name, where))
            elif verdict.reasons:  # others make a plan that was measured already
                dropped.append(Dropped(verdict.name, "; ".join(verdict.reasons)))
        return Rung(now, tried, dropped)

    def _possible(
        self, best: Mapping[str, Any], own: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """`own` beside the best, or beside what auto chooses for it; nothing that was seen."""
        kept = {n: v for n, v in best.items() if n not in ARGUMENTS.values() or n in self._fixed}
        for arguments in ({**best, **own}, {**kept, **own}):
            try:
                key = _key(self._prepared(arguments))
            except UsageError:
                continue
            if key not in self._seen:
                self._seen.add(key)
                yield arguments

    def _placement(self, best: Mapping[str, Any], plan: Plan) -> Rung:
        now = str(plan.device)
        if "device_map" in self._fixed:
            return Rung(now, why_none=NAMED)
        if plan.placement is not None and plan.placement.spread:
            return Rung("where auto puts it", why_none="the weights need several places")
        here = now.partition(":")[0]
        others = [d for d in DEVICE_KINDS if d != here and is_here(torch.device(d))]
        return self._each("placement", now, best, {d: {"device_map": d} for d in others})

    def _precision(self, best: Mapping[str, Any], plan: Plan) -> Rung:
        now = plan.requirements.dtype
        if "dtype" in self._fixed:
            return Rung(now, why_none=NAMED)
        others = {d: {"dtype": d} for d in DTYPES if d != now}
        return self._each("precision", now, best, others)

    def _batch(self, best: Mapping[str, Any], plan: Plan) -> Rung:
        """Fewer or more at a time than the workload has requests; prompts in pieces."""
        work, rows = self._workload, plan.limits.rows
        most = len(work.requests)
        sizes = {n for n in (most // 4, most // 2, most, 2 * rows, 4 * rows) if 1 <= n <= most}
        others: dict[str, dict[str, int]] = {}
        if "max_batch_size" not in self._fixed:
            others |= {
                f"{n} at a time": {"max_batch_size": n}
                for n in sorted(sizes)
                if min(n, most) != min(rows, most)
            }
        longest = max(len(one.prompt) for one in work.requests)
        if not {"prefill_chunk_size", "max_batch_tokens"} & self._fixed.keys():
            for size in (64, 256):
                if size < longest:
                    others[f"prompts in pieces of {size}"] = {"prefill_chunk_size": size}
            for size in (512, 8192):
                if size < work.prompt_tokens:
                    others[f"steps of {size} tokens"] = {"max_batch_tokens": size}
        return self._each("batch", f"{rows} at a time", best, others)

    def _each(
        self, name: str, now: str, best: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]
    ) -> Rung:
        tried, dropped = [], []
        for label, own in others.items():
            try:
                self._prepared({**best, **own})
            except UsageError as error:
                dropped.append(Dropped(label, str(error)))
                continue
            tried += [Candidate(name, label, found) for found in self._possible(best, own)][:1]
        return Rung(now, tried, dropped)

    def prune(
        self, candidate: Candidate, best: Mapping[str, Any], seconds: float, beside: int
    ) -> str | None:
        """By the memory that is free now, and by what the device can read and multiply."""
        plan = self._prepared(candidate.arguments).plan
        free, need = free_bytes(plan.device), self._bytes(plan) * (beside + 1)
        if free is not None and need > SHARE * free:
            return f"needs {in_units(need)} with those beside it, and {in_units(free)} are free"
        if self._workload.waits or plan.requirements.weight_bytes < CACHED:
            return None
        own, now = self._least(candidate.arguments), self._least(best)
        if own is None or now is None or now > seconds or own <= seconds:
            return None  # a roof that the best is above is none
        return f"its roof is {own:.3g} s a round, and the best takes {seconds:.3g} s"

    def _bytes(self, plan: Plan) -> int:
        """Weights, and the requests that run together."""
        memory, work = plan.memory(), self._workload
        rows = min(plan.limits.rows, len(work.requests))
        held = memory.request_bytes(work.longest) * rows if memory else 0
        return plan.requirements.weight_bytes + held

    def _least(self, arguments: Mapping[str, Any]) -> float | None:
        """The seconds that no program can beat that reads the model so."""
        work = self._workload
        rows = self._prepared(arguments).plan.limits.rows
        given = {"model": self._model, **arguments}
        found = limits(work.requests, given, min(rows, len(work.requests)), self._rates)
        if found is None:
            return None
        self._rates[found["where"]] = found["bandwidth"], found["flop_rate"]
        return float(found["seconds"])


def _address(verdict: Verdict) -> str:
    found = registry().find(verdict.kind, Selection(verdict.name, verdict.distribution))
    return registry().address(found)


def _key(prepared: Prepared) -> object:
    """What tells two plans apart, as far as rungs change them."""
    plan, sizes = prepared.plan, prepared.limits
    chosen = tuple(
        (kind, c.registered.name, c.registered.distribution, repr(c.options))
        for kind, c in plan.choices.items()
    )
    return chosen, plan.requirements.dtype, numbered(plan.device), repr(sizes)
