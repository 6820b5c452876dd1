"""The first layers of a model as a model by itself, which has none of its memory twice.

transformers drafts with them (`EarlyExitCandidateGenerator`) by changing `num_hidden_layers` in the
config of the live model meanwhile. Here another thread may read that config, and each attention
finds its backend by its config. So the modules that have a config or attend are copied, without
their tensors, and get one that says fewer layers; all others, and every weight, are the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig

from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.model_layers import attention_modules, layer_types, windows
from jackfield.bridge.shrinking import leave
from jackfield.errors import CheckpointError, ExecutionError, PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INSTEAD = "give an assistant_model instead"
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The first `count` layers of `model`, its norm and its head: `model` is not changed.

    Raises:
        PlanError: Its layers do not stand in one list, or its config has no number for them.
        ExecutionError: Somebody has replaced the forward of a module that has to be copied.
    """
    layers = layers_of(model)
    configs: dict[int, Any] = {}
    config = copy.deepcopy(model.config, configs)
    try:
        leave(config.get_text_config(decoder=True), range(count))
    except NotImplementedError:
        raise PlanError(
            f"{type(model).__name__} cannot be told to have fewer layers; {_INSTEAD}"
        ) from None
    own = {id(module) for _, module in attention_modules(model)}
    copied = _Copied(layers, count, own, configs)
    found: PreTrainedModel = copied(model)
    return found


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the decoder's layers. Raises PlanError where they do not stand in one."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    attending = list(attention_modules(model))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            inside = [set(map(id, layer.modules())) for layer in module]
            if attending and all(i < count and id(m) in inside[i] for i, m in attending):
                return module
    raise PlanError(
        f"the layers of {type(model).__name__} do not stand in one list, each once; {_INSTEAD}"
    )


def by_themselves(whole: PreTrainedModel, count: int) -> PreTrainedModel:
    """What the config of its first `count` layers is a model of, on the meta device like `whole`.

    Raises PlanError unless these are the layers that `whole` has there. Those that keep keys and
    values for later ones, counted from the end, are others where there are fewer behind them.
    """
    view = first_layers(whole, count)
    kinds = (layer_types, windows)
    other = PlanError(
        f"{type(whole).__name__} cannot end at layer {count}: where fewer follow, its first layers "
        f"are others; {_INSTEAD}"
    )
    try:
        alone = meta_model(view.config, type(whole))
        same = [of(alone.config) == of(whole.config)[:count] for of in kinds]
    except (CheckpointError, ValueError, IndexError):
        raise other from None
    weights = [{n: p.shape for n, p in m.named_parameters()} for m in (view, alone)]
    buffers = [{n: b.shape for n, b in m.named_buffers()} for m in (view, alone)]
    if not all(same) or weights[0] != weights[1] or not buffers[1].items() <= buffers[0].items():
        raise other
    return alone


class _Copied:
    """Copies modules that have a config or attend, and those around them, each once."""

    def __init__(
        self, layers: nn.ModuleList, count: int, own: set[int], configs: dict[int, Any]
    ) -> None:
        self._layers = layers
        self._count = count
        self._own = own
        self._configs = configs  # copies of configs, by the id of what they were copied from
        self._done: dict[int, nn.Module] = {}

    def __call__(self, module: nn.Module) -> Any:
        """The copy of `module`; itself, where nothing in it has to be one."""
        if id(module) not in self._done:
            self._done[id(module)] = self._copy(module) if self._is_own(module) else module
        return self._done[id(module)]

    def _is_own(self, module: nn.Module) -> bool:
        return any(
            one is self._layers
            or id(one) in self._own
            or isinstance(vars(one).get("config"), PreTrainedConfig)
            for one in module.modules()
        )

    def _copy(self, module: nn.Module) -> nn.Module:
        if "forward" in vars(module):
            raise ExecutionError(
                f"the forward of a {type(module).__name__} was replaced by somebody, so its layers "
                "cannot be a draft model; undo that first, or drop assistant_early_exit"
            )
        found: nn.Module = object.__new__(type(module))
        state = found.__dict__
        state.update(vars(module))
        plain = vars(nn.Module())
        state.update({name: plain[name] for name in _HOOKS})  # hooks are of who set them
        for name in ("_parameters", "_buffers"):
            state[name] = dict(state[name])
        for name, value in list(state.items()):
            if isinstance(value, PreTrainedConfig):
                state[name] = copy.deepcopy(value, self._configs)
        children = list(module._modules.items())
        if module is self._layers:
            children = children[: self._count]
        copied: Callable[[Any], Any] = self
        state["_modules"] = {n: None if m is None else copied(m) for n, m in children}
        return found
