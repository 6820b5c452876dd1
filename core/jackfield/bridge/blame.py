"""Whose fault it is that a config makes no model: the error names its file and the field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jackfield.bridge.config_files import read_config
from jackfield.bridge.guilty_fields import without_it
from jackfield.bridge.requirements import described
from jackfield.bridge.source import ModelSource
from jackfield.errors import CheckpointError, JackfieldError
from jackfield.foreign import error_line


@contextlib.contextmanager
def blamed(source: ModelSource) -> Iterator[None]:
    """Tell what a config makes of a model's code as a CheckpointError that says whose config it is.

    Of a live model nothing is told: its code ran before.
    """
    try:
        yield
    except CheckpointError as error:
        if source.location is None or source.location in str(error):
            raise
        raise CheckpointError(f"{source.origin}: {error}{_guilty(source)}") from error
    except JackfieldError:
        raise
    except Exception as error:
        if source.live is not None:
            raise
        raise CheckpointError(
            f"{source.origin} gives no model that runs: {error_line(error)}{_guilty(source)}"
        ) from error


def _guilty(source: ModelSource) -> str:
    """The field of a folder's config.json without which there would be a model, for a message."""
    file = None if source.folder is None else source.folder / "config.json"
    if file is None or not file.is_file():
        return ""
    return without_it(file, lambda folder: described(read_config(str(folder), None)))
