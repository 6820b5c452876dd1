"""A job at work: a window of lines in flight, each written as it ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from jackfield.batch import parquet
from jackfield.batch.answering import Answerer, Here
from jackfield.batch.job import JobFile, content_of_model
from jackfield.batch.lines import (
    Line,
    answered,
    custom_id_of,
    failed,
    key_of,
    may_succeed,
    read_line,
)
from jackfield.batch.results import Results, fresh
from jackfield.batch.sources import Source, open_source
from jackfield.engine.report import Report
from jackfield.errors import ExecutionError, UsageError, quoted, shown
from jackfield.planning.memory import STEP_ROWS
from jackfield.planning.planning import Plan
from jackfield.planning.profiles import taken
from jackfield.requests.arguments import OF_LOADING
from jackfield.serving.errors import ApiError, refused
from jackfield.serving.settings import ServerSettings, given_settings, name_of

MOST_SAMPLES = 16  # texts of one line
_PLACES = 4  # lines in flight for each that runs in a step, so that a step is never short of them
_STOPS = (429, 503)  # there is no engine: neither this line's fault nor that of the next

Progress = Callable[[int, int], None]


class Elsewhere(Protocol):
    """Where else a job is answered."""

    @property
    def count(self) -> int:
        """By how many replicas at most."""
        ...

    def answerer(self, settings: ServerSettings, job: str) -> AbstractContextManager[Answerer]:
        """Those that answer with `settings` for the job with this name."""
        ...


@dataclass(frozen=True)
class Job:
    """What is to be done.

    `arguments` are those of `jackfield.load`, `answers` settings of a server that bear on answers.
    Files are written beside `output`: see docs/batch.md.
    """

    source: Path
    output: Path
    model: str
    arguments: Mapping[str, Any]
    answers: Mapping[str, Any]

    def beside(self, ending: str) -> Path:
        return self.output.with_name(self.output.name + ending)

    @property
    def lines(self) -> Path:
        """Where answers are appended."""
        return self.beside(".lines.jsonl") if parquet.is_parquet(self.output) else self.output

    @property
    def errors(self) -> Path:
        return self.beside(".errors.jsonl")

    @property
    def file(self) -> Path:
        """What says what the job is."""
        return self.beside(".job")

    @property
    def files(self) -> dict[Path, None]:
        """All that is written, what is there for a moment only among it."""
        results = (self.output, self.lines, self.errors)
        return dict.fromkeys((*results, *map(fresh, results), self.file))


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `total` lines, of which `before` were done when it began.

    `first_failure` is what is said of the first of those that `failed`.
    """

    total: int
    before: int
    answered: int
    failed: int
    first_failure: str | None
    plan: Plan
    report: Report


def run(job: Job, progress: Progress, elsewhere: Elsewhere | None = None) -> Outcome:
    """Answer what is not answered yet; `progress` is told how many lines are done, of how many.

    An engine of this process answers, or replicas `elsewhere`.

    Raises UsageError, before weights are read, for files that are not of this job; ExecutionError
    where it cannot go on. Whatever ends it, what is answered stays, and another call goes on.
    """
    job = replace(job, source=job.source.absolute(), output=Path(os.path.realpath(job.output)))
    if parquet.is_parquet(job.output):
        parquet.library()
    if (place := Path(os.path.realpath(job.source))) in job.files:
        raise UsageError(f"{place} is the input, and would be written; give another file for OUT")
    with JobFile(job.file) as file:
        if not file.has_begun:
            _check_free(job)
        # what was left open when it began is what was chosen then
        locked = {"locked": str(file.path)} if file.has_begun else {}
        settings = given_settings(
            models={name_of(job.model): {"model": job.model, **job.arguments, **locked}},
            stored_responses=0,  # a response that is stored is gone when the process ends
            restarts=0, max_samples=MOST_SAMPLES, **job.answers,
        )  # fmt: skip
        source = open_source(job.source, settings.max_body, settings.max_depth)
        asked = _asked(job, source.digest)
        file.check(asked)
        size = taken(job.arguments, OF_LOADING).get("max_batch_size") or STEP_ROWS
        each = _PLACES * size
        settings = settings.model_copy(update={"max_waiting": each * MOST_SAMPLES})
        with contextlib.ExitStack() as stack:
            answerer: Answerer = Here(settings)
            places = each
            if elsewhere is not None:
                answerer = stack.enter_context(elsewhere.answerer(settings, str(job.output)))
                places = each * elsewhere.count
            return asyncio.run(_Work(job, source, file, asked, progress).run(answerer, places))


def _check_free(job: Job) -> None:
    """Raise UsageError where something stands in the place of what the job will write."""
    for path in job.files:
        if path == job.file:
            continue
        try:
            path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{shown(path)} cannot be written: {error.strerror}") from None
        raise UsageError(f"{path} is there, and is of no job; remove it, or give another file")


