"""Checks of parts of matrices: what one of several processes has of a layer.

No process is started. A model is written that has the second third of every MLP, as the second of
three processes would be handed it, and its layers are held against those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from jackfield.bridge.footprint import loaded_bytes
from jackfield.bridge.shared_models import with_whole
from jackfield.contracts import Requirements
from jackfield.errors import shown
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.quantizer.diagnosis import multiplied_with
from jackfield.testing.quantizer.folders import write_part
from jackfield.testing.quantizer.layers import told
from jackfield.testing.quantizer.loads import Layer, Loads

SIZE, RANK = 3, 1
WHOLE, PART = "wide", "a third of wide"  # 128 of 384 features: a multiple of all usual groups


def checks(loads: Loads) -> Iterator[Check]:
    """One, where it declares `tensor_parallel`."""
    if loads.backend.capabilities.tensor_parallel:
        yield Check("layers.parts", "tensor_parallel", lambda _: _parts(loads), limit=120)


def _parts(loads: Loads) -> str:
    dtype = loads.dtype()
    loads.accepted(WHOLE, dtype)
    whole = {layer.path: layer for layer in loads.layers(WHOLE, dtype)}
    if not whole:
        raise NotTriedError("it stores every weight as it is")
    loads.add(PART, write_part(loads.original(WHOLE), loads.into, SIZE, RANK))
    needs = _shared(*(loads.planned(name, dtype).requirements for name in (PART, WHOLE)))
    if refused := loads.subject.registered.ask("refuse", needs, loads.subject.options):
        raise NotTriedError(f"refused by name, as it may: {shown('; '.join(refused), 300)}")
    engine = loads.engine(PART, dtype)
    promised = loads.backend.weight_bytes(needs, loads.subject.options)
    held = loaded_bytes(engine.model, loads.subject.registered)
    if promised not in (None, held):
        raise WrongError(f"weight_bytes promised {promised:,} bytes of a part, which has {held:,}")
    parts = loads.layers(PART, dtype)
    if odd := whole.keys() ^ {layer.path for layer in parts}:
        raise WrongError(f"stores {min(odd)} as a whole and not in part, or the other way round")
    for layer in parts:
        _compare(layer, whole[layer.path])
        _without_bias(layer)
    return f"{len(parts)} layers"


def _shared(part: Requirements, whole: Requirements) -> Requirements:
    """What the second of three processes asks for."""
    return replace(part, tp_size=SIZE, weights=with_whole(part.weights, whole.weights))


def _compare(part: Layer, whole: Layer) -> None:
    rows, columns = (
        slice(0, there) if here == there else slice(RANK * here, (RANK + 1) * here)
        for here, there in zip(part.weight.shape, whole.weight.shape, strict=True)
    )
    found, right = multiplied_with(part), multiplied_with(whole)[rows, columns]
    off = float((found - right).norm() / right.norm())
    if not off <= torch.finfo(part.dtype).eps:
        raise told(part, f"is a part of a layer and {off:.2g} off from what the whole says there")


def _without_bias(layer: Layer) -> None:
    """Of processes whose outputs are added up, all but one have a bias of zeros."""
    if not layer.bias.any():
        return
    bias = getattr(layer.module, "bias", None)
    if not isinstance(bias, torch.Tensor):
        raise told(layer, "has no attribute `bias`, and adds one")
    kept = bias.data
    bias.data = torch.zeros_like(bias)
    try:
        said = layer(torch.zeros(2, layer.weight.shape[1], dtype=layer.dtype))
    finally:
        bias.data = kept
    if said.any():
        raise told(layer, "adds a bias that is not its attribute `bias`")
