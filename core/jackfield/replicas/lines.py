"""Lines of a batch job, answered by replicas on a cluster of Ray.

Not through Ray Data: it hands on blocks of rows and makes a block again when it is lost, so that
answers would come, and be kept, by the block; here each is written as it comes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jackfield.batch.answering import Ran
from jackfield.batch.lines import Json, Line
from jackfield.engine.report import Report
from jackfield.errors import ExecutionError, error_text
from jackfield.replicas.asked import anywhere, busy, check
from jackfield.replicas.calls import LineCall
from jackfield.replicas.cluster import Count, Deployment, joined
from jackfield.replicas.prefixes import blocks
from jackfield.replicas.replica import versions
from jackfield.serving.errors import ApiError
from jackfield.serving.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_ATTEMPTS = 3  # a line that ends replicas is one that fails
_TOLD_WITHIN = 60.0  # seconds for all replicas to say what they run


@dataclass(frozen=True)
class OnRay:
    """So many replicas, on the cluster at `address`; None: on one of this machine's own."""

    replicas: Count
    address: str | None

    @property
    def count(self) -> int:
        """How many there are at most."""
        return self.replicas.most

    @contextlib.contextmanager
    def answerer(self, settings: ServerSettings, job: str) -> Iterator[RayLines]:
        """They end with the block; where the process is killed on a cluster that goes on, the same
        job replaces them.

        Raises UsageError where there is no cluster or no room, ExecutionError where one does not
        start.
        """
        check(settings)
        settings = anywhere(settings)
        name = f"jackfield-batch-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
        with joined(self.address) as cluster:
            asked = Deployment(name, settings, self.replicas, busy(settings))
            handle = cluster.deploy(asked, versions())
            try:
                yield RayLines(handle)
            finally:
                cluster.delete(name)


class RayLines:
    """Answers lines by the replicas of a deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ran]:
        """What all of them run. Raises ExecutionError where that differs."""
        with _failing():
            told = await self._handle.broadcast("ran").results_async(timeout_s=_TOLD_WITHIN)
        self._made, ran = told[0]
        for made, _ in told:
            self._check(made)
        yield ran

    async def answer(self, line: Line, name: str, began: int) -> Json:
        """That of one replica; where it is lost, of another. Raises ApiError."""
        from ray.exceptions import RayActorError

        call = LineCall(line, name, began, blocks=blocks("", line.body))
        for _ in range(_ATTEMPTS):
            try:
                with _failing(but=RayActorError):
                    replica, made, found = await self._handle.line.remote(call)
            except RayActorError:
                continue
            if found is None:
                call = replace(call, lost=(*call.lost, replica))
                continue
            self._check(made)
            if isinstance(found, ApiError):
                raise found
            return dict(found)
        raise ApiError(500, f"{_ATTEMPTS} replicas were lost with this line", code="lost")

    def _check(self, made: str) -> None:
        if made != self._made:
            raise ExecutionError(
                "replicas chose different plans, since their machines differ; name each backend "
                "(--attention, --cache, --quantizer), and give another file for the output"
            )

    async def report(self) -> Report:
        """That of one of them."""
        with _failing():
            report: Report = await self._handle.report.remote()
        return report


@contextlib.contextmanager
def _failing(but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Raise ExecutionError for what Ray raises, but for that."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except but:
        raise
    except (RayError, RayServeException, TimeoutError) as error:
        raise ExecutionError(
            f"the replicas failed ({error_text(error)}); what is answered stays there: mend it, "
            "and run the same command again"
        ) from error
