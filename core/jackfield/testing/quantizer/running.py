"""Checks in engines and in plain transformers code: the same layers, wherever they came from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jackfield.api import plan
from jackfield.bridge.native_calls import operator_of
from jackfield.errors import PlanError, first_line, quoted, shown
from jackfield.in_transformers.quantization import quantization
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.engines import watched
from jackfield.testing.models import Reference
from jackfield.testing.native import (
    Heard,
    agree_together,
    agrees,
    keeps_nothing,
    runs_beside_itself,
)
from jackfield.testing.quantizer.diagnosis import multiplied_with
from jackfield.testing.quantizer.layers import told
from jackfield.testing.quantizer.loads import Layer, Loads, of_main
from jackfield.testing.quantizer.memory import PROMPTS

#: Rows of a prompt, more than any tile has.
MANY = 97
#: A share of the logits: transformers' eager attention has its softmax in float32, always.
SOFTMAX = 1e-5


def checks(loads: Loads) -> Iterator[Check]:
    """All of them."""
    for dtype in loads.dtypes():
        yield Check(f"engine.{dtype}.logits", f"dtypes: {dtype}", of_main(loads, _logits, dtype))
    if loads.subject.backend.native_operators() != {}:
        for dtype in loads.dtypes():
            check = of_main(loads, _native, dtype)
            yield Check(f"layers.{dtype}.native", "native_operators", check)
    first = loads.dtype()
    yield Check("engine.two_at_once", "contract", of_main(loads, _two, first))
    yield Check("plain.from_pretrained", "contract", of_main(loads, _plain, first), limit=120)


class Dequantized(Reference):
    """A model of the matrices that its layers multiply with, in float64, whatever stores them.

    `bound` is four times what is off in the model's dtype, and where outputs are disturbed as much
    as the layers round their inputs.
    """

    def __init__(self, original: Any, layers: list[Layer], dtype: torch.dtype) -> None:
        model = copy.deepcopy(original).to(dtype)
        exact = copy.deepcopy(model).double()
        for layer in layers:
            for one in (model, exact):
                _put(one.get_submodule(layer.path), multiplied_with(layer))
        super().__init__(model)
        self._exact = exact.eval()
        self._exact.set_attn_implementation("eager")
        self._disturbed = copy.deepcopy(self._exact)
        drawn = torch.Generator().manual_seed(0)
        for layer in layers:
            _disturb(self._disturbed.get_submodule(layer.path), _unlinear(layer), drawn)

    def bound(self, tokens: tuple[int, ...]) -> float:
        """See the class."""
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            other = self._disturbed(input_ids=ids, use_cache=False).logits[0]
        right: torch.Tensor = self.logits(tokens)
        disturbed = 4 * float((other - right).abs().max())
        return super().bound(tokens) + disturbed + SOFTMAX * float(right.std())


def _put(module: Any, matrix: torch.Tensor) -> None:
    """Give a linear layer, either way round, another matrix."""
    matrix = matrix.T if isinstance(module, transformers.pytorch_utils.Conv1D) else matrix
    module.weight = nn.Parameter(matrix.to(module.weight.dtype).contiguous())


def _unlinear(layer: Layer) -> float:
    """How far a layer's outputs are from those of the matrix that it multiplies with."""
    given = layer.inputs(33)
    found = layer(given).double() - layer.bias
    right = given.double() @ multiplied_with(layer).T
    return float((found - right).norm() / right.norm())


def _disturb(module: nn.Module, share: float, drawn: torch.Generator) -> None:
    def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=drawn, dtype=output.dtype)
        found: torch.Tensor = output + share * output.norm() / output.numel() ** 0.5 * noise
        return found

    module.register_forward_hook(hook)


def _logits(loads: Loads, name: str, dtype: str) -> str:
    """Prefill, decode and batches say what the layers say, computed again in float64."""
    engine = loads.engine(name, dtype)
    layers = loads.layers(name, dtype)
    right = Dequantized(loads.original(name).model, layers, getattr(torch, dtype))
    computed = watched(engine)
    engine.generate([*PROMPTS, [9]], max_new_tokens=6)
    return computed.compare(right)


