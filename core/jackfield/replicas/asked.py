"""Settings of a server as replicas can have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackfield.errors import UsageError
from jackfield.planning.memory import STEP_ROWS
from jackfield.planning.profiles import taken
from jackfield.requests.arguments import OF_LOADING
from jackfield.serving.settings import ModelSettings, ServerSettings

#: Arguments that name files.
_PATHS = ("adapter", "assistant_model", "locked", "offload_folder", "profile")


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
    arguments = [taken(m.arguments, OF_LOADING) for m in settings.models.values()]
    sizes = [one.get("max_batch_size") or STEP_ROWS for one in arguments]
    return max(1, *map(int, sizes)) if sizes else STEP_ROWS


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
