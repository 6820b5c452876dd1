"""Attentions over pages and fused norms, called by themselves, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from families import FAMILIES, config_of
from packed import layer_of, queries_of, reference, step_of

import jackfield
from gpucheck.bench import Bench
from gpucheck.results import SkippedError
from jackfield.contracts import BindContext
from jackfield.errors import JackfieldError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry

#: What rounding alone may do: a kernel sums in another order than torch.
ROUNDING = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 8e-3}
#: The semantics that a family's layers ask for.
MEANINGS = {"llama": "plain", "mistral": "window", "gemma2": "softcap", "gpt-oss": "sinks"}


@dataclass(frozen=True)
class Case:
    """A shape of heads, with the pages it lies in and what its scores go through."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{MEANINGS[self.family]}, {self.heads}/{self.kv_heads} heads of {self.head_dim}, "
            f"pages of {self.page_size}, {self.dtype}"
        )

    def config(self) -> Any:
        family = FAMILIES[self.family]
        own = {
            "hidden_size": 8 * self.heads,  # configs want a multiple
            "head_dim": self.head_dim,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }
        return getattr(transformers, family.config)(**{**family.arguments, **own})


def cases(bench: Bench) -> Iterator[Case]:
    """One axis at a time around the first of each: all of them would take an hour of compiling."""
    sizes = bench.sizes
    heads, page, dtype = sizes.groups[0], sizes.page_sizes[0], sizes.dtypes[0]
    dim = 128 if 128 in sizes.head_dims else sizes.head_dims[0]
    seen = set()
    for case in itertools.chain(
        (Case(family, *heads, dim, page, dtype) for family in MEANINGS),
        (Case("llama", *heads, dim, other, dtype) for other in sizes.page_sizes),
        (Case("llama", *heads, dim, page, other) for other in sizes.dtypes),
        (Case("llama", *heads, other, page, dtype) for other in sizes.head_dims),
        (Case("llama", *other, dim, page, dtype) for other in sizes.groups),
        (Case(f, *heads, dim, sizes.page_sizes[-1], sizes.dtypes[-1]) for f in MEANINGS),
    ):
        if case not in seen:
            seen.add(case)
            yield case


def run(bench: Bench) -> None:
    norms(bench)
    names = []
    for registered in registry().of_kind("attention"):
        if reason := absent(bench, registered):
            bench.results.note(f"attention {registered.name}", None, reason=reason)
        else:
            names.append(registered.name)
    for case, name in itertools.product(cases(bench), sorted(names)):
        bench.results.run(f"attention {name}: {case}", attention_error, bench, name, case)


def absent(bench: Bench, registered: Any) -> str:
    """Why an attention cannot be called here at all."""
    offers = registered.backend.capabilities
    if "packed" not in offers.layouts:
        return "serves no pages"
    if torch.device(bench.device.name).type not in offers.devices:
        return f"does not run on {bench.device.name}"
    if registered.name == "hub":
        return "fetches its kernels"
    if registered.name == "eager":
        return "is the model's own, which the stage `engines` runs"
    return "; ".join(registered.ask("available"))


def attention_error(bench: Bench, name: str, case: Case) -> dict[str, Any]:
    """The largest error over all steps, as a share of what is allowed."""
    choice, context = bound_to(bench, name, case)
    bound = choice.registered.bind(context)
    worst, at, dtype = 0.0, "", getattr(torch, case.dtype)
    for sizes in bench.sizes.steps:
        layer = layer_of(
            step_of(list(sizes), bench.device.name), kv_heads=case.kv_heads,
            head_dim=case.head_dim, page_size=case.page_size, dtype=dtype,
            window=None if case.family == "llama" else bench.sizes.window, device=bench.device.name,
        )  # fmt: skip
        query = queries_of(layer.step, case.heads, layer).contiguous()
        kwargs = meaning(case, query)
        found = bound.packed(module_of(case), query, layer, **kwargs)
        terms = {
            "scaling": kwargs["scaling"], "softcap": kwargs.get("softcap"),
            "sinks": kwargs.get("s_aux"),
        }  # fmt: skip
        exact = reference(query, layer, **terms)
        plain = reference(query, layer, **terms, dtype=dtype)
        allowed = 3 * float((plain.double() - exact).abs().max()) + ROUNDING[case.dtype]
        lost = float((found.double() - exact).abs().nan_to_num(torch.inf).max()) / allowed
        worst, at = max((worst, at), (lost, str(sizes)))
    return {"ok": worst <= 1, "error": worst, "of": "what is allowed", "at": at}


