"""``attn_implementation="plugin:NAME"`` in plain transformers code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel

from jackfield.bridge.attention import AttentionPort
from jackfield.bridge.requirements import describe, replaceable, skeleton
from jackfield.contracts import BindContext
from jackfield.discovery import registry
from jackfield.errors import PlanError, UsageError
from jackfield.planning import judge
from jackfield.report import Report, observe
from jackfield.selection import PREFIX, make_options, parse

_CHECK, _SET = "_check_and_adjust_attn_implementation", "set_attn_implementation"
#: transformers' own methods, while ours stand in their place.
_originals: dict[str, Callable[..., Any]] = {}
_ports: dict[str, AttentionPort] = {}


def install() -> None:
    """Teach `from_pretrained` and `set_attn_implementation` the names ``plugin:NAME``.

    Every other name goes the way it always went. A second call changes nothing. A plugin that
    cannot serve the model raises PlanError before weights are loaded.
    """
    if _originals:
        return
    _originals.update({name: getattr(PreTrainedModel, name) for name in (_CHECK, _SET)})
    check, change = _originals[_CHECK], _originals[_SET]

    @functools.wraps(check)
    def our_check(self: PreTrainedModel, name: str | None, *args: Any, **kwargs: Any) -> Any:
        if _is_plugin(name):
            return _plug_in(self, name, loading=bool(kwargs.get("is_init_check", False)))
        return check(self, name, *args, **kwargs)

    @functools.wraps(change)
    def our_change(self: PreTrainedModel, name: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_plugin(name) and not replaceable(self):  # transformers would only warn
            name = _plug_in(self, name, loading=False)
        return change(self, name, *args, **kwargs)

    setattr(PreTrainedModel, _CHECK, our_check)
    setattr(PreTrainedModel, _SET, our_change)


def _is_plugin(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and name.startswith(PREFIX)


def uninstall() -> None:
    """Put transformers back as it was: its methods, and its attention and mask tables.

    Models that still select a plugin fail by name when they run; give them another
    implementation first.
    """
    for name, original in _originals.items():
        setattr(PreTrainedModel, name, original)
    _originals.clear()
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
    return Report((observe("attention", port.registered, port.tally),))


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
    port = AttentionPort(registered, context, shape)
    if port.in_tables:
        _ports[port.key] = port
    return port.key
