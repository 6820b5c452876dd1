"""A batch that is stepped by hand, so that a test can look at the cache between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jackfield.engine import Engine

Steps = Callable[..., Iterator[list[list[int]]]]


@pytest.fixture
def steps() -> Steps:
    """`steps(engine, prompts, counts)` yields the new tokens of every prompt after each step."""

    def run(engine: Engine, prompts: list[list[int]], counts: list[int], **settings: Any) -> Any:
        loop = engine._loop
        sequences = [
            engine._sequence(prompt, {"max_new_tokens": count, **settings}, streams=False)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        for sequence in sequences:
            loop.submit(sequence)
        while loop.running or loop.waiting:
            loop.step()
            yield [sequence.new_tokens for sequence in sequences]

    return run
