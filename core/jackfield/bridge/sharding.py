"""What one of several processes holds of a model, by transformers' own tensor parallel plan.

transformers names a style for modules and parameters ("colwise", "rowwise" and others). Here the
same is done to a model on the meta device, so that it has the shapes of one process: its weights
are counted, and its step is probed, before a weight is read. What was loaded is compared with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from jackfield.errors import ExecutionError, PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.bridge.probe import Call
    from jackfield.contracts import Requirements


class Shard(NamedTuple):
    """One of `size` processes that share a model, number `rank` from 0 on.

    With `experts` it has some of a mixture's experts as a whole (expert parallelism), where
    otherwise it has a part of each.
    """

    size: int
    rank: int
    experts: bool = False

    def part(self, length: int) -> int:
        """How much of a dimension it has, as DTensor cuts it: the last ones may get less."""
        return max(0, min(self._each(length), length - self.begin(length)))

    def begin(self, length: int) -> int:
        """Where its part of a dimension begins."""
        return self.rank * self._each(length)

    def _each(self, length: int) -> int:
        return -(-length // self.size)


#: Styles that cut the output features of a linear layer, and whether each process gets them all.
_COLUMNS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
#: Styles that cut its input features, and whether each process is given them all.
_ROWS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
#: Styles that cut no parameter and change no shape.
_WHOLE = frozenset(
    {
        "all_reduce",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
    }
)
_EXPERTS = "grouped_gemm"  # the style that hands out whole experts, their first dimension
#: Styles that bring tokens to their experts and add up what these say; they change no shape.
_ROUTING = frozenset({"ep_dispatch_experts", "ep_router"})
#: Whether transformers takes the plan of experts beside the other one; 5.17 has it in its place.
_BESIDE = "ep_size" in {field.name for field in dataclasses.fields(DistributedConfig)}
_PARTS = 2  # that are packed into one weight, the gate and what it is multiplied with
_EMBEDDINGS = {"embedding_rowwise": 0, "embedding_colwise": 1}
_PACKED = ("packed_colwise", "packed_rowwise")
_KNOWN = {*_COLUMNS, *_ROWS, *_WHOLE, *_EMBEDDINGS, *_PACKED, _EXPERTS, *_ROUTING}


def check_plan(model: PreTrainedModel, shard: Shard) -> None:
    """Raise PlanError where transformers has no plan by which `shard` has a part of `model`, or
    none that is known.
    """
    name, version = type(model).__name__, transformers.__version__
    plan = _plan(model, shard)
    if shard.experts and not _hands_out(_plan_of_experts(model)):
        raise PlanError(
            f"transformers {version} has no expert parallel plan of {name} (base_model_ep_plan) "
            "that it carries out; drop expert_parallel"
        )
    if not any(_cuts(style) for style in plan.values()):
        raise PlanError(
            f"transformers {version} has no tensor parallel plan of {name} (base_model_tp_plan); "
            "load it in one process, over several devices with device_map='balanced'"
        )
    for known, who in ((_KNOWN, "jackfield"), (ALL_PARALLEL_STYLES, "that transformers")):
        if stray := sorted({*plan.values()}.difference(known)):
            raise PlanError(
                f"the tensor parallel plan of {name} in transformers {version} has the style "
                f"{stray[0]!r}, which {who} does not know; load it in one process"
            )


def _plan(model: PreTrainedModel, shard: Shard) -> dict[str, str]:
    """Styles by the names of modules and parameters, as transformers puts them together."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if not shard.experts:
        return plan
    own = _plan_of_experts(model)
    if not _BESIDE:
        return own
    return {name: style for name, style in plan.items() if not _is_inside(name, own)} | own


def _plan_of_experts(model: PreTrainedModel) -> dict[str, str]:
    return dict(getattr(model, "_ep_plan", None) or {})


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _hands_out(plan: dict[str, str]) -> bool:
    """Whether processes get experts, and tokens get to them."""
    styles = {*plan.values()}
    routed = "ep_dispatch_experts" in styles or {"ep_router", "moe_tp_experts"} <= styles
    return _EXPERTS in styles and routed


def _cuts(style: str) -> bool:
    return style not in _WHOLE and style not in _ROUTING


