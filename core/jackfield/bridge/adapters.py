"""Adapters of PEFT: checked on a skeleton before weights are read, loaded, merged, switched."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.headers import safetensors_header
from jackfield.bridge.source import ModelSource, quiet
from jackfield.choosing.adapter import Adapter, AdapterUse
from jackfield.choosing.selection import nearest
from jackfield.contracts.requirements import Weight
from jackfield.errors import CheckpointError, UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

#: The types of PEFT that are tested here; each is a change of single modules.
TYPES = ("LORA", "IA3", "LOHA", "LOKR")
NAME = "default"
_PREFIX = "base_model.model."

#: Keys of an adapter_config.json that do more than add weights to modules -> what they do.
_MORE = {
    "alora_invocation_tokens": "switches it on in the middle of a prompt, which no loop here does",
    "arrow_config": "routes between several adapters",
    "layer_replication": "gives the model other layers",
    "megatron_config": "is for Megatron's layers",
}
#: Ways to initialize that change the base weights, too, when the adapter is loaded.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class FoundAdapter:
    """An adapter whose files were checked against a model. `weights` are those that it adds."""

    folder: Path
    adapter: Adapter
    weights: tuple[Weight, ...] = field(repr=False)
    #: whether it reads the weights below it, as DoRA does, which therefore stay in memory
    reads_weights: bool = False


def has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep the console clean: PEFT brings in every quantizer's library, which all tell things."""
    with quiet(), warnings.catch_warnings():  # which lets one thread in at a time
        disabled = logging.root.manager.disable
        warnings.simplefilter("ignore")
        logging.disable(max(disabled, logging.ERROR))
        try:
            yield
        finally:
            logging.disable(disabled)


def find_adapter(
    location: str | Path, model: PreTrainedModel, *, merge: bool = False
) -> FoundAdapter:
    """Check an adapter against a skeleton, which is changed. Raises CheckpointError, UsageError."""
    given: Any = location
    if not isinstance(given, str | Path) or not str(given):
        raise UsageError(f"adapter must be a folder or a hub id, not {given!r}")
    folder = _folder(str(location))
    config = _read_config(folder)
    if not has_peft():
        raise UsageError(f"adapter={str(location)!r} needs PEFT: pip install 'jackfield[peft]'")
    found = _injected(folder, model)
    _check_config(folder, config, found)
    names = _check_weights(folder, model, found)
    weights = [
        Weight(name, parameter.numel())
        for name, parameter in model.named_parameters()
        if name in names
    ]
    adapter = _told(str(location), found, len(_layers(model)), merged=merge)
    reads = merge or bool(config.get("use_dora"))
    return FoundAdapter(folder, adapter, () if merge else tuple(weights), reads)


