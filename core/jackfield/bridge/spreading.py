"""Weights spread over several places by accelerate's rules, and the folder of those on disk."""

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

from jackfield.bridge.placement import DISK, Placement, spell
from jackfield.bridge.quiet import quiet
from jackfield.contracts.requirements import BYTES, Requirements, Weight
from jackfield.devices import free_bytes, input_device
from jackfield.errors import ExecutionError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What a weight takes once it is loaded, in bytes; None: nobody can tell.
Weigh = Callable[[Weight], int | None]


def main_device(modules: Mapping[str, str]) -> str:
    """Where accelerate has a step begin: the first device that computes."""
    return min((p for p in modules.values() if p not in ("cpu", DISK)), default="cpu")


def placed_live(model: PreTrainedModel) -> Placement:
    """Where a live model is, as accelerate dispatched it."""
    device = str(input_device(model))
    given: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {"": device}
    modules = {name: f"cuda:{p}" if isinstance(p, int) else str(p) for name, p in given.items()}
    if len(set(modules.values())) == 1 and DISK not in modules.values():
        modules = {"": device}  # moved as a whole, before or after
    where = of_parameters(modules, model)
    sizes = dict.fromkeys(modules.values(), 0)
    for name, parameter in model.named_parameters():
        sizes[where.get(name, device)] += parameter.numel() * parameter.element_size()
    return Placement(device, modules, sizes)


def has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


def tied(model: PreTrainedModel) -> dict[str, str]:
    """Other names of parameters -> the name under which they are counted."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def of_parameters(modules: Mapping[str, str], model: PreTrainedModel) -> dict[str, str]:
    return spell(modules, (name for name, _ in model.named_parameters()))


def spread(
    model: PreTrainedModel,
    strategy: str,
    max_memory: Mapping[str, int] | None,
    needs: Requirements,
    weigh: Weigh,
) -> dict[str, str]:
    """Every parameter's place, by accelerate's rules and the quantizer's bytes."""
    from transformers.integrations import accelerate as accelerated

    sizes = sizes_of(model, needs, weigh)
    memory = _memory(max_memory, accelerated.get_max_memory)
    first = next(iter(memory))
    memory[first] = max(0, memory[first] - _added(sizes, needs, weigh))
    sizer: Any = _Sizer(sizes)
    common: dict[str, Any] = {
        "no_split_module_classes": model._no_split_modules,
        "hf_quantizer": sizer,
    }
    with quiet():
        if strategy != "sequential":
            low = strategy == "balanced_low_0"
            memory = accelerated.get_balanced_memory(model, memory, low_zero=low, **common)
        found = accelerated.infer_auto_device_map(model, max_memory=memory, **common)
    places = {k: f"cuda:{p}" if isinstance(p, int) else str(p) for k, p in found.items()}
    return of_parameters(places, model)


def _memory(
    max_memory: Mapping[str, int] | None, measure: Callable[[], dict[Any, Any]]
) -> dict[Any, Any]:
    """What weights may take of each device, in accelerate's keys and order.

    Where the caller says nothing, nine tenths of what is free: a step needs some, too.
    """
    if max_memory is not None:
        keys = {place: _native(place) for place in max_memory}
        given = {keys[place]: size for place, size in max_memory.items() if place != DISK}
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


def sizes_of(model: PreTrainedModel, needs: Requirements, weigh: Weigh) -> dict[str, int]:
    """Bytes by parameter, each once however often it is used."""
    known = {weight.name: weight for weight in needs.weights}
    found = {}
    for name, _ in model.named_parameters():
        if (weight := known.get(name)) is not None:
            size = weigh(weight)
            plain = weight.numbers * BYTES[weight.dtype or needs.dtype]
            found[name] = plain if size is None else size
    return found


def laid_out(
    model: PreTrainedModel, parameters: Mapping[str, str], needs: Requirements, weigh: Weigh
) -> Placement:
    """The placement in which every parameter of `model` is where `parameters` says."""
    sizes = sizes_of(model, needs, weigh)
    device = main_device(parameters)
    totals = {device: _added(sizes, needs, weigh)} | {
        place: 0 for place in parameters.values() if place != device
    }
    for name, size in sizes.items():
        totals[parameters[name]] += size
    if len(totals) == 1:
        return Placement(device, {"": device}, totals)
    everywhere = dict(parameters) | {n: parameters[same] for n, same in tied(model).items()}
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
        yield name, places.pop() if places else main_device(parameters)
        return
    for own, _ in module.named_parameters(recurse=False):
        yield f"{prefix}{own}", parameters[f"{prefix}{own}"]
    for child, part in module.named_children():
        yield from _uniform(part, f"{prefix}{child}", parameters)


def native(placement: Placement) -> dict[str, int | str]:
    """The modules in the form that `from_pretrained` takes."""
    return {name: _native(place) for name, place in placement.modules.items()}


def check_placed(model: PreTrainedModel, placement: Placement) -> None:
    """Raise ExecutionError where a weight is not where the plan has it."""
    away = set(placement.offloaded)
    for name, place in of_parameters(placement.modules, model).items():
        found = model.get_parameter(name).device
        wanted = torch.device("meta" if place in away else place)
        if found.type != wanted.type or (wanted.index or 0) != (found.index or 0):
            raise ExecutionError(f"{name} was to be on {place} and is on {found}")


@contextlib.contextmanager
def folder_for(placement: Placement | None, offload_folder: Path | None) -> Iterator[Path | None]:
    """A folder for weights on disk, removed with all in it; None where none go there."""
    if placement is None or DISK not in placement.modules.values():
        yield None
        return
    try:
        if offload_folder is not None:
            offload_folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix="jackfield-", dir=offload_folder)
    except OSError as error:
        raise UsageError(
            f"no weights can be written to offload_folder={str(offload_folder)!r}: "
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