def sharded(meta_model: PreTrainedModel, shard: Shard) -> PreTrainedModel:
    """`meta_model`, changed in place: shapes as `shard` holds them. Raises PlanError.

    Its modules take and return what those of the sharded model do.
    """
    check_plan(meta_model, shard)
    plan, made = _plan(meta_model, shard), dict[int, tuple[torch.Tensor, nn.Parameter]]()
    for path, module in meta_model.named_modules():
        for own, whole in list(module._parameters.items()):
            if whole is None:
                continue
            style = _style(f"{path}.{own}", plan) or _style(path, plan)
            if style in _COLUMNS:
                _check_divides(meta_model, path, own, style, shard)
            if style == _EXPERTS and whole.shape[0] % shard.size:
                raise PlanError(
                    f"tp_size={shard.size} does not divide the {whole.shape[0]} experts of "
                    f"{type(meta_model).__name__}; use another, or drop expert_parallel"
                )
            shape = _shape(whole, own, style, module, shard)
            before, part = made.setdefault(
                id(whole), (whole, nn.Parameter(whole.new_empty(shape), whole.requires_grad))
            )
            assert before is whole
            if list(part.shape) != shape:
                raise PlanError(
                    f"transformers {transformers.__version__} cuts {path}.{own} of "
                    f"{type(meta_model).__name__} otherwise than the weight that it is tied to; "
                    "load it in one process"
                )
            module._parameters[own] = part
        if (style := _style(path, plan)) is not None:
            _adapt(module, style, shard)
    return meta_model


def check_adapted(model: PreTrainedModel, layers: Iterable[str], shard: Shard) -> None:
    """Raise PlanError where a layer's part is not one piece of it, as a LoRA beside it assumes."""
    plan = _plan(model, shard)
    for name in layers:
        if (style := _style(name, plan)) in _PACKED:
            raise PlanError(
                f"an adapter changes {name}, of which each of tp_size={shard.size} processes has "
                f"several pieces ({style}); load it in one process"
            )


class _Mesh(NamedTuple):
    """As much of a device mesh as transformers' checks of a plan look at."""

    processes: int

    def size(self) -> int:
        return self.processes


def _check_divides(model: PreTrainedModel, path: str, own: str, style: str, shard: Shard) -> None:
    """Raise PlanError where this transformers puts together equal parts only, as before 5.21."""
    module, mesh = model.get_submodule(path), _Mesh(shard.size)
    try:
        ALL_PARALLEL_STYLES[style].validate_param(module, own, mesh, f"{path}.{own}")
    except ValueError as error:
        whole = module.get_parameter(own)
        raise PlanError(
            f"tp_size={shard.size} does not divide the {whole.shape[max(-2, -whole.dim())]} "
            f"outputs of {path} of {type(model).__name__}, as transformers "
            f"{transformers.__version__} wants it; use another, transformers 5.21 or later, or "
            "load it in one process"
        ) from error


