"""Where inductor keeps what it compiled. torch unpickles it, so nobody else may write there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from jackfield.contracts.private_files import CACHE
from jackfield.errors import ExecutionError
from jackfield_plugins.native.keeping import KeepingError, cache_root, check_usable, own_folder

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"

_environment = threading.Lock()


def cannot_keep() -> list[str]:
    """Why what is compiled could not be kept, as far as it can be told without making a folder."""
    try:
        check_usable(*_where())
    except KeepingError as error:
        return [str(error)]
    return []


@contextlib.contextmanager
def cache_folder() -> Iterator[None]:
    """Have inductor keep what it compiles in jackfield's folder, or where the caller told it.

    Raises ExecutionError where it cannot be kept there.
    """
    with _environment:
        before = os.environ.get(CACHE_DIR)
        try:
            os.environ[CACHE_DIR] = str(own_folder(*_where()))
        except KeepingError as error:
            raise ExecutionError(str(error)) from None
        try:
            yield
        finally:
            os.environ.pop(CACHE_DIR, None)
            if before is not None:
                os.environ[CACHE_DIR] = before


def _where() -> tuple[Path, str]:
    """The folder, and the variable that names it. Raises KeepingError.

    torch sets its variable itself, to a folder under /tmp, when it first looks for one.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = os.environ.get(CACHE_DIR, "")
    if named in ("", default_cache_dir()):
        return cache_root() / "inductor", CACHE
    return Path(named), CACHE_DIR
