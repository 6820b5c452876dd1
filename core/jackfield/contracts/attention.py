"""The attention kind: how a layer attends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jackfield.contracts.backend import BindContext, Recordable, unknown
from jackfield.contracts.native import NativeCall
from jackfield.contracts.packed import PageTables
from jackfield.contracts.requirements import DEVICES, DTYPES, FEATURES, LAYOUTS, Requirements


@dataclass(frozen=True, kw_only=True)
class AttentionCapabilities:
    """What an attention backend declares it can do.

    A capability that is not declared counts as missing.

    Attributes:
        layouts: "padded" (`forward` and `mask`), "packed" (`packed`), or both.
        dtypes: Those of query, keys and values.
        devices: torch device types.
        features: Keys of `FEATURES`. A model that needs another one is refused; one that hands the
            keyword argument of another one over while it runs ends with an ExecutionError.
        head_dims: The sizes of heads that there are kernels for; None: any.
        batch_invariant: In the packed layout, the bits of one sequence's output do not depend on
            the others in the step.
        materializes_scores: It makes the matrix of scores, queries by keys, which takes memory.
        recordable: What `packed` tells the device in a step of single queries can be recorded and
            played for later steps: it reads lengths and pages on the device, takes from the host no
            more than the most that they can be (`Span.kv_len`, `max_seqlen_k`), and waits for
            nothing. Before the first request, recorded steps are compared with unrecorded ones:
            another result is a PluginError, and so is reading what `PageTables` has on the host.

    Raises:
        ValueError: A name is unknown, or a set is empty that must not be.
    """

    layouts: frozenset[str] = frozenset({"padded"})
    dtypes: frozenset[str] = frozenset(DTYPES)
    devices: frozenset[str] = frozenset(DEVICES)
    features: frozenset[str] = field(default_factory=frozenset)
    head_dims: frozenset[int] | None = None
    batch_invariant: bool = False
    materializes_scores: bool = False
    recordable: bool = False

    def __post_init__(self) -> None:
        unknown(self.layouts, LAYOUTS, "layout")
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.devices, DEVICES, "device")
        unknown(self.features, FEATURES, "feature")
        if not (self.layouts and self.dtypes and self.devices):
            raise ValueError("an attention needs at least one layout, one dtype and one device")
        sizes: Any = self.head_dims
        if sizes is not None and not (
            isinstance(sizes, Set) and sizes and all(type(s) is int and s > 0 for s in sizes)
        ):
            raise ValueError(f"head_dims must be a frozenset of positive ints, not {sizes!r}")

    def lacks(self, requirements: Requirements) -> list[str]:
        """Each of `requirements` that is not met, as a reason that names it and its evidence."""
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
        if self.head_dims is not None and (odd := set(r.head_dims) - self.head_dims):
            sizes = ", ".join(map(str, sorted(odd)))
            reasons.append(f"has no kernel for head size {sizes} (only {_names(self.head_dims)})")
        return reasons


def _names(values: frozenset[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


@dataclass(frozen=True)
class BoundAttention:
    """An attention function and the mask it understands, which are one thing.

    `forward(module, query, key, value, attention_mask, **kwargs) -> (output, weights)` serves the
    padded layout. It is called once a layer in every step.

    - `module`: the layer's own attention module; `module.layer_idx` is its index from 0 on.
    - `query`: `[batch, heads, q_len, head_dim]`.
    - `key`, `value`: `[batch, kv_heads, kv_len, head_dim]`, not repeated for GQA, with what is
      cached and this step's. Values may have a `head_dim` of their own (`mixed_head_sizes`).
    - `attention_mask`: what `mask` returned; some models cut its last dimension to `kv_len`.
    - `output`: `[batch, q_len, heads, head_dim]`, that of the values, contiguous, in the dtype of
      the query or the values and on the device of the query.
    - `weights`: None, or `[batch, heads, q_len, kv_len]`, which nobody reads here.

    `kwargs` carry `scaling` (float), `is_causal` (bool; None or absent: as `module.is_causal`),
    `dropout` (0.0; anything else is refused before the call), and, for the features that the
    backend declares, `sliding_window` (int | None, tokens), `softcap` (float | None), `s_aux`
    (sinks, `[heads]`) and `position_bias` (added to the scores). Others, such as `position_ids`,
    say nothing that tensors and mask do not say, and can be ignored: accept `**kwargs`. A model
    that hands over any other one, neither None nor False, needs `own_attention`, as nobody but its
    own code knows what that asks for: the plan passes this backend over, and where the plan's call
    on empty tensors did not show it, a step is an ExecutionError.

    `mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
    dtype, device, **kwargs)` is called with keywords, by transformers, once a forward call for
    each kind of layer; see `sdpa_mask` and `eager_mask` in `transformers.masking_utils`. It must
    honour `mask_function(batch, head, query, key) -> bool` (causality, window, chunks; positions
    are columns, counted from `q_offset` and `kv_offset`) and `attention_mask` (bool
    `[batch, columns]`, False is padding, or None). It may return None only where `forward` then
    does the right thing by itself. A row that is all padding must not become NaN where other rows
    read it. It is not called in the packed layout.

    `packed(module, query, layer, **kwargs) -> output` serves the packed layout; it is needed where
    `layouts` names that.

    - `query`: `[tokens, heads, head_dim]`, strided; row by row the step's sequences, as
      `layer.step.spans` say.
    - `layer`: a `PackedLayer` that holds this step's keys and values already. Causality and the
      window are in it: its `window` counts, not `sliding_window`. With `bidirectional_blocks` some
      queries see later keys, as `layer.tables.blocks` says: those of prompts with images.
    - `output`: `[tokens, heads, head_dim]`, that of the values; dtype and device as above.

    Changes: nothing. Query, keys, values, masks and pages are not to be modified.

    Lives: inputs until the function returns, `layer` until then too; its `tables` are shared by the
    layers of a step, so that what is worked out from them can be kept for the step. The output
    belongs to the model.

    Violations: PluginError for an output of another shape, dtype or device, and for whatever is
    raised; ExecutionError where a layer never calls it. Wrong numbers are detected only in steps
    that `verify` compares.

    Attributes:
        forward: As above.
        mask: As above.
        packed: As above; None: it serves the padded layout only.
        source: Whose kernel it is, where a backend can run on several; it goes into reports.
        warm: `warm(page_size)` compiles what `packed` will need for pages of so many tokens, so
            that no request has to wait for it. Called once, before the first step, where the cache
            knows its page size.
        close: `close()` puts back what was changed outside of the model. Called once, at the end.
        native: `native(query, layer, output, **kwargs)` returns the call that computes what
            `packed` would return for these into `output`, `[tokens, heads, head_dim]` and strided,
            or None where it cannot be native. Asked for each layer in each step that a compiler
            runs natively, before any of them runs: keys and values of the step are not there yet.
            None: no step is native as a whole.
        native_again: `native_again(tables)` has every call that `native` gave for layers with the
            window of `tables` (`PageTables`) read these, with the same query and output, and
            returns whether it does; otherwise `native` is asked for each layer. Called for each
            window once, in a step of as many tokens as the last. None: always ask.

    Raises:
        TypeError: `forward` or `mask` is no function.
    """

    forward: Callable[..., Any]
    mask: Callable[..., Any]
    packed: Callable[..., Any] | None = None
    source: str | None = None
    warm: Callable[[int], None] | None = None
    close: Callable[[], None] | None = None
    native: Callable[..., NativeCall | None] | None = None
    native_again: Callable[[PageTables], bool] | None = None

    def __post_init__(self) -> None:
        for part in ("forward", "mask"):
            if not callable(getattr(self, part)):
                raise TypeError(
                    f"an attention without a {part} function does not load: padding, windows and "
                    f"causality would be lost; got {part}={getattr(self, part)!r}"
                )


@dataclass(frozen=True)
class ModelAttention:
    """The attention in the model's own code.

    Attributes:
        implementation: The name that transformers gives it: "eager".
    """

    implementation: str


class Attention(Recordable):
    """How a layer attends."""

    kind: ClassVar[str] = "attention"
    bound: ClassVar[tuple[type, ...]] = (BoundAttention, ModelAttention)
    capabilities: ClassVar[AttentionCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare `requirements` with `capabilities`; extend it for what those cannot express.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.

        Returns:
            Reasons against it; an empty list accepts.
        """
        del options
        return self.capabilities.lacks(requirements)

    @abstractmethod
    def bind(self, context: BindContext) -> BoundAttention | ModelAttention:
        """Return what every layer of the model will call. Called once a model.

        Imports of torch and of the library that does the work belong here.

        Args:
            context: `model` is None where transformers itself is still loading it;
                `requirements.windows` has the window of each layer.

        Returns:
            The functions; or a `ModelAttention`, which leaves the model's own code in its place.
        """

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), AttentionCapabilities):
            found.append("`capabilities` must be an AttentionCapabilities")
        return found