def meaning(case: Case, query: torch.Tensor) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"scaling": case.head_dim**-0.5}
    if case.family == "gemma2":
        kwargs["softcap"] = 5.0
    if case.family == "gpt-oss":
        kwargs["s_aux"] = torch.linspace(-2, 4, case.heads, device=query.device).to(query.dtype)
    return kwargs


def module_of(case: Case) -> Any:
    """As much of an attention layer as attentions look at."""
    module = torch.nn.Module()
    module.layer_idx, module.is_causal, module.training = 0, True, False  # type: ignore[assignment]
    module.num_key_value_groups = case.heads // case.kv_heads  # type: ignore[assignment]
    return module


def bound_to(bench: Bench, name: str, case: Case) -> tuple[Any, BindContext]:
    """The choice of an attention for this case. Raises SkippedError with the plan's own reason."""
    config = case.config()
    pages = -(-512 // case.page_size) * case.page_size
    try:
        plan = jackfield.plan(
            config, attn_implementation=name, dtype=case.dtype, device_map=bench.device.name,
            cache_implementation=f"paged?page_size={case.page_size}&num_tokens={pages}",
        )  # fmt: skip
    except JackfieldError as reason:
        raise SkippedError(str(reason)) from None
    choice = plan["attention"]
    return choice, BindContext(
        model=None, config=config, requirements=plan.requirements, options=choice.options
    )


def norms(bench: Bench) -> None:
    for registered in registry().of_kind("kernel"):
        if registered.name.startswith("hub"):
            bench.results.note(f"norm {registered.name}", None, reason="fetches its kernels")
            continue
        if not is_norm(registered, bench.device.name):
            continue
        for (rows, size), dtype in itertools.product(bench.sizes.norms, bench.sizes.dtypes):
            name = registered.name
            label = f"norm {name}: {rows} × {size}, {dtype}"
            bench.results.run(label, norm_error, bench, name, rows, size, dtype)


def is_norm(registered: Registered, device: str) -> bool:
    """Whether it is a norm, for such a device."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    kernel: Any = registered.backend
    fits = kernel.fits(LlamaRMSNorm(8), registered.options({}))
    return fits and device.partition(":")[0] in kernel.capabilities.devices


def norm_error(bench: Bench, name: str, rows: int, size: int, dtype: str) -> dict[str, Any]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = config_of("llama")
    try:
        plan = jackfield.plan(config, kernels=name, dtype=dtype, device_map=bench.device.name)
    except JackfieldError as reason:
        raise SkippedError(str(reason)) from None
    (choice,) = plan.kernels
    context = BindContext(
        model=None, config=config, requirements=plan.requirements, options=choice.options
    )
    kind = getattr(torch, dtype)
    norm = LlamaRMSNorm(size).to(bench.device.name, kind)
    norm.weight.data = torch.randn_like(norm.weight)
    given = torch.randn(1, rows, size, device=bench.device.name).to(kind)
    found = choice.registered.bind(context).make(norm)(given)
    exact = exactly(norm, given)
    allowed = 3 * float((plainly(norm, given).double() - exact).abs().max()) + ROUNDING[dtype]
    lost = float((found.double() - exact).abs().nan_to_num(torch.inf).max()) / allowed
    return {"ok": lost <= 1, "error": lost, "of": "what is allowed"}


def plainly(norm: Any, given: torch.Tensor) -> torch.Tensor:
    """What transformers computes."""
    return norm(given).detach()  # type: ignore[no-any-return]


def exactly(norm: Any, given: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float64 throughout; transformers' own sums in float32."""
    wide = given.double()
    scale = (wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return wide * scale * norm.weight.detach().double()
