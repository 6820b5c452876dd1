"""``attn_implementation="plugin:NAME"`` in plain transformers code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from jackfield.bridge.attention import AttentionPort
from jackfield.bridge.requirements import describe, skeleton
from jackfield.contracts import BindContext
from jackfield.discovery import registry
from jackfield.errors import PlanError, UsageError
from jackfield.planning import judge
from jackfield.report import Report, observe
from jackfield.selection import PREFIX, make_options, parse

_METHOD = "_check_and_adjust_attn_implementation"
_original: Callable[..., str] | None = None
_ports: dict[str, AttentionPort] = {}


def install() -> None:
    """Teach `from_pretrained` and `set_attn_implementation` the names ``plugin:NAME``.

    Every other name goes the way it always went. A second call changes nothing. A plugin that
    cannot serve the model raises PlanError before weights are loaded.
    """
    global _original
    if _original is not None:
        return
    original = getattr(PreTrainedModel, _METHOD)

    @functools.wraps(original)
    def check(self: PreTrainedModel, name: str | None, *args: Any, **kwargs: Any) -> str:
        if isinstance(name, str) and name.startswith(PREFIX):
            return _plug_in(self, name, loading=bool(kwargs.get("is_init_check", False)))
        return str(original(self, name, *args, **kwargs))

    _original = original
    setattr(PreTrainedModel, _METHOD, check)


def uninstall() -> None:
    """Put transformers back as it was: its method, and its attention and mask tables.

    Models that still select a plugin fail by name when they run; give them another
    implementation first.
    """
    global _original
    if _original is None:
        return
    setattr(PreTrainedModel, _METHOD, _original)
    _original = None
    for port in _ports.values():
        port.remove()
    _ports.clear()


def report(model: PreTrainedModel) -> Report:
    """What was observed to run in a model that selected ``plugin:NAME`` by itself."""
    port = _ports.get(model.config.get_text_config(decoder=True)._attn_implementation)
    if port is None:
        raise UsageError(
            "this model does not run an attention plugin; load it with "
            "attn_implementation='plugin:NAME' after jackfield.install()"
        )
    return Report((observe("attention", port.registered, port.tally, port.source),))


def _plug_in(model: PreTrainedModel, name: str, *, loading: bool) -> str:
    """Check the backend against `model`, register it, and return its key in transformers."""
    selection = parse(name)
    registered = registry().find("attention", selection)
    owner = f"attention {registered.name!r}"
    options = make_options(registered.backend.options, selection.arguments, owner)
    if loading:
        # `model` is in the middle of its own __init__: ask a finished skeleton of the same class.
        shape = skeleton(model.config, type(model))
        dtype, device = torch.get_default_dtype(), None
    else:
        shape, dtype, device = model, model.dtype, model.device.type
    needs = describe(shape, dtype=str(dtype).removeprefix("torch."), device=device)
    if reasons := judge(registered.backend, needs, options):
        raise PlanError(
            f"attn_implementation={name!r} cannot run {needs.architecture}: {'; '.join(reasons)}; "
            "choose another, e.g. 'eager'"
        )
    context = BindContext(
        model=None if loading else model, config=model.config, requirements=needs, options=options
    )
    port = AttentionPort(registered, context)
    if port.in_tables:
        _ports[port.key] = port
    return port.key
