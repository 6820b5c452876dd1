"""Hostile requests beside a victim: its tokens and its gaps stay what they are alone.

`python -m pytest tests/core/test_poison.py -s` prints the counts that docs/hardening.md shows.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from families import build, character_tokenizer
from poison import FAMILIES

import jackfield
from jackfield.bridge import chat_templates
from jackfield.errors import JackfieldError

if TYPE_CHECKING:
    import torch

pytest.importorskip("llguidance", reason="needs jackfield[structured]")

VICTIM = {"max_new_tokens": 120, "temperature": 1.0, "seed": 7, "eos_token_id": []}
VICTIMS_PROMPT = list(range(1, 9))
MOST_AT_ONCE = 12


class Victim(threading.Thread):
    """Asks for the same text again and again; notes what it got, and in which steps."""

    def __init__(self, engine: Any) -> None:
        super().__init__(daemon=True)
        self.engine, self.over = engine, threading.Event()
        self.found: list[list[int]] = []
        self.gaps: Counter[int] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set() or not self.found:
                self.found.append(self.once())
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.failure = error

    def once(self) -> list[int]:
        seen: list[int] = []

        def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(self.engine._loop.steps)
            return scores

        tokens = [
            token
            for delta in self.engine.stream(VICTIMS_PROMPT, logits_processor=note, **VICTIM)
            for token in delta.token_ids
        ]
        self.gaps.update(b - a for a, b in itertools.pairwise(seen))
        return tokens


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.05)
    with jackfield.load(
        build("llama"),
        tokenizer=character_tokenizer(),
        cache_implementation="paged?page_size=8&num_tokens=8192",
        max_batch_size=MOST_AT_ONCE,
        scheduler="fifo",
    ) as made:
        yield made


def poisoned(engine: Any, count: int, seed: int) -> Counter[str]:
    """Ask for so many hostile requests; how each ended."""
    found: Counter[str] = Counter()
    chance, opened = random.Random(seed), []
    plain = engine.tokenizer.chat_template
    for number in range(count):
        family = FAMILIES[number % len(FAMILIES)]
        prompt, asked = family(chance)
        engine.tokenizer.chat_template = asked.pop("template", plain)
        try:
            request = engine.submit(prompt, **{"max_new_tokens": 12, **asked})
        except JackfieldError as error:
            said = str(error)
            found["refused before the loop"] += 1
        else:
            said = ""
            opened.append(request)
            if chance.random() < 0.2:
                request.cancel()
        assert "\n" not in said, (family.__name__, said)
        assert len(said) < 2000, (family.__name__, said[:200])
        if len(opened) >= MOST_AT_ONCE:
            end(opened, found)
    end(opened, found)
    return found


def end(opened: list[Any], found: Counter[str]) -> None:
    while opened:
        completion = opened.pop().result(120)
        ended = "ended alone, by an error" if completion.finish_reason == "error" else "ran"
        found["cancelled" if completion.finish_reason == "cancelled" else ended] += 1


def trial(engine: Any, count: int, seed: int) -> None:
    alone = Victim(engine).once()
    victim = Victim(engine)
    victim.start()
    found = poisoned(engine, count, seed)
    victim.over.set()
    victim.join(120)
    assert victim.failure is None
    changed = sum(tokens != alone for tokens in victim.found)
    print(f"\n{count} requests: {dict(found)}; {len(victim.found)} victims, {changed} changed")  # noqa: T201
    assert len(alone) == VICTIM["max_new_tokens"]
    assert changed == 0
    assert set(victim.gaps) == {1}, "it gained a token in every step"
    assert sum(found.values()) == count
    assert min(found[how] for how in ("refused before the loop", "ended alone, by an error")) > 0
    health = engine.health()
    assert (health.alive, health.failure, health.inside) == (True, None, None)


def test_poison_changes_no_other_request(engine: Any) -> None:
    trial(engine, 400, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
def test_much_poison_changes_no_other_request(engine: Any, seed: int) -> None:
    trial(engine, 2000, seed)
