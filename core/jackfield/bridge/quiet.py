"""Keep transformers from printing; one thread at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

#: transformers changes its own classes, and we its loggers, while something is loaded: of two
#: threads that do so at once, the one that ends last would leave the other's changes for ever.
LOADING = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing what it notes while it builds things of no interest.

    One thread at a time.
    """
    with LOADING:
        before = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(logging.CRITICAL)  # its errors are raised, too
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(before)
            if bars:
                transformers_logging.enable_progress_bar()
