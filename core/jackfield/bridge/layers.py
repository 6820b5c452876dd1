"""Fused layers in the place of a model's own: proven, counted, and taken out again."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from jackfield.bridge.layer_proof import prove
from jackfield.bridge.opaque import is_read
from jackfield.bridge.rotary import prove_rotations, rotating_by
from jackfield.contracts import BindContext, FusedLayer, FusedRotary
from jackfield.errors import ExecutionError, PlanError, PluginError, first_line, quoted
from jackfield.guarded import fault, guarded
from jackfield.registry.backends import Choice, Registered
from jackfield.spelling import AUTO

logger = logging.getLogger("jackfield")


class Layers:
    """One kernel in a model. `calls` counts those of its layers; `replaced` is how many it has."""

    def __init__(
        self,
        registered: Registered,
        fused: FusedLayer | FusedRotary,
        modules: Sequence[nn.Module],
        context: BindContext,
    ) -> None:
        self.registered = registered
        self.calls = 0
        self._noted: list[nn.Module] | None = None  # what is called in a step that is recorded
        self._forwards = self._proven(fused, modules, context)
        self._made_by = (f"{registered} {context.options!r}", type(registered.backend).__module__)
        self.replaced = len(self._forwards)
        whose = f" of {fused.source}" if fused.source else ""
        self.source = f"{self.replaced} {_names(self._forwards)}{whose}"

    def install(self) -> Callable[[], None]:
        """Put the kernel into its layers. Returns the function that takes it out."""
        for module, forward in self._forwards:
            module.forward = _InPlace(module, forward, self._made_by)

        def restore() -> None:
            for module, _ in self._forwards:
                del module.forward  # what shows again is the method of its class

        return restore

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the layers be the model's own for a while; beside compiled steps they are already."""
        replaced = [module for module, _ in self._forwards if "forward" in vars(module)]
        here = [(module, module.forward) for module in replaced]
        try:
            for module, _ in here:
                del module.forward
            yield
        finally:
            for module, forward in here:
                module.forward = forward

    def _proven(
        self,
        fused: FusedLayer | FusedRotary,
        modules: Sequence[nn.Module],
        context: BindContext,
    ) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """The functions that stand in for the layers' own, proven; calls of them are counted."""
        made = [(module, _made(self.registered, fused, module)) for module in modules]
        if isinstance(fused, FusedLayer):
            prove(self.registered, made)
            return [(module, self._counted(module, forward)) for module, forward in made]
        dtype = getattr(torch, context.requirements.dtype)
        prove_rotations(self.registered, made, dtype, context.device)
        counted = [(module, self._counted(module, rotation)) for module, rotation in made]
        return [(module, rotating_by(module, rotation)) for module, rotation in counted]

    def _counted(self, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count(module)
            return function(*args, **kwargs)

        return counted

    def _count(self, module: nn.Module) -> None:
        """What stands in for a layer's own is called."""
        if is_read():
            return  # `played` counts steps that are compiled
        if self._noted is None:
            self.calls += 1
        else:
            self._noted.append(module)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[nn.Module]]:
        """Calls are noted and not counted; yields those since `again`."""
        before, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            self._noted = before

    def again(self) -> None:
        """A step that is recorded begins, for the first time or once more."""
        if self._noted is not None:
            self._noted.clear()

    def played(self, calls: int) -> None:
        """Count a step that was recorded, with so many calls in it."""
        self.calls += calls


class _InPlace:
    """A kernel in the place of the `forward` of `module`. A copy of that has its class's own."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], made_by: tuple[str, str]
    ) -> None:
        self._module, self._forward = module, forward
        #: Whose function it is, and in which file: a graph that was traced with it is kept by that.
        self.made_by = made_by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        module = known.get(id(self._module), self._module)
        return types.MethodType(type(module).forward, module)


def layers_for(choices: Sequence[Choice], model: nn.Module) -> list[list[nn.Module]]:
    """The layers of `model`, which may be on the meta device, that each of the kernels replaces.

    Raises PlanError where one finds none, or two would replace the same.
    """
    found: list[list[nn.Module]] = []
    taken: dict[int, Choice] = {}
    for choice in choices:
        fits = partial(_fits, choice)
        layers = [m for m in model.modules() if fits(m)]
        if not layers:
            raise PlanError(
                f"{choice.registered} finds no layer to replace in {type(model).__name__}; drop it"
            )
        for module in layers:
            if (rival := taken.setdefault(id(module), choice)) is not choice:
                raise PlanError(
                    f"{choice.registered} and {rival.registered} both replace "
                    f"{type(module).__name__}; name one of them"
                )
        found.append(layers)
    return found


def _fits(choice: Choice, module: nn.Module) -> bool:
    return bool(choice.registered.ask("fits", module, choice.options))


def bind_layers(
    choices: Sequence[Choice], model: nn.Module, context: Callable[[Choice], BindContext]
) -> list[Layers]:
    """Each of the chosen kernels, bound to the model; nothing is changed in it yet.

    Raises PlanError where one finds no layer, ExecutionError where it is not what it replaces. Who
    was chosen by `auto` is left out then, with a warning.
    """
    found = []
    for choice, modules in zip(choices, layers_for(choices, model), strict=True):
        try:
            bound_to = context(choice)
            bound = choice.registered.bind(bound_to)
            found.append(Layers(choice.registered, bound, modules, bound_to))
        except (ExecutionError, PluginError, torch.OutOfMemoryError) as error:
            if choice.how != AUTO:
                raise
            logger.warning("auto goes on without %s: %s", choice.registered, first_line(error))
    return found


def _made(
    registered: Registered, fused: FusedLayer | FusedRotary, module: nn.Module
) -> Callable[..., Any]:
    if "forward" in vars(module):
        raise ExecutionError(
            f"{registered} would replace a {type(module).__name__} whose forward somebody else "
            "has replaced; undo that first"
        )
    with guarded(registered, f"make for {type(module).__name__}"):
        made = fused.make(module)
    if not callable(made):
        raise fault(registered, f"make must return a function, got {quoted(made)}")
    return made


def _names(forwards: Sequence[tuple[nn.Module, Any]]) -> str:
    return ", ".join(sorted({type(module).__name__ for module, _ in forwards})) or "layers"
