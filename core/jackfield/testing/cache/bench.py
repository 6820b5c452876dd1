"""One backend under test, bound to small models with nothing between it and the checks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from jackfield.api import plan
from jackfield.contracts import (
    BindContext,
    CacheCapabilities,
    KVCache,
    PackedKVCache,
    TransformersCache,
)
from jackfield.contracts.packed import not_packed
from jackfield.engine.checked_cache import CheckedCache
from jackfield.engine.checked_packed import CheckedPackedCache
from jackfield.engine.layouts import laid_out
from jackfield.errors import JackfieldError, PlanError
from jackfield.planning.planning import Plan
from jackfield.spelling import Selection, parse
from jackfield.testing.cache.driver import Driver
from jackfield.testing.cache.lossy import SteppedReference
from jackfield.testing.checks import NotTriedError, WrongError
from jackfield.testing.models import Reference, build
from jackfield.testing.subject import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: How far off keys may be in rows × columns where they are no plain tensors, as a part of their
#: length. Nobody declares it there; other keys than those that were written are 1 or more off.
PADDED_ROUNDING = 0.7

#: What a cache that is driven by hand is told to be free, in bytes, also where nothing else is.
FREE = 256 << 20

#: layer type -> the model that has only such layers, as far as there is one
BASES = {
    "full_attention": "grouped_query",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}


@functools.cache
def model_of(name: str, dtype: str = "float32", seed: int = 0) -> PreTrainedModel:
    """On the CPU until it is moved, which moves it for all that ask for it."""
    return build(name, getattr(torch, dtype), seed)


@functools.cache
def reference_of(name: str, dtype: str = "float32", seed: int = 0) -> Reference:
    return Reference(model_of(name, dtype, seed))


@functools.cache
def stepped_reference_of(name: str, dtype: str = "float32", seed: int = 0) -> Reference:
    return SteppedReference(model_of(name, dtype, seed))


class Bench:
    """Plans and binds the backend.

    Attributes:
        layer_types: Those that it declares.
        held: With those that the engine keeps beside any packed cache.
        base: The model of `MODELS` that asks least of it.
        dtype: The first that it declares: float32 where it does.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.declared: CacheCapabilities = subject.backend.capabilities
        self.layer_types = self.declared.layer_types
        packed = self.declared.layout == "packed"
        self.held = self.layer_types | ({"linear_attention"} if packed else set())
        self.base = next(name for kind, name in BASES.items() if kind in self.layer_types)
        self.dtype = "float32" if "float32" in self.declared.dtypes else min(self.declared.dtypes)
        self._plans: dict[Any, Plan | PlanError] = {}
        self._rounds: dict[str, float] = {}

    def model(self, name: str, dtype: str | None = None) -> PreTrainedModel:
        """One of `MODELS` on the device of the checks."""
        return model_of(name, dtype or self.dtype).to(self.subject.device)  # type: ignore[arg-type,no-any-return]

    @property
    def packed(self) -> bool:
        return self.declared.layout == "packed"

    @functools.cached_property
    def small(self) -> str | None:
        """What selects it with a pool that a few prompts fill; None: it has no such option."""
        return self.sized("num_tokens", 224, 1024, 4096)

    def sized(self, option: str, *sizes: int) -> str | None:
        """What selects it with the first of these sizes that goes with its other options."""
        subject, given = self.subject, parse(self.subject.selection)
        if not any(field.name == option for field in fields(subject.options)):
            return None
        for size in sizes:
            arguments = {**given.arguments, option: str(size)}
            try:
                subject.registered.options(arguments)
            except JackfieldError:
                continue
            return str(Selection(given.name, given.distribution, arguments))
        return None

    @property
    def sharp(self) -> str:
        """The model with the most kinds of layers that can be driven by hand."""
        both = {"full_attention", "sliding_attention"} <= self.layer_types
        return "mixed_windows" if both else self.base

    def plan(self, name: str, dtype: str | None = None, what: str = "", **more: Any) -> Plan:
        """The plan of a model with this cache.

        Raises NotTriedError where it refuses the simplest model as well, and WrongError where it
        declares `what` and refuses the model that needs it.
        """
        found = self.planned(name, dtype, **more)
        if not isinstance(found, PlanError):
            return found
        if isinstance(self.planned(self.base), PlanError):
            raise NotTriedError(f"it refuses every model here: {found}")
        raise WrongError(f"declares {what or name}, and refuses a model with nothing else: {found}")

    def planned(self, name: str, dtype: str | None = None, **more: Any) -> Plan | PlanError:
        """The plan, or the error that says why there is none."""
        key = (name, dtype, repr(more))
        if key not in self._plans:
            try:
                self._plans[key] = plan(
                    self.model(name, dtype),
                    **{
                        "cache_implementation": self.subject.selection,
                        "attn_implementation": "eager",
                        **more,
                    },
                )
            except PlanError as error:
                self._plans[key] = error
        return self._plans[key]

    def no_packed(self, name: str) -> None:
        """Raise NotTriedError where no packed cache can hold a model, whoever wrote it."""
        found = self.planned(name, cache_implementation="dynamic") if self.packed else None
        if isinstance(found, Plan) and (reasons := not_packed(found.requirements)):
            raise NotTriedError(f"no packed cache holds {name} here: {'; '.join(reasons)}")

    @property
    def whole(self) -> str:
        """A model whose layers see everything, so that nothing is let go of; else `sharp`."""
        return "grouped_query" if "full_attention" in self.layer_types else self.sharp

    @property
    def taking_back(self) -> str:
        """The model with the most kinds of layers whose drafts can be taken back."""
        for name in (self.sharp, "grouped_query", "sliding_window"):
            found = self.planned(name, decoding="prompt_lookup")
            if not isinstance(found, PlanError):
                return name
        if isinstance(self.planned(self.base), PlanError):
            return self.base
        stuck = self.planned(self.base).requirements.holes  # type: ignore[union-attr]
        if "full_attention" not in self.declared.rollback and not self.packed:
            raise NotTriedError(f"the padded layout takes back no tokens of such models ({stuck})")
        return self.base

    def rounds(self, dtype: str | None = None) -> float:
        """How far off what is read was found to be, as a part of the length of a token's keys."""
        dtype = dtype or self.dtype
        if dtype not in self._rounds:
            name = "grouped_query" if "full_attention" in self.layer_types else self.base
            if name == "linear":
                return 0.0
            with self.drive(name, dtype) as driver:
                driver.admit(40)
                for _ in range(5):
                    driver.step()
                self._rounds[dtype] = driver.judge.worst
        return self._rounds[dtype]

    @contextlib.contextmanager
    def drive(
        self, name: str | None = None, dtype: str | None = None, *, what: str = "", **more: Any
    ) -> Iterator[Driver]:
        """A cache that is bound anew, driven by hand; closed afterwards."""
        name = name or self.sharp
        made = self.plan(name, dtype, what, **more)
        cache = self.bind(made, self.model(name, dtype))
        with torch.inference_mode():
            try:
                yield Driver(cache, made.requirements, self.rounding(cache))
            finally:
                cache.close()

    def bind(self, made: Plan, model: PreTrainedModel) -> KVCache:
        """The cache held to its contract, in every step as closely as the first ones."""
        choice = made["cache"]
        context = BindContext(
            model=model,
            config=model.config,
            requirements=made.requirements,
            options=choice.options,
            free=FREE,
        )
        bound = laid_out(choice.registered.bind(context), context)
        if isinstance(bound, PackedKVCache):
            return CheckedPackedCache(bound, choice.registered, made.requirements.windows)
        return CheckedCache(bound, choice.registered)

    def rounding(self, cache: KVCache) -> float:
        """How far what is read may be off, as a part of the length of a token's keys."""
        if isinstance(cache, PackedKVCache):
            return float(cache.inner.rounding)  # type: ignore[attr-defined]
        backend = self.subject.backend
        plain = isinstance(backend, TransformersCache) and backend.plain_tensors
        return 0.0 if plain else PADDED_ROUNDING
