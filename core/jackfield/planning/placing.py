"""Where the weights of a model go: decided on a meta model, before any of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from jackfield.bridge.devices import check_device, named_device, pick_device
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.placement import DISK, Placement, spell
from jackfield.bridge.source import ModelSource
from jackfield.bridge.spreading import (
    Weigh,
    has_accelerate,
    laid_out,
    main_device,
    of_parameters,
    sizes_of,
    spread,
    tied,
)
from jackfield.contracts.requirements import Requirements
from jackfield.devices import free_bytes
from jackfield.errors import UsageError
from jackfield.planning.device_map import Asked
from jackfield.spelling import AUTO, nearest
from jackfield.units import in_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def first_device(asked: Asked, source: ModelSource) -> torch.device:
    """The device on which a step will begin. Raises UsageError for one that is not here."""
    where = asked.device_map
    if asked.device_memory is not None and isinstance(where, str) and not asked.is_strategy:
        return named_device(where)
    if source.live is not None:
        if not asked.is_plain:
            raise UsageError("a live model is used where it is; drop max_memory and offload_folder")
        if not isinstance(where, str) or (asked.is_strategy and where != AUTO):
            raise UsageError(
                f"a live model is used where it is; drop device_map={where!r}, or give its folder"
            )
    elif isinstance(where, Mapping):
        for place in set(where.values()) - {DISK}:
            check_device(place)
        return torch.device(main_device(where))
    elif asked.is_strategy and asked.max_memory is not None:
        places = [p for p in asked.max_memory if p not in ("cpu", DISK)]
        for place in places:
            check_device(place)
        return torch.device(places[0] if places else "cpu")
    elif asked.is_strategy:
        where = AUTO
    return pick_device(where, source)


def place(asked: Asked, source: ModelSource, needs: Requirements, weigh: Weigh) -> Placement:
    """Where the weights of `source` go, which is not live. Raises UsageError where they cannot.

    `needs` are those after the quantizer was chosen.
    """
    device = str(first_device(asked, source))
    if isinstance(asked.device_map, Mapping):
        model = meta_model(source.config)
        made = laid_out(model, _resolved(asked.device_map, model), needs, weigh)
        if made.spread:
            _need_accelerate(asked, "it names several places, or disk")
        return made
    total = needs.weight_bytes
    if asked.device_memory is not None and asked.device_map == AUTO:
        return Placement(device, {"": device}, {device: total})
    if not asked.is_strategy:
        _check_bound(device, total, asked)
        return Placement(device, {"": device}, {device: total})
    if asked.device_map == AUTO and (found := _single(device, total, asked)):
        return Placement(found, {"": found}, {found: total})
    _need_accelerate(asked, f"{in_units(total)} of weights do not fit on {device} alone")
    model = meta_model(source.config)
    modules = spread(model, str(asked.device_map), asked.max_memory, needs, weigh)
    made = laid_out(model, modules, needs, weigh)
    _check_room(made, model, asked, needs, weigh)
    return made


def _check_bound(device: str, total: int, asked: Asked) -> None:
    given = asked.max_memory
    if given is not None and device not in given:
        raise UsageError(
            f"max_memory says nothing of device_map={device!r}, where all weights go; name that, "
            "or device_map='auto'"
        )
    if stray := [place for place in given or () if place != device]:
        raise UsageError(
            f"max_memory names {stray[0]}, and device_map={device!r} puts nothing there; drop it"
        )


def _single(device: str, total: int, asked: Asked) -> str | None:
    """The best device that holds all weights; None: none does."""
    devices = [device]
    if device != "cpu" and asked.max_memory is None and torch.cuda.is_available():
        devices += [f"cuda:{i}" for i in range(1, torch.cuda.device_count())]
    elif asked.max_memory is not None:
        devices = [p for p in asked.max_memory if p not in ("cpu", DISK)] or ["cpu"]
    for candidate in devices:
        bound = _bound(candidate, asked)
        if bound is None or total <= bound:
            return candidate
    return None


def too_large(device: str, total: int, asked: Asked) -> int | None:
    """The bytes that `device` has for weights, where `total` of them do not fit; None: they do."""
    bound = _bound(device, asked)
    return bound if bound is not None and total > bound else None


def _bound(device: str, asked: Asked) -> int | None:
    """The bytes that weights may take on a device; None: unknown, or a question of an estimate."""
    if asked.device_memory is not None:
        return None
    if asked.max_memory is not None:
        return asked.max_memory.get(device, 0)
    return free_bytes(device)


def _need_accelerate(asked: Asked, why: str) -> None:
    if not has_accelerate():
        raise UsageError(
            f"device_map={asked.device_map!r}: {why}, and spreading them needs accelerate: pip "
            "install 'jackfield[accelerate]'"
        )


def _resolved(given: Mapping[str, str], model: PreTrainedModel) -> dict[str, str]:
    """Every parameter's place, by its name. Raises UsageError for names that are not there."""
    names = {name for name, _ in model.named_modules()}
    parameters = [name for name, _ in model.named_parameters()]
    for name in given:
        if name not in names and name not in parameters:
            raise UsageError(
                f"device_map: {type(model).__name__} has no module {name!r}{nearest(name, names)}"
            )
    found = spell(given, parameters)
    if missing := [name for name in parameters if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(f"device_map says nothing of {missing[0]}{more}; add '' for the rest")
    for name, same in tied(model).items():
        if any(name == key or name.startswith(f"{key}.") for key in given if key) and (
            spell(given, [name])[name] != found[same]
        ):
            raise UsageError(f"device_map: {name} and {same} are one weight; give them one place")
    return found


def _check_room(
    made: Placement, model: PreTrainedModel, asked: Asked, needs: Requirements, weigh: Weigh
) -> None:
    """Refuse bounds that are broken: a step needs room for what it brings in, a module at a time.

    Without bounds of the caller there is no room at all only on a machine that is full.
    """
    sizes = sizes_of(model, needs, weigh)
    where = of_parameters(made.modules, model)
    brought: dict[str, int] = {}
    for name, size in sizes.items():
        if where[name] in made.offloaded:
            owner = name.rpartition(".")[0]
            brought[owner] = brought.get(owner, 0) + size
    largest = max(brought, key=lambda name: brought[name], default="")
    for place, bound in (asked.max_memory or {}).items():
        held = made.sizes.get(place, 0)
        guest = brought.get(largest, 0) if place == made.device else 0
        if held + guest > bound:
            what = f"{in_units(held)} of weights that stay"
            what += f", and {in_units(guest)} for {largest}, which is brought in" if guest else ""
            raise UsageError(
                f"max_memory gives {place} {in_units(bound)}, which is too little for {what}; "
                f"{place}={held + guest} would do, and {needs.weight_bytes} holds all weights"
            )
