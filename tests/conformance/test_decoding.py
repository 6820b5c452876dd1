"""Drafts change how fast a text comes and never the text: every strategy equals plain decoding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from drafting import ASSISTED, LOOKUP, STRATEGIES, draft_of, load, model_of, repetitive, small_draft
from driven import Arrival, drive, tokens
from families import (
    CONTEXT,
    FAMILIES,
    MORE_FAMILIES,
    VOCAB,
    WINDOW,
    build,
    character_tokenizer,
    oracle,
    prompts,
    references,
)
from scipy import stats

import jackfield
from jackfield.errors import PlanError, UsageError
from jackfield.registry.discovery import registry

COUNT = 2 * WINDOW
LENGTHS = (3, WINDOW + 1, 2 * WINDOW, 5)
SAMPLED = {"temperature": 1.3, "seed": 8, "top_p": 0.95}
CACHES = sorted({r.name for r in registry().of_kind("cache")})
SPELLED = {"paged": "paged?page_size=4", "quantized": "quantized?q_group_size=8"}
NO_ROLLBACK = {"offloaded", "offloaded_static", "quantized", "static"}


@functools.cache
def plain(family: str, lengths: tuple[int, ...], count: int) -> list[list[int]]:
    """What sampling says without drafts."""
    with jackfield.load(build(family), cache_implementation=["paged", "dynamic"]) as engine:
        found = engine.generate(prompts(lengths), max_new_tokens=count, **SAMPLED)
    return [c.token_ids for c in found]


def check(engine: jackfield.Engine, family: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Greedy and sampled texts, together and one by one."""
    greedy, sampled = references(family, lengths, COUNT), plain(family, lengths, COUNT)
    for settings, expected in (({}, greedy), (SAMPLED, sampled)):
        together = engine.generate(prompts(lengths), max_new_tokens=COUNT, **settings)
        assert [c.token_ids for c in together] == expected
        (alone,) = engine.generate(prompts(lengths)[1], max_new_tokens=COUNT, **settings)
        assert alone.token_ids == expected[1]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_every_cache_gives_the_plain_text_or_is_refused_by_name(strategy: str, cache: str) -> None:
    chosen = {"cache_implementation": SPELLED.get(cache, cache)}
    if cache in NO_ROLLBACK:
        with pytest.raises(PlanError, match=r"cannot take back tokens \(rollback\)"):
            load("llama", strategy, **chosen)
        return
    with load("llama", strategy, **chosen) as engine:
        check(engine, "llama")
        texts = repetitive(12, WINDOW)  # a text that goes in circles is one to look things up in
        drafted = engine.generate(texts, max_new_tokens=4 * COUNT)
        alone = engine.generate(texts, max_new_tokens=4 * COUNT, decoding="sample")
        assert [c.token_ids for c in drafted] == [c.token_ids for c in alone]
        figures = engine.report().speculation
    assert figures.accepted > 10
    assert figures.accepted < figures.proposed


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_every_family_gives_the_plain_text_or_is_refused(strategy: str, family: str) -> None:
    try:
        engine = load(family, strategy, cache_implementation=["paged?page_size=4", "dynamic"])
    except PlanError as refused:
        assert "take back tokens" in str(refused)  # noqa: PT017
        return
    with engine:
        check(engine, family)


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("cache", ["paged?page_size=4", "dynamic"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_prompts_in_chunks(strategy: str, cache: str, chunk: int) -> None:
    with load("llama", strategy, cache_implementation=cache, prefill_chunk_size=chunk) as engine:
        check(engine, "llama")


@pytest.mark.parametrize(
    ("attention", "cache"),
    [
        ("eager", "dynamic"),
        ("sdpa", "paged"),
        ("cpu_decode", "paged"),
        ("flex_attention", "dynamic"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_attentions(strategy: str, attention: str, cache: str) -> None:
    chosen = {"attn_implementation": attention, "cache_implementation": cache}
    try:
        engine = load("llama", strategy, **chosen)
    except PlanError as refused:
        pytest.skip(str(refused))
    with engine:
        check(engine, "llama")


TIGHT = {"llama": (4, 72), "mistral": (1, 35), "gemma4": (4, 72)}


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("family", TIGHT)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_requests_that_come_and_are_preempted(strategy: str, family: str, swap: bool) -> None:
    page, size = TIGHT[family]
    texts = repetitive(20, WINDOW)
    model = model_of(family)
    cache = f"paged?page_size={page}&num_tokens={size}&swap={swap}"
    arrivals = [Arrival(n // 2, text, max_new_tokens=COUNT) for n, text in enumerate(texts)]
    with load(family, strategy, cache_implementation=cache, prefill_chunk_size=5) as engine:
        found = tokens(drive(engine, arrivals))
        figures, drafts = engine.statistics(), engine.report().speculation
    assert found == [oracle(model, text, COUNT) for text in texts]
    assert figures.preemptions > 0 or family == "mistral"  # a window that is full grows no more
    assert figures.cache.pages_used == 0
    assert drafts.accepted > 0


@pytest.mark.parametrize("cache", ["paged?page_size=4&num_tokens=24", "dynamic"])
def test_a_draft_model_with_too_little_cache_of_its_own_drafts_for_whom_it_can(cache: str) -> None:
    texts = repetitive(6, WINDOW)
    arrivals = [Arrival(2 * n, text, max_new_tokens=COUNT) for n, text in enumerate(texts)]
    with load("llama", ASSISTED, assistant={"cache_implementation": cache}) as engine:
        found = tokens(drive(engine, arrivals))
        assert engine.report().speculation.accepted > 0
    assert found == [oracle(model_of("llama"), text, COUNT) for text in texts]


def cold(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, ::2] -= 0.1 * ids.shape[1]
    return scores


class Memory:
    """A processor that counts its calls: what it says depends on how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % VOCAB] += 4
        return scores


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.1, "seed": 3},
    {"temperature": 2.0, "seed": 4, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "seed": 5, "min_p": 0.05},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.7, "seed": 6},
    {"sequence_bias": {(5,): 4.0, (5, 6): 8.0, (5, 5): 3.0}},
    {"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [10, 11], "temperature": 1.3, "seed": 7},
    {"temperature": 1.5, "seed": 8, "num_return_sequences": 3},
    {"stop": ["a", "e", "xy"], "temperature": 2.0, "seed": 9},
    {"eos_token_id": list(range(0, VOCAB, 9)), "min_new_tokens": 3},
    {"logits_processor": cold},
    {"logits_processor": [cold, cold], "temperature": 0.9, "seed": 10, "logprobs": 2},
    {"logprobs": 3},
]


@pytest.mark.parametrize("cache", ["dynamic", "paged?page_size=4"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_setting_gives_what_it_gives_without_drafts(strategy: str, cache: str) -> None:
    texts = repetitive(len(MIXED), WINDOW)

    def run(engine: jackfield.Engine, **more: Any) -> list[tuple[Any, ...]]:
        own = [{**s, **more} for s in MIXED] + [{"logits_processor": Memory(), **more}]
        found = engine.generate([*texts, texts[0]], settings=own, max_new_tokens=COUNT)
        return [
            (c.token_ids, c.text, c.finish_reason,
             [(p.token_id, round(p.logprob, 9), len(p.top)) for p in c.logprobs])
            for c in found
        ]  # fmt: skip

    chosen = {"tokenizer": character_tokenizer(), "cache_implementation": cache}
    with load("llama", strategy, **chosen) as engine:
        drafted = run(engine)
        assert run(engine, decoding="sample") == drafted
        assert engine.report().speculation.accepted > 10


def test_samples_of_one_prompt_follow_the_exact_distribution() -> None:
    """Chi-square of the third token over all that can come before it, on a vocabulary of twelve."""
    vocab, rows = 12, 4000
    target, draft = small_draft(vocab=vocab), small_draft(vocab=vocab)
    with torch.no_grad():
        target.lm_head.weight *= 0.4  # flat enough for every token to come
        draft.lm_head.weight *= 0.25
    prompt = [3, 1, 4, 1, 5]
    with jackfield.load(
        target, decoding=ASSISTED, assistant_model=draft, max_batch_size=200
    ) as engine:
        found = engine.generate(
            prompt, max_new_tokens=3, temperature=1.0, seed=1, num_return_sequences=rows
        )
        figures = engine.report().speculation
    prefixes = torch.tensor([[*prompt, a, b] for a in range(vocab) for b in range(vocab)])
    with torch.inference_mode():
        every = target(prefixes).logits.softmax(-1)
    at = len(prompt)
    first = every[0, at - 1]
    second = every[::vocab, at]
    third = every[:, at + 1].view(vocab, vocab, vocab)
    joint = first[:, None] * second
    expected = torch.einsum("ab,abc->c", joint, third).numpy()
    counts = np.bincount([c.token_ids[2] for c in found], minlength=vocab)
    assert stats.chisquare(counts, rows * expected).pvalue > 1e-3
    pairs = np.bincount([c.token_ids[0] * vocab + c.token_ids[1] for c in found],
                        minlength=vocab**2)  # fmt: skip
    kept = (rows * joint.numpy().ravel()) > 5
    mass = joint.numpy().ravel()
    merged = [*pairs[kept], pairs[~kept].sum()], [*mass[kept], mass[~kept].sum()]
    assert stats.chisquare(merged[0], rows * np.array(merged[1])).pvalue > 1e-3
    assert 0.2 < figures.acceptance_rate < 0.99


def word_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Two characters a token where they stand in a list of pairs, otherwise one."""
    characters = [chr(i) for i in range(32, 127)]
    pairs = [a + b for a in characters[:20] for b in characters[40:60]]
    vocab = {text: i for i, text in enumerate(["<s>", *characters, *pairs, "?!"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?!"))
    split = tokenizers.Regex("|".join([f"[{chr(92)}x20-3][H-{chr(92)}[]", "."]))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split(split, "isolated")
    plain.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="?!", bos_token="<s>"
    )


@pytest.mark.parametrize("cache", ["dynamic", "paged?page_size=4"])
def test_a_draft_model_with_another_tokenizer_goes_by_the_text(cache: str) -> None:
    other = word_tokenizer()
    draft = small_draft(vocab=len(other))
    texts = repetitive(4, WINDOW)
    with jackfield.load(
        model_of("llama"),
        tokenizer=character_tokenizer(),
        decoding=ASSISTED,
        assistant_model=draft,
        assistant={"tokenizer": other, "cache_implementation": cache},
    ) as engine:
        for settings in ({}, SAMPLED):
            drafted = engine.generate(texts, max_new_tokens=COUNT, **settings)
            alone = engine.generate(texts, max_new_tokens=COUNT, decoding="sample", **settings)
            assert [c.token_ids for c in drafted] == [c.token_ids for c in alone]
        assert engine.report().speculation.proposed > 20


def test_its_own_model_with_another_tokenizer_is_right_about_what_it_says() -> None:
    """The same weights behind two tokenizers: what one spells, the other reads."""
    own, other = character_tokenizer(), character_tokenizer()
    other.add_tokens(["a token of its own"])
    own.add_tokens(["another one"])  # so that neither vocabulary holds the other
    texts = repetitive(4, WINDOW)
    with jackfield.load(
        model_of("llama"),
        tokenizer=own,
        decoding=ASSISTED,
        assistant_model=build("llama"),
        assistant={"tokenizer": other},
    ) as engine:
        engine.generate(texts, max_new_tokens=COUNT)
        assert engine.report().speculation.acceptance_rate > 0.9


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_an_end_of_sequence_token_and_with_one(strategy: str) -> None:
    text = repetitive(1, WINDOW)[0]
    expected = oracle(model_of("llama"), text, COUNT)
    end = expected[COUNT // 2]
    with load("llama", strategy) as engine:
        (whole,) = engine.generate(text, max_new_tokens=COUNT)
        (cut,) = engine.generate(text, max_new_tokens=COUNT, eos_token_id=end)
    assert (whole.token_ids, whole.finish_reason) == (expected, "length")
    assert cut.token_ids == expected[: expected.index(end) + 1]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_a_draft_model_stops_where_its_context_ends(cache: str) -> None:
    text, count = prompts((10,))[0], 40
    draft = small_draft(context=24)
    with jackfield.load(
        model_of("llama"), decoding=ASSISTED, assistant_model=draft,
        assistant={"cache_implementation": cache},
    ) as engine:  # fmt: skip
        longest = 0
        inner = engine._loop.decoding.propose

        def propose(sequences: Any) -> Any:
            nonlocal longest
            drafts = inner(sequences)
            for sequence, own in zip(sequences, drafts, strict=True):
                longest = max(longest, len(own) and len(sequence.tokens) + len(own))
            return drafts

        engine._loop.decoding.propose = propose
        (found,) = engine.generate(text, max_new_tokens=count)
        assert found.token_ids == oracle(build("llama"), text, count)
        assert 0 < longest <= 24 + 1
        by_default = engine.generate(prompts((30,)), max_new_tokens=3)[0]
        assert by_default.report.speculation.proposed == 0
        with pytest.raises(UsageError, match="the draft model's context is 24"):
            engine.generate(prompts((30,)), max_new_tokens=3, decoding="assisted")


def test_texts_up_to_the_end_of_the_context() -> None:
    (text,) = prompts((CONTEXT - COUNT,))
    for strategy in STRATEGIES:
        with load("llama", strategy) as engine:
            (found,) = engine.generate(text, max_new_tokens=COUNT)
        assert found.token_ids == oracle(model_of("llama"), text, COUNT)


def test_a_draft_model_that_is_the_model_is_always_right() -> None:
    texts = prompts(LENGTHS)
    with jackfield.load(
        model_of("llama"),
        decoding={"four": ASSISTED, "more": f"{ASSISTED}&num_assistant_tokens=7"},
        assistant_model=build("llama"),
    ) as engine:
        for settings in ({}, SAMPLED):
            four = engine.generate(texts, max_new_tokens=COUNT, **settings)
            more = engine.generate(texts, max_new_tokens=COUNT, decoding="more", **settings)
            assert [c.token_ids for c in four] == [c.token_ids for c in more]
        report = four[0].report
    assert engine.report().speculation.acceptance_rate == 1
    assert report.speculation.tokens_per_step == COUNT / 4  # one by the prompt, then 5, 5 and 5
    assert report["decoding"].name == "four"
    assert report["assistant cache"].calls > 0


def test_requests_of_all_decodings_in_one_batch() -> None:
    offered = {"lookup": LOOKUP, "assisted": ASSISTED, "plain": "sample"}
    texts = repetitive(8, WINDOW)
    names = [*offered, "sample"] * 2
    with jackfield.load(
        model_of("gemma3"), decoding=offered, assistant_model=draft_of("gemma3"),
        cache_implementation="paged?page_size=4",
    ) as engine:  # fmt: skip
        own = [{"decoding": name} for name in names]
        found = engine.generate(texts, settings=own, max_new_tokens=COUNT)
        report = engine.report().to_dict()
    assert [c.token_ids for c in found] == [oracle(model_of("gemma3"), t, COUNT) for t in texts]
    assert [c.report["decoding"].name for c in found] == names
    drafted = dict.fromkeys(names, 0)
    for completion, name in zip(found, names, strict=True):
        drafted[name] += completion.report.speculation.proposed
    assert {name for name, proposed in drafted.items() if proposed} == {"lookup", "assisted"}
    assert report["decoding"]["name"] == "lookup"
    assert {"decoding assisted", "decoding plain", "decoding sample"} <= report.keys()