def _style(name: str, plan: dict[str, str]) -> str | None:
    """The style of a module or parameter; the numbers of layers are wildcards in a plan."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _shape(
    whole: torch.Tensor, own: str, style: str | None, module: nn.Module, shard: Shard
) -> list[int]:
    """The shape of what `shard` has of a parameter."""
    shape, at, packed = list(whole.shape), _dimension(whole, own, style, module), style in _PACKED
    if at is None:
        return shape
    length = shape[at]
    shape[at] = shard.part(length)
    if packed and whole.dim() > 1:
        shape[at] = _PARTS * shard.part(length // _PARTS)
    return shape


def _dimension(whole: torch.Tensor, own: str, style: str | None, module: nn.Module) -> int | None:
    """The dimension in which a style cuts a parameter; None: every process has all of it."""
    if style == _EXPERTS:
        return 0
    if style in _EMBEDDINGS:
        return _EMBEDDINGS[style]
    if isinstance(module, nn.Embedding) and (style in _COLUMNS or style in _ROWS):
        return 1 if style in _COLUMNS else 0  # as in transformers 5.17
    if style in _COLUMNS:
        return whole.dim() - 2
    if style == "packed_colwise":
        return -1 if whole.dim() == 1 else whole.dim() - 2
    if style in _ROWS:
        return None if own == "bias" else -1
    if style == "packed_rowwise":
        return None if whole.dim() == 1 else -1
    return None


def _adapt(module: nn.Module, style: str, shard: Shard) -> None:
    """Have a module take and return what it does where its style puts collectives around it."""
    features: Any = module
    if isinstance(module, nn.Embedding):
        if _dimension(module.weight, "weight", style, module) == 1:
            _change(module, before=_same, after=_to(module.embedding_dim))
    elif style in _COLUMNS and hasattr(module, "out_features"):
        if _COLUMNS[style]:
            _change(module, before=_same, after=_to(features.out_features))
        features.out_features = shard.part(features.out_features)
    elif style in _ROWS and hasattr(module, "in_features"):
        features.in_features = shard.part(features.in_features)
        if _ROWS[style]:
            _change(module, before=_to(features.in_features), after=_same)


_Change = Callable[[torch.Tensor], torch.Tensor]


def _same(states: torch.Tensor) -> torch.Tensor:
    return states


def _to(width: int) -> _Change:
    """A change of the last dimension."""
    return lambda states: states.new_empty(*states.shape[:-1], width)


def _change(module: nn.Module, before: _Change, after: _Change) -> None:
    inner = module.forward

    def forward(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return after(inner(before(states), *args, **kwargs))

    module.forward = forward


def are_cut(needs: Requirements, whole: Sequence[Call], own: Sequence[Call], shard: Shard) -> bool:
    """Whether heads are shared out: each layer calls its attention with its part of them, or all.

    `whole` are the calls of the model in one process, `own` those of `shard`. Raises PlanError.
    """
    cut = False
    if not whole or len(whole) != len(own):
        raise PlanError(_uneven(needs, shard) or (
            f"nobody can tell before {needs.architecture} runs what one of {shard.size} processes "
            "holds of it; load it in one process"
        ))  # fmt: skip
    for one, part in zip(whole, own, strict=True):
        parts = part.heads * shard.size == one.heads and all(
            here[0] * shard.size == there[0] and here[1] == there[1]
            for here, there in zip(part.kv_shapes, one.kv_shapes, strict=True)
        )
        if not parts and (part.heads, part.kv_shapes) != (one.heads, one.kv_shapes):
            raise PlanError(_uneven(needs, shard) or (
                f"transformers' tensor parallel plan of {needs.architecture} cuts through the "
                f"heads of layer {one.layer}; load it in one process"
            ))  # fmt: skip
        cut = cut or parts
    return cut


def _uneven(needs: Requirements, shard: Shard) -> str | None:
    """Why heads cannot be shared out equally; None: they can."""
    heads, kv_heads = needs.num_attention_heads, needs.num_key_value_heads
    for number, what in ((kv_heads, "key/value heads"), (heads, "query heads")):
        if number % shard.size:
            fits = [str(n) for n in range(2, kv_heads + 1) if not (heads % n or kv_heads % n)]
            would = f"use {' or '.join(fits)}" if fits else "load it in one process"
            return (
                f"tp_size={shard.size} does not divide the {number} {what} of "
                f"{needs.architecture}; {would}"
            )
    return None


@contextlib.contextmanager
def loading(shard: Shard | None) -> Iterator[dict[str, Any]]:
    """The arguments with which `from_pretrained` reads the part of `shard`; none for a whole model.

    Torch has a process group of its size by now.
    """
    if shard is None:
        yield {}
        return
    alone = "LOCAL_RANK" not in os.environ  # transformers 5.17 wants it; others take it for more
    if alone:
        os.environ["LOCAL_RANK"] = str(shard.rank)
    try:
        yield {"distributed_config": DistributedConfig(tp_size=shard.size, **_of_experts(shard))}
    finally:
        if alone:
            del os.environ["LOCAL_RANK"]


def _of_experts(shard: Shard) -> dict[str, Any]:
    if not shard.experts:
        return {}
    return {"ep_size": shard.size} if _BESIDE else {"enable_expert_parallel": True}


def check_loaded(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Raise ExecutionError where a loaded model has not the shapes of the one that was planned."""
    planned = {name: tuple(p.shape) for name, p in expected.named_parameters()}
    ours = {path for path, _, _ in replaced(model, expected)}
    for name, parameter in model.named_parameters():
        local: Any = getattr(parameter, "_local_tensor", parameter)
        if name.rpartition(".")[0] in ours:
            continue  # a quantizer's, which is compared with the files
        if name in planned and tuple(local.shape) != planned[name]:
            raise ExecutionError(
                f"{name} of {type(model).__name__} came as {list(local.shape)}, where its tensor "
                f"parallel plan says {list(planned[name])}; load it in one process"
            )


def replaced(
    model: PreTrainedModel, expected: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Path, module and the one that was planned, where a quantizer put one of another class."""
    planned = dict(expected.named_modules())
    for path, module in model.named_modules():
        if path in planned and type(module) is not type(planned[path]):
            yield path, module, planned[path]


class Around(NamedTuple):
    """What transformers does around a linear layer of which each process has a part.

    `split`: all processes are given all inputs, and each takes its own. `summed`: outputs are added
    up. `gathered`: outputs are put side by side.
    """

    split: bool = False
    summed: bool = False
    gathered: bool = False


#: Styles of a layer around which nothing is done where no gradients are computed.
_NOTHING_AROUND = frozenset({None, "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce"})


def around(model: PreTrainedModel, path: str, shard: Shard) -> Around | None:
    """What is done around a layer by the plan of `model`; None: what jackfield does not do."""
    style = _style(path, _plan(model, shard))
    if style in _ROWS:
        return Around(split=_ROWS[style], summed=True)
    if style in _COLUMNS:
        return Around(gathered=_COLUMNS[style])
    return Around() if style in _NOTHING_AROUND else None
