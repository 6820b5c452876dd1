"""``static``: fixed shapes at fixed addresses, nothing allocated, and what does not fit refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import build, prompts, references
from torch.profiler import ProfilerActivity, profile

import jackfield
from jackfield.contracts import PaddedCache, Sequence, Settings
from jackfield.engine.engine import Engine
from jackfield.engine.padded import PaddedKVCache
from jackfield.errors import CacheFullError, OptionError, PlanError

CPU = torch.device("cpu")
LENGTHS = (3, 5, 12)
COUNTS = (2, 8, 5)
PROMPTS = prompts(LENGTHS)
EXPECTED = [
    tokens[:count]
    for tokens, count in zip(references("llama", LENGTHS, max(COUNTS)), COUNTS, strict=True)
]


def past_of(engine: Engine) -> Any:
    """The transformers cache of the batch that runs, None between batches."""
    return engine._loop.cache._past  # type: ignore[attr-defined]


def buffers(engine: Engine) -> list[tuple[int, torch.Size]]:
    tensors = [t for layer in past_of(engine).layers for t in (layer.keys, layer.values)]
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_buffers_stay_where_they_are_also_when_rows_finish(
    family: str, chunk: int | None, steps: Any
) -> None:
    with jackfield.load(
        build(family), cache_implementation="static", prefill_chunk_size=chunk
    ) as engine:
        seen = [
            buffers(engine) for _ in steps(engine, PROMPTS, COUNTS) if past_of(engine) is not None
        ]
        assert past_of(engine) is None
    assert len(seen) >= max(COUNTS) - 1
    assert all(found == seen[0] for found in seen)
    assert {shape[0] for _, shape in seen[0]} == {len(PROMPTS)}


def test_the_dynamic_cache_is_seen_to_move(steps: Any) -> None:
    with jackfield.load(build("llama"), cache_implementation="dynamic") as engine:
        seen = [
            buffers(engine) for _ in steps(engine, PROMPTS, COUNTS) if past_of(engine) is not None
        ]
    assert {shape[0] for found in seen for _, shape in found} == {1, 2, 3}
    assert all(a != b for a, b in itertools.pairwise(seen))


def test_rows_that_idle_bring_no_mask_into_a_batch_that_had_none(steps: Any) -> None:
    same = prompts((5, 5, 5))
    with jackfield.load(build("llama"), cache_implementation="static") as engine:
        assert all(
            engine._loop.cache._mask is None  # type: ignore[attr-defined]
            for _ in steps(engine, same, COUNTS)
        )


def wide_model() -> transformers.PreTrainedModel:
    """One whose keys and values are much larger than all else that a decode step makes."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def largest_allocation(cache: str, steps: Any) -> tuple[int, int]:
    """Bytes of the largest allocation in a decode step, and of one layer's keys."""
    prompt = list(range(60)) * 30
    with jackfield.load(
        wide_model(), cache_implementation=cache, attn_implementation="sdpa"
    ) as engine:
        batch = steps(engine, [prompt, prompt], [6, 2])
        next(batch)
        next(batch)  # the second row has finished
        keys = past_of(engine).layers[0].keys
        size = keys.numel() * keys.element_size()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            for _ in range(3):
                next(batch)
    return max(event.self_cpu_memory_usage for event in seen.events()), size


def test_nothing_like_keys_or_values_is_allocated_after_the_first_step(steps: Any) -> None:
    largest, size = largest_allocation("static", steps)
    assert largest < size / 8
    largest, size = largest_allocation("dynamic", steps)
    assert largest >= size


def test_it_is_sized_by_what_each_batch_can_need(steps: Any) -> None:
    with jackfield.load(build("llama"), cache_implementation="static") as engine:
        for chosen in ([0], [0, 1], [0, 1, 2]):
            batch = steps(engine, [PROMPTS[i] for i in chosen], [COUNTS[i] for i in chosen])
            next(batch)
            (_, shape), *_ = buffers(engine)
            longest = max(LENGTHS[i] for i in chosen) + max(COUNTS[i] for i in chosen) - 1
            assert (shape[0], shape[2]) == (len(chosen), longest)
            *_, found = batch
            assert found == [EXPECTED[i] for i in chosen]