def _native(loads: Loads, name: str, dtype: str) -> str:
    """The operators that it offers as functions in C write what they return."""
    offered = loads.subject.backend.native_operators()
    if not isinstance(offered, Mapping):
        raise WrongError(f"native_operators must return a dict, got {quoted(offered)}")
    held, others = 0, set[str]()
    siblings: dict[tuple[str, torch.Size], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
    for where, layer in _of_all_sizes(loads, name, dtype):
        for rows, texts in ((1, 1), (3, 3), (33, 33), (7, 1), (16, 16), (MANY, 1)):
            with Heard(offered) as heard, torch.inference_mode():
                given = layer.inputs(rows)
                layer.module(given.view(texts, -1, given.shape[-1]))
            others |= heard.others
            for operator, args, kwargs, due in heard.calls:
                try:
                    held += agrees(operator, offered[operator], due, *args, **kwargs)
                    _same_shape(operator, due, args, kwargs)
                    if rows == MANY:
                        more = operator, offered[operator], operator_of(operator), args, kwargs
                        with torch.inference_mode():
                            keeps_nothing(*more)
                            runs_beside_itself(*more)
                    siblings.setdefault((operator, args[0].shape), []).append((args, kwargs))
                except WrongError as error:
                    raise WrongError(f"{where}, {rows} rows: {error}") from None
    with torch.inference_mode():
        for (operator, _), calls in siblings.items():
            held += agree_together(operator, offered[operator], calls, operator_of(operator))
    if not held and others:
        raise WrongError(
            f"native_operators offers {', '.join(sorted(offered))}, and its layers call "
            f"{', '.join(sorted(others))}"
        )
    if not held:
        raise NotTriedError("its layers call none of the operators that it offers natively")
    return f"{held} calls"


def _of_all_sizes(loads: Loads, name: str, dtype: str) -> Iterator[tuple[str, Layer]]:
    """Layers of the main model, and of one whose sizes are no multiples of anything."""
    for layer in loads.layers(name, dtype):
        yield layer.path, layer
    other = "odd sizes"
    try:
        stored = loads.stores(other, dtype)
    except PlanError:  # as it may: `models.odd_sizes` shows it
        return
    for layer in loads.layers(other, dtype) if stored else ():
        yield f"{layer.path} of the model {other!r}", layer


def _same_shape(
    name: str, due: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Hold the operator's fake, which tells a compiler what to plan for, to what it returns."""
    run = operator_of(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in args]
        try:
            found = run(*given, **kwargs)
        except Exception as error:
            raise WrongError(f"{name} cannot be traced: {first_line(error)}") from error
    told, right = ((one.shape, one.stride(), one.dtype) for one in (found, due))
    if told != right:
        raise WrongError(
            f"the fake of {name} says {[*told[0]]} in {told[2]}, strides {[*told[1]]}; it returns "
            f"{[*right[0]]} in {right[2]}, strides {[*right[1]]}"
        )


def _two(loads: Loads, name: str, dtype: str) -> None:
    """A second model beside the first changes nothing of it."""
    first = loads.layers(name, dtype)
    if not first:
        raise NotTriedError("it stores every weight as it is")
    before = {layer.path: layer(layer.inputs(5)).clone() for layer in first}
    other = "tied"
    try:
        loads.planned(other, dtype)
    except PlanError:
        other = name
    with loads.another(loads.original(other).folder, **loads.arguments(dtype)) as engine:
        engine.generate(PROMPTS, max_new_tokens=2)
        for layer in first:
            if not torch.equal(layer(layer.inputs(5)), before[layer.path]):
                raise told(layer, "has other outputs once a second model is loaded")
    for layer in first:
        if not torch.equal(layer(layer.inputs(5)), before[layer.path]):
            raise told(layer, "has other outputs once a second model was closed")


def _plain(loads: Loads, name: str, dtype: str) -> str:
    """`from_pretrained(quantization_config=…)` makes the same; live, an engine runs it as it is."""
    name = _whole_blocks(loads, dtype)
    if not loads.stores(name, dtype):
        raise NotTriedError("it stores every weight as it is")
    original = loads.original(name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        original.folder,
        quantization_config=quantization(loads.subject.selection),
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
    ).eval()
    layers = loads.layers_of(model, name, dtype)
    due = {layer.path for layer in loads.layers(name, dtype)}
    if odd := due ^ {layer.path for layer in layers}:
        where = "is not converted" if min(odd) in due else "is converted"
        raise WrongError(f"in plain transformers code {min(odd)} {where}, other than in an engine")
    for layer in layers:
        given = layer.inputs(65)
        off = float((layer(given).double() - layer.bias - layer.right(given)).norm())
        if not off <= layer.bound(given) * float(layer.right(given).norm()):
            raise told(layer, "in plain transformers code is not right", loads)
    return _live(loads, model, layers)


def _whole_blocks(loads: Loads, dtype: str) -> str:
    """The model whose sizes are multiples of all usual blocks, where it is taken."""
    try:
        loads.planned("wide", dtype)
    except PlanError:
        return loads.main()
    return "wide"


@torch.inference_mode()
def _alone(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].double()  # type: ignore[no-any-return]


def _live(loads: Loads, model: Any, layers: list[Layer]) -> str:
    with torch.inference_mode():
        before = [layer(layer.inputs(5)).clone() for layer in layers]
    wanted = {tuple(prompt): _alone(model, prompt) for prompt in PROMPTS}
    try:
        plan(model)
    except PlanError as error:
        raise WrongError(
            f"refuses the live model that it quantized: {shown(error, 300)}"
        ) from error
    with loads.another(model) as engine:
        chosen = engine.plan["quantizer"].registered
        if chosen.name != loads.subject.registered.name:
            raise WrongError(f"a live model that it quantized is taken for one of {chosen}")
        computed = watched(engine)
        engine.generate(PROMPTS, max_new_tokens=3)
    right = Dequantized(
        loads.original(_whole_blocks(loads, loads.dtype())).model, layers, model.dtype
    )
    for prefix, logits in wanted.items():
        bound = right.bound(prefix)
        for found in computed.logits[prefix]:
            off = float((found - logits).abs().max())
            if not off <= bound:
                raise WrongError(
                    f"live in an engine, logits behind {len(prefix)} tokens are off by {off:.3g} "
                    f"from what the model says in plain code, where {bound:.3g} is rounding"
                )
    for layer, kept in zip(layers, before, strict=True):
        if not torch.equal(layer(layer.inputs(5)), kept):
            raise told(layer, "has other outputs once an engine ran the live model")
    return f"{len(layers)} layers, and a live model"