def _asked(job: Job, digest: str) -> dict[str, Any]:
    """All that answers depend on, of what was asked for."""
    # how much a step does at once is no part of an answer: a job may go on with less
    aside = ("max_batch_size", "max_batch_tokens", "verify")
    given = {name: value for name, value in job.arguments.items() if name not in aside}
    helpers = [given[name] for name in ("assistant_model", "adapter") if given.get(name)]
    helpers += (given.get("adapters") or {}).values()
    contents = {f"files of {model}": content_of_model(model) for model in helpers}
    return {
        "input": f"sha256:{digest}", "model": job.model,
        "files of the model": content_of_model(job.model), **contents, **given, **job.answers,
    }  # fmt: skip


class _Work:
    """A job that goes on: `run` it once, in the event loop that it then has to itself."""

    def __init__(
        self,
        job: Job,
        source: Source,
        file: JobFile,
        asked: Mapping[str, Any],
        progress: Progress,
    ) -> None:
        self._job, self._source = job, source
        self._file, self._asked, self._progress = file, asked, progress
        said = json.dumps(asked, sort_keys=True, default=str)
        self._name = hashlib.sha256(said.encode()).hexdigest()
        self._answers: Results[bytes] = Results(job.lines, lambda r: key_of(r["custom_id"]))
        self._errors: Results[int] = Results(
            job.errors, lambda r: None if may_succeed(r) else int(r["error"]["line"])
        )
        self._before = self._done
        self._order: dict[bytes, None] = {}  # keys of the lines that were read

    @property
    def _done(self) -> int:
        return len(self._answers) + len(self._errors)

    async def run(self, answerer: Answerer, places: int) -> Outcome:
        async with answerer.open() as ran:
            self._file.begin(self._asked, ran.plan, ran.more, int(time.time()))
            self._progress(self._before, self._source.total)
            try:
                await self._answer_all(answerer, places)
                self._arrange()
            finally:
                self._answers.close()
                self._errors.close()
            if parquet.is_parquet(self._job.output):
                parquet.write_table(self._job.lines, self._job.output)
            return Outcome(
                self._done, self._before, len(self._answers), len(self._errors),
                self._first_failure(), ran.plan, await answerer.report(),
            )  # fmt: skip

    def _first_failure(self) -> str | None:
        if not len(self._errors):
            return None
        with self._job.errors.open(encoding="utf-8") as lines:
            return str(json.loads(next(lines))["error"]["message"])

    async def _answer_all(self, answerer: Answerer, places: int) -> None:
        room = asyncio.Semaphore(places)
        try:
            async with asyncio.TaskGroup() as group:
                for number, value in self._source:
                    if (line := self._to_do(number, value)) is None:
                        continue
                    await room.acquire()
                    one = group.create_task(self._answer(answerer, number, line))
                    one.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _to_do(self, number: int, value: Any) -> Line | None:
        """What line `number` asks; None: that is done, or it is refused here."""
        custom_id = None
        try:
            if isinstance(value, ApiError):
                raise value
            custom_id = custom_id_of(value)
            if (key := key_of(custom_id)) in self._order:
                raise refused(f"custom_id: an earlier line has {quoted(custom_id)}", "custom_id")
            self._order[key] = None
            return None if key in self._answers or number in self._errors else read_line(value)
        except ApiError as error:
            if number not in self._errors:
                self._fail(number, custom_id, error, asked=False)
            return None

    async def _answer(self, answerer: Answerer, number: int, line: Line) -> None:
        name = self._name_of(number)
        try:
            body = await answerer.answer(line, name, self._file.began)
        except ApiError as error:
            if error.status in _STOPS:
                raise ExecutionError(
                    f"line {number}: {error.message}; what is answered stays there: mend it, and "
                    "run the same command again"
                ) from None
            self._fail(number, line.custom_id, error, asked=True)
            return
        self._answers.append(key_of(line.custom_id), answered(name, line.custom_id, body))
        self._progress(self._done, self._source.total)

    def _fail(self, number: int, custom_id: str | None, error: ApiError, *, asked: bool) -> None:
        record = failed(self._name_of(number), custom_id, number, error, asked=asked)
        self._errors.append(number, record)
        self._progress(self._done, self._source.total)

    def _name_of(self, number: int) -> str:
        """The id of a request: the same whenever it is answered, and of no other line or job."""
        return hashlib.sha256(f"{self._name}/{number}".encode()).hexdigest()[:32]

    def _arrange(self) -> None:
        """Put the lines into the order of the input. Raises UsageError where some are not of it."""
        keys = [key for key in self._order if key in self._answers]
        if len(keys) < len(self._answers):
            raise UsageError(
                f"{self._job.lines} has lines of which {self._job.source} has no custom_id; take "
                "them out, or give another file for the output"
            )
        if not keys:
            self._job.lines.touch()
        self._answers.arrange(keys)
        self._errors.arrange(sorted(self._errors))
