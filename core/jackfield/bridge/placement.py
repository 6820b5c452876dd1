"""Where the weights of a model go: decided on a skeleton, before any of them is read.

accelerate spreads them; a single device needs none of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.devices import check_device, named_device, pick_device
from jackfield.bridge.requirements import skeleton
from jackfield.bridge.source import ModelSource, quiet
from jackfield.contracts.requirements import BYTES, Requirements, Weight
from jackfield.devices import free_bytes, input_device
from jackfield.errors import ExecutionError, UsageError
from jackfield.planning.placement import DISK, Asked, Placement, spell
from jackfield.spelling import AUTO, nearest
from jackfield.units import in_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What a weight takes once it is loaded, in bytes; None: nobody can tell.
Weigh = Callable[[Weight], int | None]


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
        return torch.device(_main(where))
    elif asked.is_strategy and asked.max_memory is not None:
        places = [p for p in asked.max_memory if p not in ("cpu", DISK)]
        for place in places:
            check_device(place)
        return torch.device(places[0] if places else "cpu")
    elif asked.is_strategy:
        where = AUTO
    return pick_device(where, source)


def _main(modules: Mapping[str, str]) -> str:
    """Where accelerate has a step begin: the first device that computes."""
    return min((p for p in modules.values() if p not in ("cpu", DISK)), default="cpu")


def placed_live(model: PreTrainedModel) -> Placement:
    """Where a live model is, as accelerate dispatched it."""
    device = str(input_device(model))
    given: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {"": device}
    modules = {name: f"cuda:{p}" if isinstance(p, int) else str(p) for name, p in given.items()}
    if len(set(modules.values())) == 1 and DISK not in modules.values():
        modules = {"": device}  # moved as a whole, before or after
    where = _of_parameters(modules, model)
    sizes = dict.fromkeys(modules.values(), 0)
    for name, parameter in model.named_parameters():
        sizes[where.get(name, device)] += parameter.numel() * parameter.element_size()
    return Placement(device, modules, sizes)


def place(asked: Asked, source: ModelSource, needs: Requirements, weigh: Weigh) -> Placement:
    """Where the weights of `source` go, which is not live. Raises UsageError where they cannot.

    `needs` are those after the quantizer was chosen.
    """
    device = str(first_device(asked, source))
    if isinstance(asked.device_map, Mapping):
        model = skeleton(source.config)
        made = _laid_out(model, _resolved(asked.device_map, model), needs, weigh)
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
    model = skeleton(source.config)
    modules = _spread(model, asked, needs, weigh)
    made = _laid_out(model, modules, needs, weigh)
    _check_room(made, model, asked, needs, weigh)
    return made


def _bound(device: str, asked: Asked) -> int | None:
    """What weights may take on a device, in bytes; None: nobody can tell, or that is asked."""
    if asked.device_memory is not None:
        return None
    if asked.max_memory is not None:
        return asked.max_memory.get(device, 0)
    return free_bytes(device)


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


def has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


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
    for name, same in _tied(model).items():
        if any(name == key or name.startswith(f"{key}.") for key in given if key) and (
            spell(given, [name])[name] != found[same]
        ):
            raise UsageError(f"device_map: {name} and {same} are one weight; give them one place")
    return found


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Other names of parameters -> the name under which they are counted."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def _of_parameters(modules: Mapping[str, str], model: PreTrainedModel) -> dict[str, str]:
    return spell(modules, (name for name, _ in model.named_parameters()))


def _spread(
    model: PreTrainedModel, asked: Asked, needs: Requirements, weigh: Weigh
) -> dict[str, str]:
    """Every parameter's place, by accelerate's rules and the quantizer's bytes."""
    from transformers.integrations import accelerate as spreading

    sizes = _sizes(model, needs, weigh)
    memory = _memory(asked, spreading.get_max_memory)
    first = next(iter(memory))
    memory[first] = max(0, memory[first] - _added(sizes, needs, weigh))
    sizer: Any = _Sizer(sizes)
    common: dict[str, Any] = {
        "no_split_module_classes": model._no_split_modules,
        "hf_quantizer": sizer,
    }
    with quiet():
        if asked.device_map != "sequential":
            low = asked.device_map == "balanced_low_0"
            memory = spreading.get_balanced_memory(model, memory, low_zero=low, **common)
        found = spreading.infer_auto_device_map(model, max_memory=memory, **common)
    told = {k: f"cuda:{p}" if isinstance(p, int) else str(p) for k, p in found.items()}
    return _of_parameters(told, model)


