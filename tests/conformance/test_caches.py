"""Each cache under each attention, whole prompts and chunks, equals transformers in float64."""

from __future__ import annotations

import functools

import pytest
from families import FAMILIES, WINDOW, build, prompts, references

import jackfield
from jackfield.errors import PlanError

LENGTHS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
COUNT = 2 * WINDOW + 2
CACHES = ("dynamic", "static", "paged")
CHUNKS = (1, 2 * WINDOW - 1, None)
#: (family, cache) -> the reason why they do not go together
REFUSED = {
    ("falcon-alibi", "static"): "makes its position bias (alibi = True)",
    ("falcon-alibi", "paged"): "needs its own attention",
}

model_of = functools.cache(build)
runs = [
    (family, cache, attention)
    for family, row in FAMILIES.items()
    for cache in CACHES
    for attention in ("eager", "sdpa")
    if (family, cache) not in REFUSED and attention not in row.refused
]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("family", "cache", "attention"), runs)
@pytest.mark.one_in(4)
def test_a_ragged_batch_equals_the_oracle(
    family: str, cache: str, attention: str, chunk: int | None
) -> None:
    with jackfield.load(
        model_of(family),
        cache_implementation=cache,
        attn_implementation=attention,
        prefill_chunk_size=chunk,
    ) as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        seen = engine.report()["cache"]
    assert [completion.token_ids for completion in found] == references(family, LENGTHS, COUNT)
    prefills = -(-max(LENGTHS) // chunk) if chunk else 1
    if cache == "paged":  # nobody waits for the longest prompt
        assert seen.calls == prefills + COUNT - 1
    else:
        assert (seen.name, seen.calls) == (cache, prefills + COUNT - 1)


@pytest.mark.parametrize(("family", "cache", "attention"), runs)
@pytest.mark.one_in(4)
def test_single_prompts_and_rows_that_end_early(family: str, cache: str, attention: str) -> None:
    expected = references(family, LENGTHS, COUNT)
    counts = [3, COUNT, 1, COUNT - 2, 2]
    with jackfield.load(
        model_of(family), cache_implementation=cache, attn_implementation=attention
    ) as engine:
        for prompt, tokens in zip(prompts(LENGTHS), expected, strict=True):
            assert engine.generate(prompt, max_new_tokens=COUNT)[0].token_ids == tokens
        found = engine.generate(
            prompts(LENGTHS), settings=[{"max_new_tokens": count} for count in counts]
        )
    assert [c.token_ids for c in found] == [
        tokens[:count] for tokens, count in zip(expected, counts, strict=True)
    ]


@pytest.mark.parametrize(("family", "cache"), REFUSED)
def test_what_a_cache_cannot_hold_is_refused_by_name(family: str, cache: str) -> None:
    with pytest.raises(PlanError) as caught:
        jackfield.load(model_of(family), cache_implementation=cache)
    assert f"{cache} (" in str(caught.value)
    assert REFUSED[family, cache] in str(caught.value)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("cache", CACHES)
def test_requests_that_come_and_go_between_chunks(cache: str, chunk: int | None) -> None:
    """Three streams of their own, read in turn, one of them closed while its prompt is fed."""
    expected = references("gemma3", LENGTHS, COUNT)
    texts = prompts(LENGTHS)
    with jackfield.load(
        model_of("gemma3"), cache_implementation=cache, prefill_chunk_size=chunk
    ) as engine:
        streams = [engine.stream(texts[i], max_new_tokens=COUNT) for i in (4, 1, 3)]
        firsts = [next(stream) for stream in streams]
        streams[1].close()
        tokens = [
            [*first.token_ids, *(token for delta in stream for token in delta.token_ids)]
            for first, stream in zip(firsts, streams, strict=True)
        ]
    assert tokens == [expected[4], expected[1][:1], expected[3]]
