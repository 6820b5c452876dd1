"""The end of an engine: its worker is stopped, and everything that it held is released."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from jackfield.engine.worker import Worker
from jackfield.errors import ExecutionError, error_text
from jackfield.guarded import all_of

STOP_WITHIN = 5.0  # seconds that an engine which is dropped waits for its last step
CLOSE_WITHIN = 30.0  # seconds that one which is closed waits


def finish(worker: Worker, acts: Iterable[Callable[[], None]]) -> None:
    """Close, and do all of `acts`, which give back what the engine held.

    Raises ExecutionError where a step hangs, which says in what.
    """
    _give_back(worker, acts, CLOSE_WITHIN)


def drop(worker: Worker, acts: Iterable[Callable[[], None]]) -> None:
    """The same for an engine that nobody closed; there is nobody to raise to."""
    try:
        _give_back(worker, acts, STOP_WITHIN)
    except BaseException as error:  # noqa: BLE001 - of plugins, mostly
        logging.getLogger("jackfield").error("an engine was dropped: %s", error_text(error))


def _give_back(worker: Worker, acts: Iterable[Callable[[], None]], seconds: float) -> None:
    def stop() -> None:
        if (hanging := worker.close(seconds)) is not None:
            raise ExecutionError(
                f"the engine is closed, and a step did not end within {seconds:g} s: it hangs in "
                f"{hanging}; its thread is left behind, and the model may be in use by it"
            )

    all_of((stop, *acts))