def _folder(location: str) -> Path:
    path = Path(location)
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise CheckpointError(
                f"{location} has no {CONFIG}, so it is not an adapter; give the folder that PEFT's "
                "save_pretrained wrote"
            )
        return path
    if path.is_file() or location.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"{location} is not a folder; give an adapter's folder or a hub id")
    from huggingface_hub import snapshot_download

    name, _, revision = location.partition("@")
    try:
        with quiet():
            return Path(
                snapshot_download(name, revision=revision or None, allow_patterns=[CONFIG, WEIGHTS])
            )
    except Exception as error:
        raise CheckpointError(
            f"cannot find the adapter {location!r}: it is neither a folder here nor an adapter "
            f"that the hub gives: {first_line(error)}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    """What is in the config, as far as it can be judged without PEFT."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
        told = config["peft_type"]
    except (OSError, ValueError, LookupError, TypeError):
        raise CheckpointError(
            f"{file} is not a JSON object that names a peft_type; fetch the adapter again"
        ) from None
    if told not in TYPES:
        raise CheckpointError(
            f"{folder} is an adapter of type {told}, which does not go on single modules of a "
            f"decoder, or is untested here; give one of {', '.join(TYPES)}"
            f"{nearest(str(told), TYPES)}"
        )
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{folder} is an adapter for {task}, not for CAUSAL_LM")
    for key, does in _MORE.items():
        if config.get(key):
            raise CheckpointError(f"{folder}: {key} {does}; give an adapter without it")
    start = str(config.get("init_lora_weights"))
    if start.startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{folder}: init_lora_weights={start!r} changes the model's own weights when it is "
            "loaded; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    _check_file(folder)
    return config  # type: ignore[no-any-return]


def _check_file(folder: Path) -> None:
    if (folder / WEIGHTS).is_file():
        return
    if (folder / PICKLE).is_file():
        raise CheckpointError(
            f"the adapter in {folder} is a pickle ({PICKLE}), which can run code when read; save "
            "it as safetensors in a place you trust"
        )
    raise CheckpointError(f"there are no weights in {folder}: expected {WEIGHTS}")


def _injected(folder: Path, model: PreTrainedModel) -> Any:
    """The adapter's PEFT config, after its layers were put into `model`, on the meta device."""
    with hushed():
        from peft import PeftConfig, inject_adapter_in_model

        try:
            config = PeftConfig.from_pretrained(str(folder))
            config.inference_mode = True
            with torch.device("meta"):
                inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
        except Exception as error:
            raise CheckpointError(
                f"the adapter in {folder}{_made_for(folder)} does not fit {type(model).__name__}: "
                f"{first_line(error)[:200]}"
            ) from error
    return config


def _made_for(folder: Path) -> str:
    made = json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path")
    return f" (made for {made})" if made else ""


def _check_config(folder: Path, config: Mapping[str, Any], found: Any) -> None:
    """PEFT drops keys that it does not know, with a warning; they may mean something."""
    if unknown := sorted(key for key in config if not hasattr(found, key)):
        raise CheckpointError(
            f"{folder / CONFIG} has {', '.join(unknown[:3])}, which the installed PEFT does not "
            "know; pip install -U peft"
        )


def _check_weights(folder: Path, model: PreTrainedModel, config: Any) -> set[str]:
    """Compare what the file has with what `model` takes; the names of the adapter's parameters."""
    from peft import get_peft_model_state_dict

    header = safetensors_header(folder / WEIGHTS)
    has = {key.removeprefix(_PREFIX): tuple(entry["shape"]) for key, entry in header.items()}
    with hushed():
        state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    takes = {key.removeprefix(_PREFIX): tuple(tensor.shape) for key, tensor in state.items()}
    if not _is_converted(model):
        what = f"the adapter in {folder}{_made_for(folder)}"
        for key in sorted(has.keys() & takes.keys()):
            if has[key] != takes[key]:
                raise CheckpointError(
                    f"{what} does not fit {type(model).__name__}: {key} is {has[key]}, and has to "
                    f"be {takes[key]}"
                )
        for names, fault in ((takes.keys() - has.keys(), "lacks"), (has.keys() - takes.keys(),
                             "has no place for")):  # fmt: skip
            if names:
                raise CheckpointError(
                    f"{what} {fault} {min(names)}"
                    f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}; its {CONFIG} and "
                    f"{type(model).__name__} do not fit its weights"
                )
    ids = {id(tensor) for tensor in state.values()}
    ours = {name for name, p in model.named_parameters() if id(p) in ids}
    return ours or {name for name, _ in model.named_parameters() if f".{NAME}" in name}


def _is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers fuses weights of such a model (experts) and PEFT those of adapters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model))


def _told(location: str, config: Any, targets: int, *, merged: bool = False) -> Adapter:
    ranks = [getattr(config, "r", None), *(getattr(config, "rank_pattern", None) or {}).values()]
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    rank = max((r for r in ranks if isinstance(r, int)), default=None)
    return Adapter(location, kind, rank, targets, merged)


def load_adapter(model: PreTrainedModel, found: FoundAdapter) -> PreTrainedModel:
    """Put a checked adapter on a loaded model, or merge it in. Raises CheckpointError."""
    try:
        with hushed():
            if found.reads_weights:
                return _by_peft(model, found)
            with _beside(model):
                info = model.load_adapter(str(found.folder), NAME, use_safetensors=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot load the adapter {found.adapter.location}: {first_line(error)}"
        ) from error
    for what, names in (
        ("lacks", info.missing_keys),
        ("has no place for", info.unexpected_keys),
        ("does not fit", info.mismatched_keys),
    ):
        if names:
            first = min(map(str, names))
            raise CheckpointError(f"the adapter {found.adapter.location} {what} {first}")
    return model


