"""Adapters of PEFT: checked on a meta model before weights are read, loaded and merged."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.adapter import Adapter
from jackfield.bridge.adapter_biases import biases_of, note_biases
from jackfield.bridge.adapter_files import (
    ADDS_MORE,
    CONFIG,
    WEIGHTS,
    check_fields,
    check_tied,
    folder_of,
    hushed,
    made_for,
    read_config,
)
from jackfield.bridge.headers import safetensors_header
from jackfield.bridge.patterns import check_patterns
from jackfield.bridge.source import ModelSource
from jackfield.contracts.requirements import Weight
from jackfield.errors import CheckpointError, UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"
PREFIX = "base_model.model."


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


def find_adapter(
    location: str | Path, model: PreTrainedModel, *, merge: bool = False
) -> FoundAdapter:
    """Check an adapter against a meta model and change it. Raises CheckpointError, UsageError."""
    given: Any = location
    if not isinstance(given, str | Path) or not str(given):
        raise UsageError(f"adapter must be a folder or a hub id, not {given!r}")
    folder = folder_of(str(location))
    config = read_config(folder)
    if not has_peft():
        raise UsageError(f"adapter={str(location)!r} needs PEFT: pip install 'jackfield[peft]'")
    check_fields(folder, config)
    check_patterns(str(folder / CONFIG), config, (name for name, _ in model.named_modules()))
    check_tied(folder, config, model)
    found = _injected(folder, model)
    names = _check_weights(folder, model, found)
    weights = [
        Weight(name, parameter.numel())
        for name, parameter in model.named_parameters()
        if name in names
    ]
    adapter = _told(str(location), found, len(adapted_layers(model)), merged=merge)
    reads = merge or bool(config.get("use_dora"))
    return FoundAdapter(folder, adapter, () if merge else tuple(weights), reads)


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
                f"the adapter in {folder}{made_for(folder)} does not fit {type(model).__name__}: "
                f"{first_line(error)[:200]}"
            ) from error
    return config


def _check_weights(folder: Path, model: PreTrainedModel, config: Any) -> set[str]:
    """Compare what the file has with what `model` takes; the names of the adapter's parameters."""
    from peft import get_peft_model_state_dict

    header = safetensors_header(folder / WEIGHTS)
    has = {key.removeprefix(PREFIX): tuple(entry["shape"]) for key, entry in header.items()}
    with hushed():
        state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    takes = {key.removeprefix(PREFIX): tuple(tensor.shape) for key, tensor in state.items()}
    if not _is_converted(model):
        what = f"the adapter in {folder}{made_for(folder)}"
        for key in sorted(has.keys() & takes.keys()):
            if has[key] != takes[key]:
                raise CheckpointError(
                    f"{what} does not fit {type(model).__name__}: {key} is {has[key]}, and has to "
                    f"be {takes[key]}"
                )
        _check_embeddings(what, has.keys() - takes.keys())
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


def _check_embeddings(what: str, surplus: Collection[str]) -> None:
    """PEFT adds the model's own embedding and head to an adapter that changes one of them."""
    own = [
        key for key in surplus if re.search(r"(embed\w*|wte|lm_head)(\.base_layer)?\.weight$", key)
    ]
    if own:
        raise CheckpointError(
            f"{what} brings {min(own)}, the embedding or head of the model that it was made on, "
            "which would replace this model's own (PEFT adds it by save_embedding_layers='auto'); "
            "save the adapter again with save_pretrained(…, save_embedding_layers=False)"
        )


def _is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers fuses weights of such a model (experts) and PEFT those of adapters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model))


def _told(location: str, config: Any, targets: int, *, merged: bool = False) -> Adapter:
    ranks = [getattr(config, "r", None), *(getattr(config, "rank_pattern", None) or {}).values()]
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    rank = max((r for r in ranks if isinstance(r, int)), default=None)
    biases = getattr(config, "bias", "none") != "none"
    return Adapter(location, kind, rank, targets, merged, biases)


def load_adapter(model: PreTrainedModel, found: FoundAdapter) -> PreTrainedModel:
    """Put a checked adapter on a loaded model, or merge it in. Raises CheckpointError."""
    before = biases_of(model) if found.adapter.biases and not found.adapter.merged else {}
    try:
        with hushed():
            if found.reads_weights:
                loaded = _by_peft(model, found)
                note_biases(loaded, before)
                return loaded
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
    note_biases(model, before)
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


def adapted_layers(model: Any) -> list[Any]:
    """The modules that adapters have changed."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def live_adapter(source: ModelSource) -> Adapter | None:
    """The adapter that a live model has; None: none. Raises UsageError for one that is too much."""
    if source.live is None or not source.adapters:
        return None
    layers = adapted_layers(source.live)
    active = list(dict.fromkeys(name for layer in layers for name in layer.active_adapters))
    configs = [source.adapters[name] for name in active if name in source.adapters]
    if not configs:
        return None
    for config in configs:
        for key, does in ADDS_MORE.items():
            if getattr(config, key, None):
                raise UsageError(f"the model's adapter {active[0]!r}: {key} {does}; remove it")
    adapters = [_told(" + ".join(active), config, len(layers)) for config in configs]
    merged = any(getattr(layer, "merged", False) for layer in layers)
    ranks = [adapter.rank for adapter in adapters if adapter.rank is not None]
    kinds = dict.fromkeys(adapter.peft_type for adapter in adapters)
    first = adapters[0]
    return Adapter(
        first.location,
        " + ".join(kinds),
        max(ranks, default=None),
        first.targets,
        merged,
        any(adapter.biases for adapter in adapters),
    )
