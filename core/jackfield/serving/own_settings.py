"""What a model's own generation config asks for is looked at where it is loaded, not by clients."""

from __future__ import annotations

from jackfield.engine.engine import Engine
from jackfield.errors import SettingsError, UsageError, quoted
from jackfield.planning.strategies import unmet_of_model
from jackfield.registry.discovery import registry
from jackfield.requests.wishes import wishes


def check_own_settings(engine: Engine, name: str) -> None:
    """Raise UsageError where no request could be answered, as the config asks for what is not so.

    `name` is that of the model: a client can change nothing of its files, and says no setting by
    the words in which the engine would answer.
    """
    own = wishes({}, engine.model.generation_config)
    if (found := unmet_of_model(registry(), engine.plan.decodings, own)) is not None:
        setting, value, decoding, other = found
        serve = "" if other is None else f"serve it with --decoding {other}, or "
        raise UsageError(
            f"{name}: its generation_config.json asks for {setting}={quoted(value)}, which the "
            f"decoding {decoding!r} does not honour; {serve}take {setting} out of that file"
        )
    try:
        engine.generate([])
    except SettingsError as error:
        why = str(error).partition("; lift it with")[0]
        raise UsageError(f"{name}: {why}; change its generation_config.json") from None
