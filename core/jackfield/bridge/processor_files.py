"""The files of a model's processor, and what transformers makes of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from jackfield.bridge.quiet import quiet
from jackfield.errors import UsageError, error_text, first_line

if TYPE_CHECKING:
    from jackfield.bridge.source import ModelSource


def read_from_files(kind: Any, what: str, given: Any, source: ModelSource, hint: str = "") -> Any:
    """What `kind.from_pretrained` returns, of the files `given` as the tokenizer, or the model's.

    Raises UsageError, with a reason that is to stand behind why `what` is not there.
    """
    location, revision = source.location, source.revision
    if isinstance(given, str | os.PathLike):
        location, revision = os.fspath(given), None
    elif given is not None or location is None:
        raise UsageError(
            "the model's processor is not known; give jackfield.load tokenizer=PROCESSOR, as "
            "AutoProcessor.from_pretrained returns it"
        )
    try:
        with quiet():
            return kind.from_pretrained(location, revision=revision, trust_remote_code=False)
    except ImportError as error:
        raise UsageError(
            f"its {what} needs a package more ({first_line(error)[:200]}){hint}"
        ) from error
    except Exception as error:
        raise UsageError(f"its {what} cannot be loaded: {error_text(error)[:300]}") from error
