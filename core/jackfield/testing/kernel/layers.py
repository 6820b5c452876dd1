"""The layers that a kernel replaces: found in the kit's models, with weights drawn wide."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.requirements import describe
from jackfield.contracts import (
    BindContext,
    FusedLayer,
    FusedRotary,
    KernelCapabilities,
    Requirements,
)
from jackfield.planning.solving import reasons_against
from jackfield.testing.checks import NotTriedError, WrongError
from jackfield.testing.models import FAMILIES, MODELS, arguments_of, build
from jackfield.testing.subject import Subject

#: The dtype in which everything is checked that is not about dtypes: the first that is declared.
PREFERRED = ("float32", "float64", "bfloat16", "float16")
#: A size of layers that is no power of two and no multiple of a vector.
WIDE = 132
#: Where layers are looked for.
WHERE = (*MODELS, *FAMILIES)

Forward = Callable[..., Any]


def capabilities_of(subject: Subject) -> KernelCapabilities:
    return subject.backend.capabilities  # type: ignore[no-any-return]


def main_dtype(subject: Subject) -> str:
    return next(d for d in PREFERRED if d in capabilities_of(subject).dtypes)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a model, and what the kernel puts in the place of its `forward`.

    Attributes:
        module: In the dtype that is checked, its parameters random.
        exact: The same in float64.
        fused: What the kernel made for it.
        size: The last dimension of its input.
    """

    module: nn.Module
    exact: nn.Module
    fused: Forward

    @property
    def size(self) -> int:
        return next(self.module.parameters()).shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype


def fitting(subject: Subject) -> dict[str, str]:
    """The classes of layers that `subject` fits -> the model of `WHERE` that has it."""
    found: dict[str, str] = {}
    for name in WHERE:
        for module in build(name, seed=subject.seed).modules():
            title = type(module).__name__
            if title not in found and fits(subject, module):
                found[title] = name
    return found


def fits(subject: Subject, module: nn.Module) -> bool:
    """Whether it fits, as the engine asks. Raises WrongError for an answer that is no bool."""
    answer = subject.registered.ask("fits", module, subject.options)
    if not isinstance(answer, bool):
        raise WrongError(f"fits must say True or False, not {answer!r}")
    if answer and not any(True for _ in module.parameters()):
        raise WrongError(
            f"it fits {type(module).__name__}, which has no parameter: a FusedLayer is for layers "
            "that have one, a FusedRotary for those that call apply_rotary_pos_emb"
        )
    return answer


def agree(subject: Subject) -> str:
    """Raise WrongError unless `fits` says the same of a model with and without numbers."""
    count = 0
    for name in WHERE:
        model: Any = build(name, seed=subject.seed)
        before = {n: p.clone() for n, p in model.named_parameters()}
        there = [n for n, m in model.named_modules() if fits(subject, m)]
        empty = meta_model(model.config, type(model))
        planned = [n for n, m in empty.named_modules() if fits(subject, m)]
        if there != planned:
            odd = sorted(set(there) ^ set(planned))[0]
            where = "with weights and not before" if odd in there else "before there are weights"
            raise WrongError(f"it fits {odd} of {type(model).__name__} {where}")
        if any(not torch.equal(p, before[n]) for n, p in model.named_parameters()):
            raise WrongError("fits changes the weights of a layer that it is asked about")
        count += len(there)
    return f"{count} layers"


def layers(
    subject: Subject, title: str, name: str, dtype: str = "", hidden_size: int = WIDE, **more: Any
) -> list[Layer]:
    """The layers of that class in the model of that name, random, each with its function.

    `more` are arguments of its config. Raises NotTriedError where the backend refuses the model.
    """
    sizes = {"hidden_size": hidden_size} | _heads(name)
    context, modules = placed(subject, title, name, dtype, **sizes, **more)
    generator = torch.Generator().manual_seed(subject.seed)
    for module in modules:
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.4
            parameter.data += noise.to(parameter)
    made = functions(subject.registered.bind(context), modules)
    return [
        Layer(m, copy.deepcopy(m).double(), forward)
        for m, forward in zip(modules, made, strict=True)
    ]


def placed(
    subject: Subject, title: str, name: str, dtype: str = "", **config: Any
) -> tuple[BindContext, list[nn.Module]]:
    """The model of that name, for `bind`, and its layers of that class that `subject` fits.

    Raises NotTriedError where the backend refuses the model.
    """
    wanted = getattr(torch, dtype or main_dtype(subject))
    model: Any = build(name, wanted, subject.seed, **config)
    model.to(subject.device)
    needs = requirements_of(subject, model)
    if reasons := reasons_against(subject.registered, needs, subject.options):
        raise NotTriedError(f"it refuses {needs.architecture}: {'; '.join(reasons)}")
    modules = [m for m in model.modules() if type(m).__name__ == title and fits(subject, m)]
    context = BindContext(
        model=model, config=model.config, requirements=needs, options=subject.options
    )
    return context, modules


def functions(fused: FusedLayer | FusedRotary, modules: list[nn.Module]) -> list[Forward]:
    """What it makes for each of them."""
    made = [fused.make(module) for module in modules]
    for forward in made:
        if not callable(forward):
            raise WrongError(f"make must return a function, not {type(forward).__name__}")
    return made


#: What layers may read of a config -> what is tried of it.
READ: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu_pytorch_tanh", "relu", "silu"),
    "hidden_activation": ("silu", "relu"),
    "mlp_bias": (True,),
    "use_bias": (True, False),
    "rms_norm_eps": (0.2,),
    "layer_norm_eps": (0.2,),
    "norm_eps": (0.2,),
}


def variants(title: str, name: str) -> list[dict[str, Any]]:
    """Changes to the config of a model that change what layers of that class are."""
    config, usual = build(name).config, _described(title, name)
    return [
        {field: value}
        for field, values in READ.items()
        if hasattr(config, field)
        for value in values
        if _described(title, name, **{field: value}) != usual
    ]


def _described(title: str, name: str, **changes: Any) -> list[str]:
    """Each layer of that class with its parts and numbers, as text."""
    return [
        f"{module} {[v for v in vars(module).values() if isinstance(v, int | float | str)]}"
        for module in build(name, **changes).modules()
        if type(module).__name__ == title
    ]


def _heads(name: str) -> dict[str, Any]:
    """What keeps the sizes of heads as they are in a wider model."""
    cls, own = arguments_of(name)
    if cls in ("DeepseekV3Config", "BloomConfig", "FalconConfig"):
        return {}
    return {"head_dim": own.get("head_dim", 12)}


def requirements_of(subject: Subject, model: Any, **more: Any) -> Requirements:
    dtype = str(model.dtype).removeprefix("torch.")
    return describe(model, dtype=dtype, device=torch.device(subject.device), **more)
