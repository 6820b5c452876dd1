"""``past_key_values=jackfield.cache("plugin:NAME", model)`` in plain transformers code."""

from __future__ import annotations

from transformers import Cache, PreTrainedModel

from jackfield.bridge.drivable import check_decoder
from jackfield.bridge.requirements import describe, with_trial
from jackfield.contracts import BindContext, TransformersCache
from jackfield.devices import input_device
from jackfield.errors import PlanError, UsageError, quoted
from jackfield.guarded import fault
from jackfield.planning.solving import reasons_against
from jackfield.registry.discovery import registry
from jackfield.spelling import parse


def cache(selection: str, model: PreTrainedModel) -> Cache:
    """An empty cache of the selected backend for one call of `model.generate`.

    `selection` is ``plugin:NAME?option=value``. Raises SelectionError or OptionError, PlanError
    where the backend cannot hold this model, UsageError where it is no cache of transformers, or
    needs to be told how long it has to be.
    """
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"a cache is made for a transformers model, not for {model!r}")
    parsed = parse(selection)
    registered = registry().find("cache", parsed)
    backend = registered.backend
    options = registered.options(parsed.arguments)
    if not isinstance(backend, TransformersCache):
        layout = backend.capabilities.layout  # type: ignore[attr-defined]
        raise UsageError(
            f"{selection!r} is not one of transformers' caches: its {layout} layout needs an "
            "attention of jackfield's own, which generate does not call; use "
            f"jackfield.load(model, cache_implementation={selection!r})"
        )
    check_decoder(model.config)
    dtype = str(model.dtype).removeprefix("torch.")
    needs = with_trial(model, describe(model, dtype=dtype, device=input_device(model)))
    if reasons := reasons_against(registered, needs, options):
        raise PlanError(f"{selection!r} cannot hold {needs.architecture}: {'; '.join(reasons)}")
    context = BindContext(model=model, config=model.config, requirements=needs, options=options)
    made = registered.ask("make", context, None)
    if not isinstance(made, Cache):
        raise fault(registered, f"make must return a transformers Cache, got {quoted(made)}")
    return made
