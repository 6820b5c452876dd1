"""The attention kind: how a layer attends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, unknown
from jackfield.contracts.requirements import DEVICES, DTYPES, FEATURES, LAYOUTS, Requirements


@dataclass(frozen=True, kw_only=True)
class AttentionCapabilities:
    """What an attention backend declares it can do. What is not declared is not had.

    `features` are keys of `FEATURES`. `head_sizes` None means any size. `batch_invariant`: in the
    packed layout, the bits of one sequence's output do not depend on the others in the step.
    `whole_scores`: it makes the whole matrix of scores, queries by keys, which takes memory.
    """

    layouts: frozenset[str] = frozenset({"padded"})
    dtypes: frozenset[str] = frozenset(DTYPES)
    devices: frozenset[str] = frozenset(DEVICES)
    features: frozenset[str] = field(default_factory=frozenset)
    head_sizes: frozenset[int] | None = None
    batch_invariant: bool = False
    whole_scores: bool = False

    def __post_init__(self) -> None:
        unknown(self.layouts, LAYOUTS, "layout")
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.devices, DEVICES, "device")
        unknown(self.features, FEATURES, "feature")
        if not (self.layouts and self.dtypes and self.devices):
            raise ValueError("an attention needs at least one layout, one dtype and one device")
        sizes: Any = self.head_sizes
        if sizes is not None and not (
            isinstance(sizes, Set) and sizes and all(type(s) is int and s > 0 for s in sizes)
        ):
            raise ValueError(f"head_sizes must be a frozenset of positive ints, not {sizes!r}")

    def lacks(self, requirements: Requirements) -> list[str]:
        """Each requirement that is not met, as a reason that names it and its evidence."""
        r = requirements
        reasons = [
            f"does not support {feature} ({evidence})"
            for feature, evidence in r.features.items()
            if feature not in self.features
        ]
        for value, declared, what in (
            (r.layout, self.layouts, "layout"),
            (r.dtype, self.dtypes, "dtype"),
            (r.device, self.devices, "device"),
        ):
            if value is not None and value not in declared:
                reasons.append(f"does not run with {what} {value} (only {_names(declared)})")
        if r.batch_invariant and not self.batch_invariant:
            reasons.append("is not batch-invariant, which deterministic=True needs")
        if self.head_sizes is not None and (odd := set(r.head_sizes) - self.head_sizes):
            sizes = ", ".join(map(str, sorted(odd)))
            reasons.append(f"has no kernel for head size {sizes} (only {_names(self.head_sizes)})")
        return reasons


def _names(values: frozenset[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


@dataclass(frozen=True)
class BoundAttention:
    """An attention function and the mask it understands, which are one thing.

    `forward(module, query, key, value, attention_mask, **kwargs) -> (output, weights | None)`:
    query `[batch, heads, q_len, head_dim]`, key and value `[batch, kv_heads, kv_len, head_dim]`
    (not repeated for GQA), output `[batch, q_len, heads, head_dim]`, contiguous; inputs are not
    to be modified. `attention_mask` is whatever `mask` returned. kwargs carry `scaling` (float),
    `dropout` (0.0 while generating), `is_causal`, and, only for the features that the backend
    declares, `sliding_window` (int | None), `softcap` (float | None), `s_aux` (sinks, `[heads]`)
    and `position_bias`.

    `mask` has the signature of transformers' mask functions (`transformers.masking_utils`,
    e.g. `sdpa_mask`, `eager_mask`): it must honour `mask_function` (causality, window, chunks)
    and `attention_mask` (`[batch, kv_len]` bool, padding). It may return None only where
    `forward` then does the right thing by itself.

    `packed(module, query, layer, **kwargs) -> output` serves the packed layout: query and output
    `[tokens, heads, head_dim]`, `layer` a `PackedLayer` that holds this step's keys and values
    already, kwargs as above. Window and causality are in `layer`.

    `warm(page_size)` compiles what `packed` will need for pages of so many tokens, so that no
    request has to wait for it. It is called once, before the first step.

    `close()` puts back what was changed outside of the model; it is called once, at the end.

    `source` says whose kernel it is, where a backend can run on several; it goes into reports.
    """

    forward: Callable[..., Any]
    mask: Callable[..., Any]
    packed: Callable[..., Any] | None = None
    source: str | None = None
    warm: Callable[[int], None] | None = None
    close: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        for part in ("forward", "mask"):
            if not callable(getattr(self, part)):
                raise TypeError(
                    f"an attention without a {part} function does not load: padding, windows and "
                    f"causality would be lost; got {part}={getattr(self, part)!r}"
                )


@dataclass(frozen=True)
class ModelAttention:
    """The attention in the model's own code, by the name transformers gives it ("eager")."""

    implementation: str


class Attention(Backend):
    """How a layer attends. `bind` is called once per model; imports of torch belong there."""

    kind: ClassVar[str] = "attention"
    bound: ClassVar[tuple[type, ...]] = (BoundAttention, ModelAttention)
    capabilities: ClassVar[AttentionCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare `requirements` with `capabilities`; extend it for what those cannot express."""
        del options
        return self.capabilities.lacks(requirements)

    @abstractmethod
    def bind(self, context: BindContext) -> BoundAttention | ModelAttention:
        """Return the function pair that every layer of `context.model` will call."""

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), AttentionCapabilities):
            found.append("`capabilities` must be an AttentionCapabilities")
        return found