def _by_peft(model: PreTrainedModel, found: FoundAdapter) -> PreTrainedModel:
    """Merge it in, or load it as PEFT does: transformers finds no place for DoRA's magnitudes."""
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        wrapped: Any = PeftModel.from_pretrained(
            model, str(found.folder), autocast_adapter_dtype=found.adapter.merged
        )
    if missed := [w for w in noted if "missing adapter keys" in str(w.message)]:
        raise CheckpointError(first_line(Warning(str(missed[0].message)))[:300])
    if found.adapter.merged:
        return wrapped.merge_and_unload(safe_merge=True)  # type: ignore[no-any-return]
    return wrapped.get_base_model()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _beside(model: PreTrainedModel) -> Iterator[None]:
    """Have an adapter loaded where things are computed, also for weights that are on disk.

    transformers puts it where the map has the module, and nothing would bring it from there.
    """
    given = getattr(model, "hf_device_map", None)
    if given is None:
        yield
        return
    hook = getattr(model, "_hf_hook", None)
    main = getattr(hook, "execution_device", None)
    model.hf_device_map = {  # type: ignore[assignment]
        name: main if main is not None and place in ("cpu", "disk") else place
        for name, place in given.items()
    }
    try:
        yield
    finally:
        model.hf_device_map = given


def _layers(model: Any) -> list[Any]:
    """The modules that adapters have changed."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def live_adapter(source: ModelSource) -> Adapter | None:
    """The adapter that a live model has; None: none. Raises UsageError for one that is too much."""
    if source.live is None or not source.adapters:
        return None
    layers = _layers(source.live)
    active = list(dict.fromkeys(name for layer in layers for name in layer.active_adapters))
    configs = [source.adapters[name] for name in active if name in source.adapters]
    if not configs:
        return None
    for config in configs:
        for key, does in _MORE.items():
            if getattr(config, key, None):
                raise UsageError(f"the model's adapter {active[0]!r}: {key} {does}; remove it")
    adapters = [_told(" + ".join(active), config, len(layers)) for config in configs]
    merged = any(getattr(layer, "merged", False) for layer in layers)
    ranks = [adapter.rank for adapter in adapters if adapter.rank is not None]
    kinds = dict.fromkeys(adapter.peft_type for adapter in adapters)
    first = adapters[0]
    return Adapter(
        first.location, " + ".join(kinds), max(ranks, default=None), first.targets, merged
    )


class AdapterSwitch:
    """The adapter of a bound model: looks at what its modules do, switches them on and off."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self.adapter = adapter
        self._layers = [] if adapter.merged else _layers(model)
        self._before = [layer.disable_adapters for layer in self._layers]
        # PEFT has switching decide what is trained; a live model keeps what it had.
        self._trained = [(p, p.requires_grad) for m in self._layers for p in m.parameters()]

    def use(self) -> AdapterUse:
        """What the modules will do in the next step."""
        if self.adapter.merged:
            return AdapterUse(self.adapter, "merged")
        off = {layer.disable_adapters for layer in self._layers}
        return AdapterUse(self.adapter, "off" if off == {True} else "on")

    def switch(self, *, on: bool) -> None:
        """Have every module use its adapter, or none. Raises UsageError for one that is merged.

        transformers' `enable_adapters` leaves out the modules that an adapter saved whole.
        """
        if self.adapter.merged:
            raise UsageError(
                "the adapter is merged into the weights and cannot be switched; load without "
                "merge_adapter"
            )
        for layer in self._layers:
            layer.enable_adapters(on)
        self._keep_gradients()

    def restore(self) -> None:
        """Put back what was there when the model was bound."""
        for layer, off in zip(self._layers, self._before, strict=True):
            layer.enable_adapters(not off)
        self._keep_gradients()

    def _keep_gradients(self) -> None:
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
