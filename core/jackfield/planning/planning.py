"""A plan: one backend per kind, decided before a weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jackfield.bridge.adapter import Adapter
from jackfield.bridge.placement import Placement
from jackfield.contracts import Requirements
from jackfield.devices import free_bytes, numbered
from jackfield.errors import JackfieldError
from jackfield.planning.memory import CacheMemory, PlannedHeads, StepLimits, step_bytes
from jackfield.planning.solving import UNRECORDED, Refusal, reasons_of
from jackfield.registry.backends import Choice
from jackfield.spelling import AUTO

logger = logging.getLogger("jackfield")


@dataclass(frozen=True)
class Plan:
    """One backend per kind that fit together, with the reasons against the rest.

    `placement` says where weights go, `adapter` what is on top of them, None where nothing is, and
    `adapters` what a request may name.
    `decodings` are the strategies that requests can choose by name, the default first; `assistant`
    is the plan of their draft model. `kernels` stand in for layers. `limits` are those of a step:
    the defaults of an engine, until one is made. `early_exit` of a draft model: it is the model's
    own first so many layers, which are read once; None: it is another model. `heads` are the
    model's own that its decodings draft with.
    """

    requirements: Requirements
    choices: Mapping[str, Choice]
    refusals: tuple[Refusal, ...] = ()
    placement: Placement | None = None
    adapter: Adapter | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    decodings: Mapping[str, Choice] = field(default_factory=dict)
    assistant: Plan | None = None
    kernels: tuple[Choice, ...] = ()
    limits: StepLimits = field(default_factory=StepLimits)
    early_exit: int | None = None
    heads: PlannedHeads | None = None

    def __getitem__(self, kind: str) -> Choice:
        return self.choices[kind]

    @property
    def faster(self) -> tuple[Refusal, ...]:
        """The attentions that `auto` would rather have chosen, with what stands against each.

        Those for other devices are none of them, nor those that no whole step is recorded with,
        which saves more.
        """
        if self["attention"].how != AUTO:
            return ()
        device, backends = self.requirements.device, [(r, r.registered) for r in self.refusals]
        return tuple(
            refusal
            for refusal, r in backends
            if r.kind == "attention" and device in r.backend.capabilities.devices  # type: ignore[attr-defined]
            if not all(reason.startswith(UNRECORDED) for reason in refusal.reasons)
        )

    @property
    def recording(self) -> tuple[str, ...] | None:
        """Why whole decode steps are not recorded; empty: they are; None: nothing is recorded."""
        if not self["compiler"].backend.capabilities.records:
            return None
        against: list[str] = []
        for choice in (*map(self.__getitem__, ("compiler", "attention", "cache")), *self.kernels):
            r = choice.registered
            if reasons := reasons_of(r, "unrecordable", self.requirements, choice.options):
                against.append(f"{r.kind} {r.name} ({'; '.join(reasons)})")
        return tuple(against)

    @property
    def recorded(self) -> str | None:
        """`recording` in words; None: nothing is recorded."""
        against = self.recording
        if against is None:
            return None
        if not against:
            drafts = ", but those with drafts" if self.requirements.rollback else ""
            return f"whole decode steps{drafts}"
        return f"between attentions; whole decode steps are not: {'; '.join(against)}"

    @property
    def experts(self) -> str | None:
        """How the experts of a mixture run, and why so; None: as transformers has them."""
        needs = self.requirements
        if not needs.experts_implementation:
            return None
        why = needs.no_grouped_experts
        return f"{needs.experts_implementation}, since transformers' grouped product {why}"

    @property
    def shared(self) -> str | None:
        """What this process has of a model that several share, in words; None: all of it."""
        needs = self.requirements
        if needs.tp_size == 1:
            return None
        experts = ", and some of its experts as a whole" if needs.expert_parallel else ""
        return (
            f"shared by {needs.tp_size} processes; this one has {needs.num_attention_heads} query "
            f"heads and {needs.num_key_value_heads} key/value heads of each layer{experts}"
        )

    def memory(self) -> CacheMemory | None:
        """What keys and values cost and how much fits, by the memory that is free now.

        None where it is unknown before the model runs.
        """
        needs, choice = self.requirements, self.choices["cache"]

        def request_bytes(tokens: int) -> int:
            return choice.registered.ask("request_bytes", needs, choice.options, tokens)  # type: ignore[no-any-return]

        try:
            known = request_bytes(1) is not None
            available = self._pool(needs, choice)
        except JackfieldError as error:
            logger.warning("what a request takes is unknown: %s", error)
            return None
        where, device = self.placement, self.device
        if available is None and where is not None and len(where.execution_devices) > 1:
            return None  # each layer's are where it computes
        if available is None and (free := self._free(device)) is not None:
            available = max(0, free - self._loading(device))
        if not known or available is None:
            return None
        return CacheMemory(available, needs.context_length, request_bytes)

    def _pool(self, needs: Requirements, choice: Choice) -> int | None:
        """The memory that requests share from the start, by what is free now."""
        fixed: int | None = choice.registered.ask("pool_bytes", needs, choice.options)
        where = self.placement
        if fixed is not None or (where is not None and len(where.execution_devices) > 1):
            return fixed
        device = self.device
        if choice.registered.ask("pool_of", needs, choice.options, 0) is None:
            return None
        if (free := self._free(device)) is None:
            return None
        steps, share = self.room()
        beside = self._beside._loading(device) if self._beside else 0
        left = int(share * max(0, free - self._loading(device) - beside - steps))
        return choice.registered.ask("pool_of", needs, choice.options, left)  # type: ignore[no-any-return]

    def room(self) -> tuple[int, float]:
        """The bytes that steps take on the device, and the share of the rest for this plan's cache.

        Where a draft model is on the same device, its steps are counted too, and the rest is shared
        so that both models hold as many tokens; so do the model's own heads.
        """
        own, other = self.step_bytes(), self._beside
        heads = self.heads.token_bytes if self.heads else 0
        if other is None and not heads:
            return own, 1.0
        steps, theirs = (other.step_bytes(), other.token_bytes()) if other else (0, 0)
        mine = self.token_bytes()
        return own + steps, mine / (mine + theirs + heads)

    def room_beside(self, taken: int) -> tuple[int, float]:
        """The same for the cache of its draft model, once its own cache has `taken` bytes."""
        other = self._beside
        if other is None:
            return (0, 1.0) if self.assistant is None else (self.assistant.step_bytes(), 1.0)
        steps, share = self.room()
        left = max(1, (free_bytes(self.device) or 0) - steps)
        ratio = other.token_bytes() / self.token_bytes()
        as_many = taken * ratio  # where its own size was fixed
        return steps, min(1.0, max(share * ratio * (left + taken), as_many) / left)

    @property
    def device(self) -> str | None:
        """Where a step begins."""
        return self.placement.device if self.placement else self.requirements.device

    @property
    def _beside(self) -> Plan | None:
        """The draft model's plan, where it has the same device."""
        other = self.assistant
        return other if other and numbered(other.device) == numbered(self.device) else None

    def step_bytes(self) -> int:
        """What to leave free for a step beside weights and cache, in bytes."""
        drafts = max(map(self._max_drafts, self.decodings.values()), default=0)
        return step_bytes(self.requirements, replace(self.limits, drafts=drafts))

    def _max_drafts(self, decoding: Choice) -> int:
        if self.heads is not None and decoding.backend.capabilities.heads:
            return self.heads.layers
        return decoding.registered.size("max_drafts", decoding.options) or 0

    def token_bytes(self) -> int:
        """What a token's keys and values take; 1 where it is unknown."""
        ask, cache = self["cache"].registered.size, self["cache"]
        return max(1, (ask("request_bytes", self.requirements, cache.options, 1024) or 0) // 1024)

    def limited(self, tokens: int | None, rows: int) -> Plan:
        """The same for steps of so many tokens (None: no bound is known) and sequences."""
        limits = StepLimits(rows=rows) if tokens is None else StepLimits(tokens, rows)
        assistant = self.assistant and self.assistant.limited(tokens, rows)
        return replace(self, limits=limits, assistant=assistant)

    def _free(self, device: str | None) -> int | None:
        """What one process may count on being free; those that share a model share a CPU, too."""
        if self.requirements.elsewhere:
            return None
        free = free_bytes(device)
        beside = self.requirements.tp_size if numbered(device) == "cpu" else 1
        return None if free is None else free // beside

    def _loading(self, device: str | None) -> int:
        """The bytes of weights that are still to come to a device."""
        heads = self.heads.weight_bytes if self.heads else 0
        if self.placement is None or self.requirements.live:
            return self.requirements.weight_bytes + heads
        sizes, there = self.placement.sizes, numbered(device)
        return sum(size for place, size in sizes.items() if numbered(place) == there) + heads

    def to_dict(self) -> dict[str, Any]:
        needs, memory = self.requirements, self.memory()
        return {
            "architecture": needs.architecture,
            "dtype": needs.dtype,
            "device": needs.device,
            "layout": needs.layout,
            "features": dict(needs.features),
            "experts_implementation": needs.experts_implementation,
            "tp_size": needs.tp_size,
            "expert_parallel": needs.expert_parallel,
            "placement": self.placement.to_dict() if self.placement else None,
            "adapter": self.adapter.to_dict() if self.adapter else None,
            "adapters": {name: each.to_dict() for name, each in self.adapters.items()},
            "memory": memory.to_dict() if memory else None,
            "chosen": {kind: choice.to_dict() for kind, choice in self.choices.items()},
            "decodings": {name: choice.to_dict() for name, choice in self.decodings.items()},
            "assistant": self.assistant.to_dict() if self.assistant else None,
            "early_exit": self.early_exit,
            "heads": asdict(self.heads) if self.heads else None,
            "kernels": [choice.to_dict() for choice in self.kernels],
            "recording": None if self.recording is None else {
                "whole": not self.recording, "reasons": list(self.recording),
            },
            "faster": [r.registered.name for r in self.faster],
            "refused": [
                {"kind": r.registered.kind, "name": r.registered.name,
                 "distribution": r.registered.distribution, "reasons": list(r.reasons)}
                for r in self.refusals
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        needs = self.requirements
        lines = [f"{needs.architecture}, {needs.dtype} on {needs.device}, {needs.layout} layout"]
        lines += [f"  needs {name}: {evidence}" for name, evidence in needs.features.items()]
        if needs.waits:
            lines.append(f"  requests wait until a batch has ended: {needs.waits}")
        if self.experts:
            lines.append(f"  experts: {self.experts}")
        lines += [f"  {kind}: {choice}" for kind, choice in self.choices.items()]
        if self.recorded is not None:
            lines.append(f"  recorded: {self.recorded}")
        if self.early_exit is not None:
            lines.append(f"  weights: none of its own, the model's first {self.early_exit} layers")
        elif self.placement:
            lines.append(f"  weights: {self.placement}")
        if self.heads:
            lines.append(f"  heads: {self.heads}")
        if self.shared:
            lines.append(f"  {self.shared}")
        if self.adapter:
            lines.append(f"  adapter: {self.adapter}")
        for name, each in self.adapters.items():
            lines.append(f"  adapter {name!r} for requests that name it: {each}")
        lines += [f"  kernel: {choice}" for choice in self.kernels]
        if len(self.decodings) > 1:
            lines.append(f"  decodings that a request can choose: {', '.join(self.decodings)}")
        if memory := self.memory():
            lines.append(f"  memory for keys and values: {memory}")
        lines += [f"  would be faster: {r.registered.kind} {r}" for r in self.faster]
        lines += [
            f"  passed over: {r.registered.kind} {r.registered.name}: {'; '.join(r.reasons)}"
            for r in self.refusals
            if r not in self.faster
        ]
        if self.assistant is not None:
            lines += [f"  assistant: {line.strip()}" for line in str(self.assistant).splitlines()]
        return "\n".join(lines)
