"""One forward call of a model whose steps are compiled: everything but its attention.

A step's tokens are filled up to a size that was compiled before. The compiled part takes ids and
positions and returns logits, whatever the cache and its lengths; see `opaque.py`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from transformers.masking_utils import create_masks_for_generate

from jackfield.bridge.forward import forward_of
from jackfield.bridge.image_encoder import TAKEN, TOKEN_TYPES
from jackfield.bridge.model_layers import attention_modules, layer_types
from jackfield.bridge.opaque import (
    Comparison,
    OpaqueStep,
    native_again,
    native_attention,
    tracing,
    within,
)
from jackfield.bridge.recorded import RecordedSteps
from jackfield.bridge.step_trial import StepTrial
from jackfield.contracts import NativeOffers
from jackfield.errors import PlanError, quoted
from jackfield.guarded import fault, guarded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.bridge.attention import AttentionBinding
    from jackfield.bridge.layers import Layers
    from jackfield.bridge.native_attention import NativeAttention
    from jackfield.bridge.opaque import Attend
    from jackfield.contracts import Compilation, KVCache, ModelInputs
    from jackfield.contracts.native import NativeOperators
    from jackfield.registry.backends import Registered


class CompiledForward:
    """`forward_of` for a model whose attention is opaque. `steps` counts those that were compiled.

    `attend` is the attention as it is called in steps that are not compiled, `native` the calls in
    its place, if there are any, and `attended` counts those that ran; set when it is bound, and
    `layers`, kernels that are in their place in steps that are not compiled; `traced` are those
    that are in compiled ones too. `operators` are those of the plan's backends.
    """

    attend: Attend
    attended: Callable[[Seq[int]], None]
    native: NativeAttention | None = None
    layers: Seq[Layers] = ()
    traced: Seq[Layers] = ()

    def __init__(
        self,
        model: PreTrainedModel,
        compilation: Compilation,
        registered: Registered,
        operators: NativeOperators,
        sources: Mapping[int, int],
    ) -> None:
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise PlanError(
                f"{type(model).__name__} takes no position_ids, which a compiled step needs; load "
                "it without compile"
            )
        self._model = model
        self.compilation = compilation
        self._registered = registered
        self._guard = guarded(registered, "its compiled step")
        self._modules = dict(attention_modules(model))
        self._kinds = layer_types(model.config)
        self._sources = sources  # layers that read what another one keeps
        self._uncompiled = forward_of(model)
        self._step = step = _step_of(model, "logits_to_keep" in parameters)
        compilation.offers = NativeOffers(operators, native_attention, native_again, self._count)
        with guarded(registered, "compile"), tracing():
            self._compiled = compilation.compile(step)
        if self._compiled is step or not callable(self._compiled):
            what = "the very step" if self._compiled is step else quoted(self._compiled)
            raise fault(registered, f"compile must return a compiled step, got {what}")
        self._compared = False
        self.steps = 0
        self.recorded: RecordedSteps | None = None

    def _count(self, layers: Seq[int]) -> None:
        self.attended(layers)  # is bound later than this step is made

    def record(
        self,
        cache: KVCache,
        attention: AttentionBinding,
        most: int,
        longest: int | None,
        backends: Seq[Registered],
        layers: Seq[Layers],
        *,
        traced: bool,
        named: bool,
    ) -> None:
        """Record whole decode steps of up to `most` sequences, of up to `longest` tokens each.

        The model runs what was planned, `layers` in it; what is recorded may be `traced`.
        `backends` are those that a recording may show to be wrong, which is an error where somebody
        `named` the compiler.
        """
        made = RecordedSteps(self.compilation, self._registered, self._step, self._modules, layers,
                             traced=traced)  # fmt: skip
        vocab_size = int(self._model.config.get_text_config(decoder=True).vocab_size)
        trial = StepTrial(cache, self._uncompiled, vocab_size, longest)
        made.record(cache, attention, most, trial, backends, named=named)
        self.recorded = made

    def ahead(self, most: int, *, packed: bool, prompts: bool) -> list[int]:
        """Compile decode steps of up to `most` sequences before they come; the sizes, in tokens.

        With `prompts` also packed steps of as many tokens as a compiler reads prompts in. None are
        where the compiler has to wait for a step. Raises ExecutionError.
        """
        if packed and prompts:
            most = max(most, self._reads_up_to())
        sizes = sorted({self._fill(count) for count in range(1, most + 1)})
        shapes = [(1, size) if packed else (size, 1) for size in sizes]
        before = self.compilation.graphs
        with guarded(self._registered, "ahead"), tracing():
            self.compilation.ahead(self._step, shapes)
        return sizes if self.compilation.graphs > before else []

    def _reads_up_to(self) -> int:
        with guarded(self._registered, "reads_up_to"):
            found: Any = self.compilation.reads_up_to
        if type(found) is not int or found < 0:
            raise fault(self._registered, f"reads_up_to must be a number, got {quoted(found)}")
        return found

    def close(self) -> None:
        """Let go of what was compiled and recorded; no step comes any more."""
        if self.recorded is not None:
            self.recorded.close()
        with guarded(self._registered, "close"):
            self.compilation.close()
        self.compilation.offers = NativeOffers()  # torch may keep it, and these lead to the model
        del self._compiled

    def __call__(self, inputs: ModelInputs) -> torch.Tensor:
        if inputs.fixed is not None and self.recorded is not None:
            if not self.recorded.plays():
                return self._loose(inputs)
            before = self.recorded.played
            logits = self.recorded(inputs, self._loose)
            self.steps += self.recorded.played - before
            return logits
        kwargs = inputs.kwargs
        past = kwargs.get("past_key_values")
        if past is not None and not self._compared:
            return self._compare(inputs)
        compiled = self._decodes() if inputs.decode else self._reads(kwargs)
        if TAKEN in kwargs or not compiled:
            return self._as_it_is(inputs)
        rows, width = kwargs["input_ids"].shape
        masks = None if past is None else self._masks(kwargs)
        native = self.native if past is None else None
        step = OpaqueStep(
            self.attend, self._modules, rows, width, past, masks, native, sources=self._sources
        )
        fill = self._fill
        size = (0, fill(width) - width, 0, fill(rows) - rows)
        ids, positions = kwargs["input_ids"], kwargs["position_ids"]
        if any(size):
            ids, positions = pad(ids, size), pad(positions, size)
        columns, keep = kwargs["logits_to_keep"], None
        if not inputs.decode:
            keep = _numbered(columns, width, ids.device)
            columns = slice(len(keep))
            keep = pad(keep, (0, fill(len(keep)) - len(keep)))
        elif isinstance(columns, int):
            columns = slice(width - columns, width)
        with within(step), self._guard:
            logits = self._compiled(ids, positions, keep)
        self.steps += 1
        for layers in self.traced:
            layers.played(layers.replaced)
        self._check(logits, ids, keep)
        logits = logits[:rows, columns].reshape(inputs.rows, -1, logits.shape[-1])
        return logits if inputs.row_of is None else logits.index_select(0, inputs.row_of)

    def _reads(self, kwargs: dict[str, Any]) -> bool:
        """Whether a step that reads prompts is compiled."""
        size = tuple(map(self._fill, kwargs["input_ids"].shape))
        with self._guard:
            return bool(self.compilation.reads(*size))

    def _decodes(self) -> bool:
        """Whether a decode step is compiled."""
        with self._guard:
            return bool(self.compilation.decodes())

    def _loose(self, inputs: ModelInputs) -> torch.Tensor:
        """A step that lies at a fixed place, not recorded whole."""
        fixed = inputs.fixed
        assert fixed is not None
        compiled = self._decodes()
        run, guard = (self._compiled, self._guard) if compiled else (self._step, nullcontext())
        step = OpaqueStep(self.attend, self._modules, 1, fixed.rows, run_as_it_is=not compiled)
        with within(step), guard:
            logits = run(fixed.input_ids, fixed.position_ids, None)
        self.steps += compiled
        return logits[0, : inputs.rows, None]

    def _fill(self, count: int) -> int:
        with self._guard:
            found = self.compilation.fill(count)
        if type(found) is not int or found < count:
            raise fault(
                self._registered, f"fill must return {count} or more for {count}, got {found!r}"
            )
        return found

    def _check(self, logits: Any, ids: torch.Tensor, keep: torch.Tensor | None) -> None:
        rows, width = ids.shape
        due = (rows, width if keep is None else len(keep))
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[:2] != due:
            got = list(logits.shape) if isinstance(logits, torch.Tensor) else quoted(logits)
            raise fault(
                self._registered,
                f"its compiled step must return logits [{due[0]}, {due[1]}, vocab], got {got}",
            )
        if self.compilation.graphs < 1:
            raise fault(self._registered, "ran a compiled step, and its `graphs` counts none")

    def _compare(self, inputs: ModelInputs) -> torch.Tensor:
        """The first step of padded rows, uncompiled: are the masks made here those of the model?"""
        with within(Comparison(self._masks(inputs.kwargs))):
            logits = self._as_it_is(inputs)
        self._compared = True
        return logits

    def _as_it_is(self, inputs: ModelInputs) -> torch.Tensor:
        """A step that is not compiled."""
        with ExitStack() as stack:
            for layers in self.layers:
                stack.callback(layers.install())
            return self._uncompiled(inputs)

    def _masks(self, kwargs: dict[str, Any]) -> dict[int, torch.Tensor | None]:
        """The mask of each layer, made from the outside as transformers does for its own graphs."""
        model, ids = self._model, kwargs["input_ids"]
        make: Callable[..., Any] = getattr(
            model, "create_masks_for_generate", create_masks_for_generate
        )
        found = make(
            config=model.config,
            inputs_embeds=torch.empty((*ids.shape, 0), dtype=model.dtype, device=ids.device),
            attention_mask=kwargs["attention_mask"],
            past_key_values=kwargs["past_key_values"],
            position_ids=kwargs["position_ids"],
            **{name: kwargs[name] for name in TOKEN_TYPES if name in kwargs},
        )
        if not isinstance(found, dict):
            return dict.fromkeys(self._modules, found)
        kinds, sources = self._kinds, self._sources
        return {layer: found[kinds[sources.get(layer, layer)]] for layer in self._modules}


def _step_of(model: PreTrainedModel, keeps: bool) -> Callable[..., torch.Tensor]:
    """What is compiled: from ids and positions to logits. `keeps`: the model can leave some out.

    It has a code object of its own, by which torch keeps graphs and counts them against a limit:
    no engine uses up what another may compile.
    """

    def step(
        input_ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        kwargs = {"logits_to_keep": 0 if keep is None else keep} if keeps else {}
        logits: torch.Tensor = model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **kwargs
        ).logits
        return logits if keeps or keep is None else logits[:, keep]

    own = step.__code__.replace()
    return types.FunctionType(own, step.__globals__, step.__name__, None, step.__closure__)


def _numbered(keep: int | torch.Tensor, width: int, device: torch.device) -> torch.Tensor:
    """The numbers of the columns `keep`, or of the last `keep` of `width`."""
    if isinstance(keep, torch.Tensor):
        return keep
    return torch.arange(width - keep, width, device=device)