def _memory(asked: Asked, measure: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """What weights may take of each device, in accelerate's keys and order.

    Where the caller says nothing, nine tenths of what is free: a step needs some, too.
    """
    if asked.max_memory is not None:
        keys = {place: _native(place) for place in asked.max_memory}
        given = {keys[place]: size for place, size in asked.max_memory.items() if place != DISK}
        return dict(sorted(given.items(), key=lambda pair: str(pair[0]) == "cpu"))
    found = {place: int(0.9 * size) for place, size in measure().items()}
    if (free := free_bytes("cpu")) is not None:  # which knows of containers
        found["cpu"] = min(found["cpu"], int(0.9 * free))
    return found


def _native(place: str) -> int | str:
    """A place as accelerate compares it: CUDA devices by their number.

    Without one it is the caller's current device; threads that read weights have one of their own.
    """
    kind, _, index = place.partition(":")
    if kind not in ("cuda", "xpu"):
        return place
    return int(index) if index else int(getattr(torch, kind).current_device())


def _added(sizes: Mapping[str, int], needs: Requirements, weigh: Weigh) -> int:
    """The bytes of an adapter, which stays where a step begins."""
    return sum(weigh(w) or 0 for w in needs.weights if w.name not in sizes)


class _Sizer:
    """Tells transformers, in place of one of its quantizers, what a weight will take."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    def param_element_size(self, model: Any, name: str, tensor: torch.Tensor) -> float:
        size = self._sizes.get(name)
        return tensor.element_size() if size is None else size / max(1, tensor.numel())


def _sizes(model: PreTrainedModel, needs: Requirements, weigh: Weigh) -> dict[str, int]:
    """Bytes by parameter, each once however often it is used."""
    known = {weight.name: weight for weight in needs.weights}
    found = {}
    for name, _ in model.named_parameters():
        if (weight := known.get(name)) is not None:
            size = weigh(weight)
            plain = weight.numbers * BYTES[weight.dtype or needs.dtype]
            found[name] = plain if size is None else size
    return found


def _laid_out(
    model: PreTrainedModel, parameters: Mapping[str, str], needs: Requirements, weigh: Weigh
) -> Placement:
    """The placement in which every parameter of `model` is where `parameters` says."""
    sizes = _sizes(model, needs, weigh)
    device = _main(parameters)
    totals = {device: _added(sizes, needs, weigh)} | {
        place: 0 for place in parameters.values() if place != device
    }
    for name, size in sizes.items():
        totals[parameters[name]] += size
    if len(totals) == 1:
        return Placement(device, {"": device}, totals)
    everywhere = dict(parameters) | {n: parameters[same] for n, same in _tied(model).items()}
    # Modules as large as can be: a layer's inputs are moved once, and transformers matches the
    # names of a map as prefixes, where "layers.1" would stand for "layers.10" too.
    modules = dict(_uniform(model, "", everywhere))
    return Placement(device, modules, {place: size for place, size in totals.items() if size})


def _uniform(
    module: torch.nn.Module, name: str, parameters: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(name, place) of the largest modules, or parameters, that lie in one place."""
    prefix = f"{name}." if name else ""
    inside = [f"{prefix}{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
    places = {parameters[n] for n in inside}
    if name and len(places) < 2:  # buffers alone are where they are used
        yield name, places.pop() if places else _main(parameters)
        return
    for own, _ in module.named_parameters(recurse=False):
        yield f"{prefix}{own}", parameters[f"{prefix}{own}"]
    for child, part in module.named_children():
        yield from _uniform(part, f"{prefix}{child}", parameters)


def _check_room(
    made: Placement, model: PreTrainedModel, asked: Asked, needs: Requirements, weigh: Weigh
) -> None:
    """Refuse bounds that are broken: a step needs room for what it brings in, a module at a time.

    Without bounds of the caller there is no room at all only on a machine that is full.
    """
    sizes = _sizes(model, needs, weigh)
    where = _of_parameters(made.modules, model)
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


def native(placement: Placement) -> dict[str, int | str]:
    """The modules in the form that `from_pretrained` takes."""
    return {name: _native(place) for name, place in placement.modules.items()}


def check_placed(model: PreTrainedModel, placement: Placement) -> None:
    """Raise ExecutionError where a weight is not where the plan has it."""
    away = set(placement.offloaded)
    for name, place in _of_parameters(placement.modules, model).items():
        found = model.get_parameter(name).device
        wanted = torch.device("meta" if place in away else place)
        if found.type != wanted.type or (wanted.index or 0) != (found.index or 0):
            raise ExecutionError(f"{name} was to be on {place} and is on {found}")


@contextlib.contextmanager
def folder_for(placement: Placement | None, asked: Asked) -> Iterator[Path | None]:
    """A folder for weights on disk, removed with all in it; None where none go there."""
    if placement is None or DISK not in placement.modules.values():
        yield None
        return
    try:
        if asked.offload_folder is not None:
            asked.offload_folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix="jackfield-", dir=asked.offload_folder)
    except OSError as error:
        raise UsageError(
            f"no weights can be written to offload_folder={str(asked.offload_folder)!r}: "
            f"{error.strerror}; name another"
        ) from None
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def no_notes() -> Iterator[None]:
    """Keep accelerate from warning of what the plan says."""
    log = logging.getLogger("accelerate.big_modeling")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
