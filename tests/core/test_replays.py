"""What other ranks compute is what rank 0 does: two of them in one process, over random stories."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import jackfield
from jackfield.contracts import KVCache, ModelInputs
from jackfield.engine import assembly
from jackfield.engine.bound import BoundModel
from jackfield.engine.engine import Engine
from jackfield.engine.following import Replay
from jackfield.engine.leading import SharedCache
from jackfield.errors import JackfieldError

VOCAB = 40


@functools.cache
def model(window: int | None) -> Any:
    torch.manual_seed(5)
    config = transformers.MistralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=128, sliding_window=window,
        initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


class Other:
    """Stands for the connection to another rank, and for that rank: it replays at once.

    At each commit it has computed the same logits, and its sequences are those of rank 0.
    """

    cause: str | None = None

    def __init__(self, bound: BoundModel) -> None:
        self.bound = BoundModel(copy.deepcopy(bound.model), bound.plan)
        self.restore = self.bound.install()
        self.replay = Replay(self.bound.cache, self.forward)
        self.logits = torch.empty(0)
        self.steps = 0

    def forward(self, inputs: ModelInputs) -> None:
        self.logits = self.bound.forward(inputs)

    def send(self, acts: list[Any]) -> None:
        self.replay.play(acts)


class Compared(SharedCache):
    """Compares the sequences of both after each step, as far as rank 0 has told of them."""

    def send(self) -> None:
        super().send()
        other: Any = self._leader
        known = other.replay._sequences
        assert known.keys() == self._known.keys()
        for number, length in self._known.items():
            told = (len(known[number].tokens), known[number].tokens[: known[number].prompt_length])
            assert told == (length, self.seen[number].tokens[: self.seen[number].prompt_length])
            assert known[number].tokens == self.seen[number].tokens[:length]
            assert known[number].num_cached == self.seen[number].num_cached
            assert known[number].sample == self.seen[number].sample

    @property
    def seen(self) -> dict[int, Any]:
        return self.__dict__.setdefault("_seen", {})

    def _tell(self, *sequences: Any) -> None:
        self.seen.update({one.id: one for one in sequences})
        super()._tell(*sequences)

    def fork(self, copies: Any, dropped: Any) -> None:
        self.seen.update({into.id: into for _, into in copies})
        super().fork(copies, dropped)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Other]]:
    """Every engine that is loaded has another rank; these are they."""
    others: list[Other] = []

    def steps(bound: BoundModel, leader: None) -> tuple[Any, KVCache]:
        other = Other(bound)
        others.append(other)
        cache = Compared(bound.cache, other)  # type: ignore[arg-type]

        def together(inputs: ModelInputs) -> torch.Tensor:
            cache.send()
            logits = bound.forward(inputs)
            assert torch.equal(logits, other.logits)
            other.steps += 1
            return logits

        return together, cache

    monkeypatch.setattr(assembly, "_steps", steps)
    yield others
    for other in others:
        other.restore()


def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] % 7 == 0:
        raise ValueError("no")
    return scores


def tale(engine: Engine, draw: random.Random, beams: int, guided: bool) -> None:
    """Some requests: one after the other, cancelled, failing, of several texts or beams.

    Where they are `guided`, most have a negative prompt.
    """
    prompt = [draw.randrange(VOCAB) for _ in range(20)]
    requests = []
    for _ in range(draw.randint(4, 7)):
        begin = [*prompt[: draw.randint(0, 3 if beams else 19)], draw.randrange(VOCAB)]
        asked: dict[str, Any] = {"max_new_tokens": draw.randint(10, 16), "seed": draw.randrange(9)}
        if beams:
            asked["num_beams"] = beams
        else:
            asked["temperature"] = draw.choice([0, 1.0])
            asked["logits_processor"] = draw.choice([None, None, None, [broken]])
        if guided:
            asked["guidance_scale"] = draw.choice([1, 1.5, 3.0])
        if asked.get("guidance_scale", 1) != 1:
            asked["negative_prompt"] = prompt[: draw.randint(1, 19)]
        requests.append(engine.submit(begin, **asked))
        if draw.random() < 0.3:
            draw.choice(requests).cancel()
        if draw.random() < 0.3:
            next(iter(requests[-1]), None)
    for request in requests:
        try:
            request.result(timeout=60)
        except JackfieldError as error:
            assert "no" in str(error)  # noqa: PT017 - of those that fail, and no other


WAYS: dict[str, dict[str, str]] = {
    "beams": {"decoding": "beam", "cache_implementation": "paged?num_tokens={tight}&page_size=2"},
    "beams of large pages": {
        "decoding": "beam", "cache_implementation": "paged?num_tokens={pages}&page_size=16",
    },
    "beams of rows": {"decoding": "beam", "cache_implementation": "dynamic"},
    "drafts": {
        "decoding": "prompt_lookup", "cache_implementation": "paged?num_tokens=80&page_size=4",
    },
    "drafts of rows": {"decoding": "prompt_lookup", "cache_implementation": "dynamic"},
    "tight": {"cache_implementation": "paged?num_tokens=44&page_size=1"},
    "rows": {"cache_implementation": "static?max_cache_len=64", "attn_implementation": "sdpa"},
    "guided, tight": {"cache_implementation": "paged?num_tokens=80&page_size=1"},
    "guided, large pages": {"cache_implementation": "paged?num_tokens=96&page_size=16"},
    "guided rows": {"cache_implementation": "dynamic"},
    "guided drafts": {
        "decoding": "prompt_lookup", "cache_implementation": "paged?num_tokens=96&page_size=4",
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(2)
def test_other_ranks_compute_the_steps_of_rank_0(shared: list[Other], way: str) -> None:
    preemptions = 0
    for seed in range(4):
        draw = random.Random(f"{way} {seed}")
        beams = draw.choice([2, 3]) if "beams" in way else 0
        arguments = {
            name: value.format(tight=20 * beams, pages=32 * beams)
            for name, value in WAYS[way].items()
        }
        window = 9 if way in ("drafts", "tight") else None
        places = 6 if "guided" in way else 3 * max(1, beams)
        with jackfield.load(model(window), max_batch_size=places, **arguments) as engine:
            tale(engine, draw, beams, "guided" in way)
            preemptions += engine.statistics().preemptions
    assert sum(other.steps for other in shared) > 40
    assert not any(other.replay._sequences for other in shared)
    assert preemptions > 0 or "tight" not in str(WAYS[way])


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_beams_that_were_preempted_enter_again_alone(
    shared: list[Other], beams: int, length: int
) -> None:
    """Without a page to spare, as nobody else runs."""
    few = f"paged?num_tokens={32 * beams}&page_size=16"
    arguments = {"decoding": "beam", "cache_implementation": few, "max_batch_size": 3 * beams}
    with jackfield.load(model(None), **arguments) as engine:
        prompts = [[number] * length for number in (7, 8, 9)]
        engine.generate(prompts, max_new_tokens=20, num_beams=beams)
        assert engine.statistics().preemptions > 0
    assert shared[0].steps > 20
