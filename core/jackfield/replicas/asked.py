"""Settings of a server as replicas can have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackfield.errors import UsageError
from jackfield.serving.settings import ModelSettings, ServerSettings

_PATHS = ("adapter", "assistant_model", "locked", "offload_folder")  # arguments that name files
_MAX_BATCH_SIZE = 32  # where no model says another


def check(settings: ServerSettings) -> None:
    """Raise UsageError for what replicas cannot have."""
    shared = [n for n, m in settings.models.items() if (m.arguments.get("tp_size") or 1) > 1]
    if shared and len(settings.models) > 1:
        raise UsageError(
            f"--tp shares {shared[0]} among processes, which share one model at a time; serve "
            f"{len(settings.models)} models by a command for each"
        )


def busy(settings: ServerSettings) -> int:
    """How many requests at once one replica is meant for."""
    sizes = [m.arguments.get("max_batch_size", _MAX_BATCH_SIZE) for m in settings.models.values()]
    return max(1, *map(int, sizes)) if sizes else _MAX_BATCH_SIZE


def anywhere(settings: ServerSettings) -> ServerSettings:
    """The same, with paths that another process finds, too."""
    models = {}
    for name, model in settings.models.items():
        paths: dict[str, Any] = {
            n: _path(v) for n, v in model.arguments.items() if n in _PATHS and v is not None
        }
        if adapters := model.arguments.get("adapters"):
            paths["adapters"] = {n: _path(where) for n, where in adapters.items()}
        told = {**model.arguments, **paths, "model": _path(model.model)}
        models[name] = ModelSettings.model_validate(told)
    return settings.model_copy(update={"models": models})


def _path(text: str) -> str:
    return str(Path(text).resolve()) if Path(text).exists() else text
