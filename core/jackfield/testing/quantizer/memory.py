"""Checks of what is held: the bytes that were promised, nothing beside them, whole weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from jackfield.bridge.footprint import loaded_bytes, tensors_of
from jackfield.errors import PlanError, shown
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.memory import new_tensors
from jackfield.testing.quantizer.loads import Loads, of_main

#: Models in which weights are tied, are not multiples of anything, lie the other way round, or are
#: several in one tensor.
OTHERS = ("tied", "odd sizes", "transposed", "experts", "joined")

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [21, 22, 23]]


def checks(loads: Loads) -> Iterator[Check]:
    """All of them."""
    for dtype in loads.dtypes():
        yield Check(f"bytes.{dtype}", f"dtypes: {dtype}", of_main(loads, _bytes, dtype))
    first = loads.dtype()
    yield Check("bytes.nothing_beside", "contract", of_main(loads, _beside, first))
    yield Check("layers.called", "contract", of_main(loads, _called, first))
    yield Check("whole.small", "contract", of_main(loads, _whole, first))
    for name in OTHERS:
        yield Check(f"models.{name.replace(' ', '_')}", "contract", _another(loads, name))


def _bytes(loads: Loads, name: str, dtype: str) -> str:
    """What `weight_bytes` promised, before a step and after it."""
    planned = loads.planned(name, dtype).requirements.weight_bytes
    said = loads.backend.weight_bytes(
        loads.planned(name, dtype).requirements, loads.subject.options
    )
    if said is None:
        raise NotTriedError("weight_bytes promises nothing, so plans take the model for whole")
    with loads.another(loads.original(name).folder, **loads.arguments(dtype)) as engine:
        for when, more in (("once it is loaded", 0), ("after its first step", planned // 100)):
            held = loaded_bytes(engine.model, loads.subject.registered)
            if not planned <= held <= planned + more:
                raise WrongError(
                    f"weight_bytes promised {planned:,} bytes in {dtype}, and {held:,} are held "
                    f"{when} ({_largest(loads, engine.model)})"
                )
            engine.generate(PROMPTS, max_new_tokens=2)
    return f"{planned:,} bytes"


def _largest(loads: Loads, model: nn.Module) -> str:
    """The layer that holds most, and of what."""
    sizes = {
        path: sum(t.nbytes for t in tensors_of(module, loads.subject.registered))
        for path, module in model.named_modules()
    }
    path = max(sizes, key=lambda key: sizes[key] if ".layers." in key else 0)
    parts = [f"{t.dtype}{list(t.shape)}".removeprefix("torch.") for t in
             tensors_of(model.get_submodule(path), loads.subject.registered)]  # fmt: skip
    return f"{path}: {', '.join(parts)}"


def _beside(loads: Loads, name: str, dtype: str) -> str:
    """Tensors that a loaded model brings with it and that are no part of it, after a step."""
    with new_tensors() as new:
        return _what_is_new(loads, name, dtype, new)


def _what_is_new(loads: Loads, name: str, dtype: str, new: Callable[[], list[torch.Tensor]]) -> str:
    with loads.another(loads.original(name).folder, **loads.arguments(dtype)) as engine:
        engine.generate(PROMPTS, max_new_tokens=2)
        whose = loads.subject.registered
        own = {_place(t) for module in engine.model.modules() for t in tensors_of(module, whose)}
        own |= {_place(t) for t in (*engine.model.parameters(), *engine.model.buffers())}
        stray = [t for t in new() if _place(t) not in own]
        smallest = min(m.numel() for m in loads.original(name).matrices.values())
        large = [t for t in stray if t.numel() >= smallest and t.is_floating_point()]
        shapes = {tuple(m.shape) for m in loads.original(name).matrices.values()}
        whole = [t for t in large if tuple(t.shape) in shapes or tuple(t.shape[::-1]) in shapes]
        if whole:
            held = sum(t.nbytes for t in whole)
            raise WrongError(
                f"{len(whole)} matrices of the size of a layer's weight ({held:,} bytes, such as "
                f"{whole[0].dtype} {list(whole[0].shape)}) stay in memory that are no part of the "
                "model: whole weights that somebody keeps?"
            )
    return f"{len(stray)} other tensors"


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _called(loads: Loads, name: str, dtype: str) -> str:
    """Every converted layer computes once a step, and what it stands for is not computed beside."""
    layers = loads.layers(name, dtype)
    if not layers and loads.stores(name, dtype):
        raise WrongError(
            f"converted none of the {len(loads.original(name).matrices)} linear layers of the model"
        )
    if not layers:
        raise NotTriedError("it stores every weight as it is")
    engine = loads.engine(name, dtype)
    counts = dict.fromkeys((layer.path for layer in layers), 0)

    def counting(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[path] += 1

        return hook

    hooks = [layer.module.register_forward_hook(counting(layer.path)) for layer in layers]
    before = engine.report()["scheduler"].calls
    try:
        engine.generate(PROMPTS, max_new_tokens=4)
    finally:
        for hook in hooks:
            hook.remove()
    steps = engine.report()["scheduler"].calls - before
    for path, count in counts.items():
        if count != steps:
            raise WrongError(f"{path} was called {count} times in {steps} steps")
    return f"{len(layers)} layers, each called once in each of {steps} steps"


def _whole(loads: Loads, name: str, dtype: str) -> str:
    return hold_whole(loads, name, dtype, loads.engine(name, dtype).model)


def hold_whole(loads: Loads, name: str, dtype: str, model: Any) -> str:
    """What is not converted has the numbers of the file, to the bit; tied weights are tied."""
    original, count = loads.original(name), 0
    converted = {p for p, module in model.named_modules() if loads.backend.converted(module)}
    for key, tensor in model.state_dict().items():
        path = key.rpartition(".")[0]
        inside = path in converted or any(path.startswith(f"{c}.") for c in converted)
        right = original.state.get(key)
        if right is None or inside or not isinstance(tensor, torch.Tensor):
            if not inside:
                raise WrongError(f"the model has a {key} that the file has not")
            continue
        if tensor.device.type == "meta":
            raise WrongError(f"{key} has no numbers: it is a placeholder on meta")
        if tensor.shape != right.shape or not torch.equal(tensor, right.to(tensor.dtype)):
            raise WrongError(f"{key}, which stays whole, does not hold the numbers of the file")
        if tensor.dtype not in (getattr(torch, dtype), torch.float32):
            raise WrongError(f"{key} is {tensor.dtype}, where {dtype} was planned")
        count += 1
    _tied(original.model, model)
    return f"{count} tensors whole"


def _tied(original: Any, model: Any) -> None:
    """The embedding must be what it was, and a tied head say what the embedding says."""
    before, after = original.get_input_embeddings(), model.get_input_embeddings()
    wanted = before.weight.to(after.weight.dtype)
    if not torch.equal(after.weight, wanted):
        raise WrongError("the embedding does not hold the numbers of the file")


def _another(loads: Loads, name: str) -> Callable[[Any], str | None]:
    """A model that has something odd is refused by name, or as right as any."""

    def run(_: object) -> str | None:
        loads.main()  # whether there is anything to try at all
        dtype = loads.dtype()
        try:
            loads.planned(name, dtype)
        except PlanError as error:
            text = str(error)
            if loads.subject.registered.name not in text:
                raise NotTriedError(shown(text, 300)) from None
            return f"refused by name: {shown(text, 200)}"
        engine = loads.engine(name, dtype)
        remark = hold_whole(loads, name, dtype, engine.model)
        worst = 0.0
        for layer in loads.layers(name, dtype):
            given = layer.inputs(5)
            with torch.inference_mode():
                found = layer.module(given).double() - layer.bias
            right = layer.right(given)
            off = float((found - right).norm() / right.norm())
            if not off <= SLACK * layer.error + 2 * layer.rounding(given) + 1e-6:
                from jackfield.testing.quantizer.layers import told

                raise told(layer, f"of the model {name!r} is off by {off:.3g} of its outputs' size")
            worst = max(worst, off)
        engine.generate(PROMPTS, max_new_tokens=3)
        return f"{remark}, layers at most {worst:.2g} off"

    return run


#: Matrices of fewer numbers vary more.
SLACK = 1.3
