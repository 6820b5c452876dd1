"""What tests need beyond the libraries that jackfield requires: each skip names the extra."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

#: library -> the extra that brings it
EXTRAS = {
    "PIL": "vision",
    "accelerate": "accelerate",
    "bitsandbytes": "bnb",
    "copier": "new",
    "fastapi": "serve",
    "gguf": "gguf",
    "gptqmodel": "gptq",
    "hqq": "hqq",
    "httptools": "client",
    "httpx": "client",
    "kernels": "kernels",
    "llguidance": "structured",
    "matplotlib": "plot",
    "openai": "dev",
    "opentelemetry": "otel",
    "optimum": "quanto",
    "peft": "peft",
    "pyarrow": "parquet",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "pydantic_ai": "dev",
    "pydantic_settings": "serve",
    "ray": "ray",
    "schemathesis": "dev",
    "starlette": "serve",
    "torchao": "torchao",
    "triton": "triton",
    "uvicorn": "serve",
    "uvloop": "serve",
    "werkzeug": "dev",
}


def here(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def missing(*libraries: str) -> str | None:
    """Why tests that need these cannot run, if they cannot."""
    extras = sorted({EXTRAS[library] for library in libraries if not here(library)})
    return f"needs jackfield[{','.join(extras)}]" if extras else None


def needs(*libraries: str) -> None:
    """Skip this test, or this whole module, where one of these is not installed."""
    if reason := missing(*libraries):
        pytest.skip(reason, allow_module_level=True)


def marked(*libraries: str) -> Any:
    """The same as a mark, for a test or one of its parameters."""
    return pytest.mark.skipif(missing(*libraries) is not None, reason=str(missing(*libraries)))


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Skip where a module is imported that an extra brings and that is not here."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS or here(library):
            raise
        needs(library)
