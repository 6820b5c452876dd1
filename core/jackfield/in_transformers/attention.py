"""``attn_implementation="plugin:NAME"`` in plain transformers code."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel

from jackfield.bridge.attention import KEY, AttentionBinding
from jackfield.bridge.drivable import check_decoder
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.model_layers import own_implementation, replaceable
from jackfield.bridge.requirements import describe
from jackfield.contracts import BindContext
from jackfield.devices import input_device
from jackfield.engine.reading import check_free
from jackfield.engine.report import Report, observe
from jackfield.errors import CheckpointError, PlanError, UsageError, first_line
from jackfield.planning.solving import reasons_against
from jackfield.registry.discovery import registry
from jackfield.spelling import PREFIX, parse

logger = logging.getLogger("jackfield")

_CHECK, _SET = "_check_and_adjust_attn_implementation", "set_attn_implementation"
#: transformers' own methods, while ours stand in their place.
_originals: dict[str, Callable[..., Any]] = {}
_bindings: dict[str, AttentionBinding] = {}
#: key -> what it was registered for: the same selection for the same model needs no other.
_uses: dict[str, tuple[Any, ...]] = {}
#: key -> the selection that the caller gave
_names: dict[str, str] = {}
#: key -> the models that were given it
_users: dict[str, weakref.WeakSet[PreTrainedModel]] = {}


def install() -> None:
    """Teach `from_pretrained` and `set_attn_implementation` the names ``plugin:NAME``.

    A list of names is a list of fallbacks: the first that can serve the model is taken. Every other
    name goes the way it always went. A second call changes nothing. A plugin that cannot serve the
    model raises PlanError before weights are loaded.
    """
    if _originals:
        return
    _originals.update({name: getattr(PreTrainedModel, name) for name in (_CHECK, _SET)})
    check, change = _originals[_CHECK], _originals[_SET]

    @functools.wraps(check)
    def our_check(self: PreTrainedModel, name: Any, *args: Any, **kwargs: Any) -> Any:
        def one(each: str | None) -> Any:
            if _is_plugin(each):
                loading = bool(kwargs.get("is_init_check", False))
                return _plug_in(self, each, loading=loading, given=name)
            return check(self, each, *args, **kwargs)

        return _first(self, name, one) if isinstance(name, list | tuple) else one(name)

    @functools.wraps(change)
    def our_change(self: PreTrainedModel, name: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(name)
        if isinstance(name, list | tuple):
            name = _first(self, name, lambda each: _tried(self, each, check))
        if _is_plugin(name) and not replaceable(self):  # transformers would only warn
            name = _plug_in(self, name, loading=False)
        return change(self, name, *args, **kwargs)

    setattr(PreTrainedModel, _CHECK, our_check)
    setattr(PreTrainedModel, _SET, our_change)


def installed() -> bool:
    """Whether transformers knows the names ``plugin:NAME`` now."""
    return bool(_originals)


def _is_plugin(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and name.startswith(PREFIX)


def _refuse_parts(name: Any) -> None:
    """transformers gives parts of a live model their own names without asking them."""
    if isinstance(name, dict) and (plugins := [n for n in name.values() if _is_plugin(n)]):
        raise UsageError(
            f"set_attn_implementation({name!r}) selects plugins for parts of a model; select one "
            f"for all of it, set_attn_implementation({plugins[0]!r}), or load it with the dict"
        )


def _first(model: PreTrainedModel, names: Sequence[Any], use: Callable[[str], str]) -> str:
    """What `use` makes of the first of `names` that can serve the model. Raises PlanError."""
    if not names:
        raise UsageError("an empty list of fallbacks selects nothing; name an attention")
    reasons = []
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"attn_implementation={names!r}: {name!r} is no name of an attention")
        try:
            found = use(name)
        except (PlanError, ValueError, ImportError) as error:  # the latter are transformers' own
            reasons.append(f"{name!r} ({first_line(error)})")
            continue
        for reason in reasons:
            logger.info("attn_implementation passed over %s", reason)
        return found
    raise PlanError(
        f"none of attn_implementation={list(names)!r} can serve {type(model).__name__}: "
        f"{', '.join(reasons)}; add another, e.g. 'eager'"
    )


def _tried(model: PreTrainedModel, name: str, check: Callable[..., Any]) -> str:
    """`name`, once it is known that the loaded `model` can have it."""
    if _is_plugin(name):
        _plug_in(model, name, loading=False)
    else:
        check(model, name)
    return name


def uninstall() -> None:
    """Put transformers back as it was: its methods, and its attention and mask tables.

    A model that still selects a plugin raises a UsageError when it runs, until it is given another
    implementation.
    """
    for name, original in _originals.items():
        setattr(PreTrainedModel, name, original)
    _originals.clear()
    for key in list(_bindings):
        for model in _users.get(key, ()):
            model.register_forward_pre_hook(_TakenAway(key, _names[key]))
        _drop(key)


class _TakenAway:
    """Stands before the forward of a model whose plugin is gone, until it selects another."""

    def __init__(self, key: str, name: str) -> None:
        self._key, self._name = key, name

    def __call__(self, model: PreTrainedModel, args: Any) -> None:
        now = str(model.config.get_text_config(decoder=True)._attn_implementation)
        if now == self._key:
            raise UsageError(
                f"this model runs attn_implementation={self._name!r}, which jackfield.uninstall() "
                "took away; call model.set_attn_implementation('sdpa'), or jackfield.install() and "
                f"model.set_attn_implementation({self._name!r})"
            )
        if now.startswith(KEY):  # an engine's, which gives the model back as it was
            return
        hooks = model._forward_pre_hooks
        for number in [number for number, hook in hooks.items() if hook is self]:
            del hooks[number]


def report(model: PreTrainedModel) -> Report:
    """What was observed to run in a model that selected ``plugin:NAME`` by itself."""
    binding = _bindings.get(model.config.get_text_config(decoder=True)._attn_implementation)
    if binding is None:
        raise UsageError(
            "this model does not run an attention plugin; load it with "
            "attn_implementation='plugin:NAME' after jackfield.install()"
        )
    return Report((observe("attention", binding.registered, binding.tally, binding.source),))


def _plug_in(model: PreTrainedModel, name: str, *, loading: bool, given: Any = None) -> str:
    """Check the backend against `model`, register it, and return its key in transformers.

    `given` is what the caller wrote, a list with `name` in it perhaps.
    """
    selection = parse(name)
    registered = registry().find("attention", selection)
    options = registered.options(selection.arguments)
    if loading:
        # `model` is in the middle of its own __init__: ask a finished meta model of the same class.
        _check_part(model, name, given or name)
        shape = _shape(model, name)
        dtype, device = torch.get_default_dtype(), None
    else:
        shape, dtype, device = model, model.dtype, input_device(model)
    try:
        check_decoder(shape.config)
        needs = describe(shape, dtype=str(dtype).removeprefix("torch."), device=device)
    except CheckpointError as error:  # a model that no plugin serves
        raise PlanError(
            f"attn_implementation={name!r}: {error}; transformers' own names are for it"
        ) from None
    if reasons := reasons_against(registered, needs, options):
        raise PlanError(
            f"attn_implementation={name!r} cannot run {needs.architecture}: {'; '.join(reasons)}; "
            "choose another, e.g. 'eager'"
        )
    context = BindContext(
        model=None if loading else model, config=model.config, requirements=needs, options=options
    )
    used = (id(model.config), registered, context.requirements, options)
    for key, before in list(_uses.items()):
        if before == used:
            _users[key].add(model)
            return key
    binding = AttentionBinding(registered, context, shape)
    if binding.implementation is not None:
        # Its classes may be chosen by transformers' own names while it is made.
        binding.remove()
        return binding.implementation
    _bindings[binding.key], _uses[binding.key], _names[binding.key] = binding, used, name
    _users[binding.key] = weakref.WeakSet([model])
    # A key is written in a config and lives as long; must not refer to the config.
    weakref.finalize(model.config, _drop, binding.key).atexit = False
    return binding.key


def selected(model: PreTrainedModel) -> str:
    """The attention that a model of plain transformers code runs, as a selection of ours."""
    key = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if key in _names:
        return _names[key]
    if key != "eager" and key == own_implementation(model):
        return "eager"  # as the plugin of the model's own code is called
    check_free(model)  # the attention of an engine has no name that a caller could give
    if not any(registered.name == key for registered in registry().of_kind("attention")):
        raise UsageError(
            f"the model runs attention {key!r}, which no plugin offers; call "
            "model.set_attn_implementation('sdpa') first, or give attn_implementation"
        )
    return key


def _shape(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """A finished meta model of a model that is in the middle of its own __init__."""
    try:
        return meta_model(model.config, type(model))
    except CheckpointError as error:
        raise PlanError(
            f"attn_implementation={name!r}: {error}; transformers' own names are for it"
        ) from None


def _check_part(model: PreTrainedModel, name: str, given: Any) -> None:
    """A name for a whole model reaches all its parts while they load; one for a part, that part."""
    text = model.config.get_text_config(decoder=True)
    if text is not model.config and text._attn_implementation != given:
        raise UsageError(
            f"attn_implementation gives {name!r} to {type(model).__name__} and "
            f"{text._attn_implementation!r} to the text model in it, which is what attends; give "
            f"{{'text_config': {name!r}}}"
        )
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UsageError(
            f"attn_implementation={name!r} is for decoders, and {type(model).__name__} is none; "
            f"give {{'text_config': {name!r}}}, and it keeps its own"
        )


def _drop(key: str) -> None:
    for known in (_uses, _names, _users):
        known.pop(key, None)
    if (binding := _bindings.pop(key, None)) is not None:
        binding.remove()
