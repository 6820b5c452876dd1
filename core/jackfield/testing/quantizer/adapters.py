"""Checks of what stands on top: adapters, weights elsewhere, compilers."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jackfield.bridge.adapter_files import hushed
from jackfield.errors import PlanError, shown
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.engines import watched
from jackfield.testing.quantizer.folders import Original
from jackfield.testing.quantizer.layers import told
from jackfield.testing.quantizer.loads import Loads
from jackfield.testing.quantizer.memory import PROMPTS
from jackfield.testing.torch_settings import kept

TARGETS = ("q_proj", "o_proj", "down_proj")
RANK, ALPHA = 4, 6


def checks(loads: Loads) -> Iterator[Check]:
    """Of each of these capabilities that is declared."""
    can = loads.backend.capabilities
    if can.adapters:
        yield Check("adapters.on_and_off", "adapters", _of(loads, _on_and_off))
    if can.merges:
        yield Check("adapters.merged", "merges", _of(loads, _merged))
    if can.offload:
        yield Check("offload.disk", "offload", _of(loads, _offloaded))
    if can.compiles:
        yield Check("compiles.layers", "compiles", _of(loads, _traced), limit=180)


def _of(
    loads: Loads, check: Callable[[Loads, str, str], str | None]
) -> Callable[[Any], str | None]:
    def run(_: object) -> str | None:
        return check(loads, loads.main(), loads.dtype())

    return run


def adapter_for(original: Original, into: Path) -> str:
    """A LoRA adapter of random weights, in a folder. Raises NotTriedError without PEFT."""
    if importlib.util.find_spec("peft") is None:
        raise NotTriedError("needs PEFT: pip install 'jackfield[peft]'")
    with kept(), torch.random.fork_rng(devices=()), hushed():
        import peft

        torch.manual_seed(5)
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), init_lora_weights=False,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = peft.get_peft_model(copy.deepcopy(original.model), config)
        model.save_pretrained(str(into))
    return str(into)


def _added(folder: str) -> dict[str, torch.Tensor]:
    """What the adapter adds to each matrix, float64, by the path of the layer."""
    from safetensors.torch import load_file

    state = load_file(Path(folder) / "adapter_model.safetensors")
    ends = ".lora_A.weight", ".lora_B.weight"
    paths = {key.removesuffix(ends[0]) for key in state if key.endswith(ends[0])}
    return {
        path.removeprefix("base_model.model."): ALPHA / RANK
        * state[path + ends[1]].double() @ state[path + ends[0]].double()
        for path in paths
    }  # fmt: skip


def _near(loads: Loads, model: Any, right: dict[str, torch.Tensor], name: str, dtype: str) -> str:
    """Layers by path say what these matrices say, as far as the quantizer promises."""
    error, worst = loads.backend.relative_error(loads.subject.options) or 0.0, 0.0
    for path, matrix in right.items():
        drawn = torch.Generator().manual_seed(1)
        given = torch.randn(33, matrix.shape[1], generator=drawn).to(getattr(torch, dtype))
        bias = loads.original(name).bias(path, len(matrix))
        with torch.inference_mode():
            found = model.get_submodule(path)(given).double() - bias
        wanted = given.double() @ matrix.T
        off = float((found - wanted).norm() / wanted.norm())
        if not off <= 1.3 * error + 8 * torch.finfo(getattr(torch, dtype)).eps:
            raise WrongError(f"{path} with the adapter is off by {off:.3g} of its outputs' size")
        worst = max(worst, off)
    return f"{len(right)} layers, at most {worst:.2g} off"


def _on_and_off(loads: Loads, name: str, dtype: str) -> str:
    original = loads.original(name)
    with tempfile.TemporaryDirectory(dir=loads.into) as text:
        folder = adapter_for(original, Path(text))
        added = _added(folder)
        arguments = loads.arguments(dtype)
        with loads.another(original.folder, adapter=folder, **arguments) as engine:
            on = {path: original.matrices[path] + more for path, more in added.items()}
            remark = _near(loads, engine.model, on, name, dtype)
            engine.generate(PROMPTS, max_new_tokens=2)
            engine.disable_adapter()
            off = {path: original.matrices[path] for path in added}
            _near(loads, engine.model, off, name, dtype)
            engine.enable_adapter()
            _near(loads, engine.model, on, name, dtype)
    return remark


def _merged(loads: Loads, name: str, dtype: str) -> str:
    original = loads.original(name)
    with tempfile.TemporaryDirectory(dir=loads.into) as text:
        folder = adapter_for(original, Path(text))
        right = {path: original.matrices[path] + more for path, more in _added(folder).items()}
        arguments = loads.arguments(dtype)
        with loads.another(
            original.folder, adapter=folder, merge_adapter=True, **arguments
        ) as engine:
            return _near(loads, engine.model, right, name, dtype)


def _offloaded(loads: Loads, name: str, dtype: str) -> str:
    """Logits are the same where a layer waits on disk."""
    if importlib.util.find_spec("accelerate") is None:
        raise NotTriedError("needs accelerate: pip install 'jackfield[accelerate]'")
    places = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
        "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    arguments = {**loads.arguments(dtype), "device_map": places}
    computed = []
    for given in (loads.arguments(dtype), arguments):
        try:
            with loads.another(loads.original(name).folder, **given) as engine:
                computed.append(watched(engine))
                engine.generate(PROMPTS, max_new_tokens=3)
        except PlanError as error:
            raise WrongError(f"declares offload, and refuses it: {shown(error, 300)}") from error
    here, away = (one.logits for one in computed)
    for prefix, logits in here.items():
        bound = 32 * torch.finfo(getattr(torch, dtype)).eps * float(logits[0].abs().max())
        off = float((away[prefix][0] - logits[0]).abs().max()) if prefix in away else float("inf")
        if not off <= bound:
            raise WrongError(f"with a layer on disk, logits behind {len(prefix)} tokens are off by "
                             f"{off:.3g}")  # fmt: skip
    return f"{len(here)} logits"


def _traced(loads: Loads, name: str, dtype: str) -> str:
    """Each layer is one graph for a compiler, and says the same."""
    layers: list[Any] = loads.layers(name, dtype)
    for layer in layers[:7]:
        torch._dynamo.reset()
        compiled: Any = torch.compile(layer.module, backend="eager", fullgraph=True)
        for rows in (1, 5):
            given = layer.inputs(rows)
            with torch.inference_mode():
                try:
                    found = compiled(given)
                except Exception as error:
                    raise told(layer, f"cannot be traced: {shown(error, 200)}") from error
                right = layer.module(given)
            if not torch.allclose(found.double(), right.double(), rtol=1e-2, atol=1e-3):
                raise told(layer, "says something else when it is compiled")
    if not layers:
        return _traced_linear()
    return f"{len(layers[:7])} layers"


def _traced_linear() -> str:
    compiled: Any = torch.compile(nn.Linear(3, 2), backend="eager", fullgraph=True)
    compiled(torch.ones(1, 3))
    return "whole layers"
