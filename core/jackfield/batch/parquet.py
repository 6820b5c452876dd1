"""Parquet files: rows that ask, and a table of the answers. Needs pyarrow (the extra `parquet`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jackfield.batch.results import fresh
from jackfield.batch.seen import Seen
from jackfield.errors import ExecutionError, UsageError, error_text
from jackfield.serving.errors import ApiError, refused
from jackfield.serving.json_bodies import read_json
from jackfield.serving.schema.common import as_json

ROWS = 256  # that are read, or written, at once
COLUMNS = ("custom_id", "method", "url", "body")


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def library() -> tuple[Any, Any]:
    """pyarrow and its module for Parquet. Raises UsageError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"Parquet files need pyarrow; pip install jackfield[parquet] ({error.name} is not here)"
        ) from None
    return pyarrow, pyarrow.parquet


class Rows:
    """The rows of a file whose columns are `COLUMNS`, all of them texts; bodies are JSON.

    Raises UsageError for any other.
    """

    def __init__(self, path: Path, seen: Seen, most: int, depth: int) -> None:
        self._arrow, self._parquet = library()
        self.digest, self._path, self._seen = seen.digest, path, seen
        self._most, self._depth = most, depth
        try:
            self._file = self._parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is no Parquet file: {error_text(error)}") from None
        self.total: int = self._file.metadata.num_rows
        self._check(self._file.schema_arrow)

    def _check(self, schema: Any) -> None:
        if sorted(schema.names) != sorted(COLUMNS):
            raise UsageError(
                f"{self._path} has the columns {', '.join(schema.names)}; a batch is read from "
                f"{', '.join(COLUMNS)}, and no others"
            )
        texts = (self._arrow.types.is_string, self._arrow.types.is_large_string)
        for field in schema:
            if not any(is_text(field.type) for is_text in texts):
                raise UsageError(
                    f"{self._path}: the column {field.name} is {field.type}, and must be a text"
                    f"{' with JSON' if field.name == 'body' else ''}"
                )

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = 0
        try:
            for rows in self._file.iter_batches(ROWS):
                self._seen.check(self._path)
                for row in rows.to_pylist():
                    number += 1
                    yield number, {**row, "body": self._body(row["body"])}
        except (OSError, ValueError) as error:  # pyarrow's own are such
            raise ExecutionError(
                f"{self._path} cannot be read beyond row {number}: {error_text(error)}"
            ) from None

    def _body(self, text: str | None) -> Any:
        """Its value, or the ApiError that says why it has none."""
        data = (text or "null").encode()
        if len(data) > self._most:
            return refused(f"the body has more than {self._most} bytes", "body")
        try:
            return read_json(data, self._depth)
        except ApiError as error:
            return error


def write_table(lines: Path, table: Path) -> None:
    """Write the lines of the output `lines` as `table`, in one step.

    Columns: id, custom_id, status_code, request_id, body (the answer, as JSON). Raises
    ExecutionError where it cannot be written.
    """
    arrow, parquet = library()
    texts = {name: arrow.string() for name in ("id", "custom_id", "request_id", "body")}
    schema = arrow.schema({**texts, "status_code": arrow.int32()})
    new = fresh(table)
    try:
        with lines.open("rb") as file, parquet.ParquetWriter(new, schema) as writer:
            while rows := [_row(line) for line, _ in zip(file, range(ROWS), strict=False)]:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
        new.replace(table)
    except OSError as error:
        raise ExecutionError(
            f"{table} cannot be written: {error_text(error)}; the answers are in {lines}: mend it, "
            "and run the same command again"
        ) from None
    finally:
        new.unlink(missing_ok=True)


def _row(line: bytes) -> dict[str, Any]:
    found = json.loads(line)
    response = found["response"]
    return {
        "id": found["id"], "custom_id": found["custom_id"],
        "request_id": response["request_id"], "body": as_json(response["body"]),
        "status_code": response["status_code"],
    }  # fmt: skip
