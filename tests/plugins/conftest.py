"""A batch that is stepped by hand, and kernel repositories in local folders."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from families import config_of

from jackfield.engine.engine import Engine

if TYPE_CHECKING:
    from forking import Forks

SOURCES = Path(__file__).parent / "kernels"

Maker = Callable[..., Path]
Steps = Callable[..., Iterator[list[list[int]]]]


@pytest.fixture
def steps() -> Steps:
    """`steps(engine, prompts, counts)` yields the new tokens of every prompt after each step.

    So a test can look at the cache between two steps.
    """

    def run(engine: Engine, prompts: list[list[int]], counts: list[int], **settings: Any) -> Any:
        loop = engine._loop
        sequences = [
            engine._intake.sequence(prompt, {"max_new_tokens": count, **settings}, streams=False)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        for sequence in sequences:
            loop.submit(sequence)
        while loop.running or loop.waiting:
            loop.step()
            yield [sequence.new_tokens for sequence in sequences]

    return run


def write_kernel(folder: Path, source: str, *, variant: str = "torch-cpu", **more: object) -> Path:
    """A kernel repository with one build, in the layout of the `kernels` package."""
    build = folder / "build" / variant
    build.mkdir(parents=True, exist_ok=True)
    (build / "__init__.py").write_text(source)
    metadata = {
        "id": "test_" + "_".join(folder.parts[-2:]).replace("-", "_"),
        "name": "test-kernel",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": variant.partition("-")[2]},
        **more,
    }
    (build / "metadata.json").write_text(json.dumps(metadata))
    return folder


@pytest.fixture
def tiny() -> Callable[..., transformers.PreTrainedModel]:
    """A model of a family, with these fields of its config changed."""

    def make(
        family: str, dtype: torch.dtype = torch.float32, **changes: object
    ) -> transformers.PreTrainedModel:
        config = config_of(family)
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager"
            )
        model.generation_config.pad_token_id = 0
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def flash_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernel(
        tmp_path_factory.mktemp("kernels") / "flash", (SOURCES / "flash.py").read_text()
    )


@pytest.fixture(scope="session")
def metal_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernel(
        tmp_path_factory.mktemp("kernels") / "metal", (SOURCES / "metal.py").read_text()
    )


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    return tmp_path / "settings" / "kernels.lock.json"


@pytest.fixture
def local_kernels(
    forks: Forks,
    flash_folder: Path,
    metal_folder: Path,
    lock_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The repositories me/flash and me/metal are there, "me" is trusted, nothing is locked yet."""
    pytest.importorskip("kernels", reason="needs jackfield[kernels]")
    monkeypatch.setenv("LOCAL_KERNELS", f"me/flash={flash_folder}:me/metal={metal_folder}")
    monkeypatch.setenv("JACKFIELD_TRUSTED_PUBLISHERS", "someone, me")
    monkeypatch.setenv("JACKFIELD_KERNEL_LOCK", str(lock_file))
    quick = SimpleNamespace(**vars(subprocess) | {"run": forks.run})
    monkeypatch.setattr("jackfield_plugins.hub_kernels.probing.subprocess", quick)


@pytest.fixture
def kernel(tmp_path: Path, local_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Write a repository me/NAME with this source and let `LOCAL_KERNELS` find it."""

    def make(source: str, name: str = "kernel", **more: object) -> Path:
        folder = write_kernel(tmp_path / name, source, **more)
        monkeypatch.setenv("LOCAL_KERNELS", f"me/{name}={folder}")
        return folder

    return make