def test_a_given_length_splits_what_does_not_fit_together(steps: Any) -> None:
    """Every request fits; the short prompt with many new tokens and the long one do not."""
    with jackfield.load(
        build("llama"), cache_implementation="static?max_cache_len=16", attn_implementation="sdpa"
    ) as engine:
        batches = set()
        for tokens in steps(engine, PROMPTS, COUNTS):
            found = tokens
            if past_of(engine) is not None:
                batches.add(buffers(engine)[0][1])
        assert found == EXPECTED
    assert {(shape[0], shape[2]) for shape in batches} == {(2, 16), (1, 16)}


@pytest.mark.parametrize(
    ("cache", "length"), [("static?max_cache_len=16", 16), ("paged?num_tokens=16&page_size=4", 16)]
)
def test_a_request_that_cannot_fit_is_refused_before_it_is_computed(
    cache: str, length: int
) -> None:
    name, _, _ = cache.partition("?")
    with jackfield.load(build("llama"), cache_implementation=cache) as engine:
        with pytest.raises(CacheFullError) as caught:
            engine.generate(PROMPTS, max_new_tokens=6)
        message = str(caught.value)
        assert message.startswith(f"{name}: 12 prompt tokens and up to 6 new ones need 17 places")
        assert f"it holds {length}" in message
        assert "=17'" in message
        with pytest.raises(CacheFullError):
            engine.stream(PROMPTS[2], max_new_tokens=6)
        assert engine.report()["cache"].calls == 0
        (found,) = engine.generate(PROMPTS[2], max_new_tokens=5)
    assert found.token_ids == EXPECTED[2]


def test_a_batch_that_slips_through_fails_by_name_and_the_engine_lives() -> None:
    with jackfield.load(build("llama"), cache_implementation="static?max_cache_len=16") as engine:
        engine._loop.cache.refuse = lambda *_: None  # type: ignore[method-assign]
        with pytest.raises(CacheFullError, match="needs 17 columns does not fit a cache of 16"):
            engine.generate(PROMPTS[2], max_new_tokens=6)
        assert engine.generate(PROMPTS[2], max_new_tokens=5)[0].token_ids == EXPECTED[2]


@pytest.mark.parametrize("cache", ["static", "offloaded_static"])
@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
        ),
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4),
    ],
    ids=["gpt_neo", "bloom"],
)
def test_a_model_with_its_own_attention_is_refused_by_name(
    cache: str, config: transformers.PreTrainedConfig
) -> None:
    with pytest.raises(PlanError, match=r"the model's own attention .* not written yet"):
        jackfield.plan(config, attn_implementation="eager", cache_implementation=cache)


def test_what_fits_together_is_counted_with_a_running_maximum() -> None:
    looked_at = 0

    class Counted(Sequence):
        __slots__ = ()

        @property
        def num_new(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return super().num_new

    bound = PaddedCache(lambda _: transformers.DynamicCache(), max_cache_len=20)
    job = SimpleNamespace(ragged=None, rollback=False, encoder=None)
    store = PaddedKVCache(bound, SimpleNamespace(device=CPU, requirements=job))
    waiting = [Counted(i, [1] * (5 + i % 3), Settings(max_new_tokens=9)) for i in range(500)]
    assert all(map(store.admit, waiting))
    assert looked_at == 500
    store.release(waiting)
    waiting[7].tokens = [*waiting[7].tokens, *[1] * 10]
    waiting[7].prompt_length += 10
    assert [store.admit(s) for s in waiting[:9]] == [True] * 7 + [False, True]
    store.release(waiting)
    assert store.admit(waiting[7])  # too long by itself: it fails in `prepare`, by name
    assert not store.admit(waiting[8])


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ("static?max_cache_len=0", "max_cache_len must be at least 1"),
        ("static?max_cache_len=many", "of type int"),
        ("static?length=9", "has no option 'length'"),
    ],
)
def test_options_are_checked(cache: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        jackfield.plan("demo", cache_implementation=cache)
