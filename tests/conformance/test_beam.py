"""Beam search says what transformers' beam search says, whatever runs beside it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from beams import (
    BOTH,
    COUNT,
    ENDS,
    LENGTHS,
    assert_same,
    model_of,
    plain,
    references,
    search,
    texts,
)
from drafting import LOOKUP, repetitive
from driven import Arrival, drive
from families import FAMILIES, MORE_FAMILIES, WINDOW, build, character_tokenizer, oracle, prompts

import jackfield
from jackfield.errors import PlanError
from jackfield.registry.discovery import registry

FORKING = ("paged?page_size=4", "dynamic")
CACHES = sorted({r.name for r in registry().of_kind("cache")})
SPELLED = {"paged": "paged?page_size=4", "quantized": "quantized?q_group_size=8"}
PENALTIES = (1.0, 0.0, 2.0, -1.0)
STOPPING = (False, True, "never")


def flat(lists: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("ends", [None, ENDS], ids=["no-eos", "eos"])
@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.one_in(4)
def test_every_penalty_and_way_to_stop(penalty: float, stopping: Any, ends: Any) -> None:
    """Four prompts of different lengths together, and one alone, with 2 to 5 beams."""
    asked = {"length_penalty": penalty, "early_stopping": stopping, "eos_token_id": ends}
    lengths = set()
    for cache in FORKING:
        with jackfield.load(model_of("llama"), decoding=BOTH,
                            cache_implementation=cache) as engine:  # fmt: skip
            for beams, answers in ((2, 1), (4, 1), (4, 3), (5, 5)):
                own = {**asked, "num_beams": beams, "num_return_sequences": answers}
                expected = references("llama", **own)
                found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT, **own)
                assert_same(texts(found), flat(expected))
                assert_same(
                    texts(engine.generate(prompts(LENGTHS)[1], max_new_tokens=COUNT, **own)),
                    expected[1],
                )
                lengths |= {len(text) for text, _ in flat(expected)}
    if ends is None:
        assert lengths == {COUNT}
    elif penalty <= 1:  # else length is rewarded
        assert len(lengths) > 3


def test_ragged_rows_of_transformers_say_the_same() -> None:
    """transformers pads the four prompts at the left and runs them in one batch."""
    model = build("llama")
    model.set_attn_implementation("sdpa")  # eager makes no numbers of float64 rows that are padded
    width = max(LENGTHS)
    rows = [[0] * (width - len(p)) + p for p in prompts(LENGTHS)]
    mask = [[0] * (width - n) + [1] * n for n in LENGTHS]
    asked = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": COUNT,
             "eos_token_id": list(ENDS)}  # fmt: skip
    output = model.generate(
        torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, **asked,
    )  # fmt: skip
    with jackfield.load(model_of("llama"), decoding="beam") as engine:
        found = texts(engine.generate(prompts(LENGTHS), **asked))
    for (text, score), row, other in zip(
        found, output.sequences[:, width:].tolist(), output.sequences_scores.tolist(), strict=True
    ):
        assert row[: len(text)] == text
        assert not any(row[len(text) :])
        assert score == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_forks_or_is_refused_by_name(cache: str) -> None:
    chosen = {"decoding": "beam", "cache_implementation": SPELLED.get(cache, cache)}
    if cache not in ("dynamic", "paged"):
        with pytest.raises(PlanError, match=rf"{cache}.*cannot copy a sequence \(forks\)"):
            jackfield.load(model_of("llama"), **chosen)
        return
    with jackfield.load(model_of("llama"), **chosen) as engine:
        found = engine.generate(prompts(LENGTHS), num_beams=3, max_new_tokens=COUNT)
    assert_same(texts(found), flat(references("llama", num_beams=3)))


@pytest.mark.parametrize("cache", ["paged?page_size=3", "dynamic"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@pytest.mark.one_in(4)
def test_every_family_or_a_refusal(family: str, cache: str) -> None:
    chosen = {"decoding": "beam", "cache_implementation": cache}
    try:
        engine = jackfield.load(model_of(family), **chosen)
    except PlanError as refused:
        assert "paged" in cache, refused  # noqa: PT017
        with pytest.raises(PlanError):  # it is not the search that paged refuses
            jackfield.plan(model_of(family), cache_implementation=cache)
        return
    asked = {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": ENDS}
    with engine:
        found = texts(engine.generate(prompts(LENGTHS), max_new_tokens=COUNT, **asked))
    assert_same(found, flat(references(family, **asked)))


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("cache", FORKING)
def test_prompts_in_chunks(cache: str, chunk: int) -> None:
    with jackfield.load(
        model_of("gemma3"), decoding="beam", cache_implementation=cache, prefill_chunk_size=chunk
    ) as engine:
        found = engine.generate(prompts(LENGTHS), num_beams=3, max_new_tokens=COUNT)
    assert_same(texts(found), flat(references("gemma3", num_beams=3)))


#: Page size and tokens of a pool: room for one search, and for little beside it.
TIGHT = {"llama": (4, 96), "mistral": (1, 40), "gemma4": (4, 96)}


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("family", TIGHT)
@pytest.mark.one_in(4)
def test_groups_that_are_preempted_go_on_as_if_nothing_had_happened(
    family: str, swap: bool, sharing: bool
) -> None:
    page, size = TIGHT[family]
    cache = f"paged?page_size={page}&num_tokens={size}&swap={swap}&prefix_sharing={sharing}"
    asked = {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": ENDS}
    everyone = repetitive(12, WINDOW)
    arrivals = [
        Arrival(n // 2, text, max_new_tokens=COUNT, **(asked if n % 3 else {}))
        for n, text in enumerate(everyone)
    ]
    with jackfield.load(
        model_of(family), decoding=BOTH, cache_implementation=cache, prefill_chunk_size=5
    ) as engine:
        found = drive(engine, arrivals)
        figures = engine.statistics()
    model = plain(family)
    for n, text in enumerate(everyone):
        if n % 3:
            assert_same(texts(found[n]), search(model, text, **asked))
        else:
            assert found[n][0].new_tokens == oracle(model, text, COUNT)
    assert figures.preemptions > 0 or family == "mistral"  # a window that is full grows no more
    assert figures.cache.pages_used == 0
    assert figures.cache.swapped == 0


@pytest.mark.parametrize("cache", FORKING)
def test_requests_of_all_kinds_in_one_batch_equal_each_alone(cache: str) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"num_beams": 3},
        {"temperature": 1.4, "seed": 4},
        {"num_beams": 4, "num_return_sequences": 2, "repetition_penalty": 1.6},
        {"decoding": "look"},
        {"num_beams": 2, "length_penalty": 3.0, "eos_token_id": ENDS},
        {"repetition_penalty": 1.3, "logprobs": 1},
        {"num_beams": 2, "decoding": "few"},
    ]
    everyone = prompts(tuple(4 + 3 * n for n in range(len(kinds))))
    decoding = {"sample": "sample", "look": LOOKUP, "beam": "beam",
                "few": "beam?length_penalty=-2&early_stopping=never"}  # fmt: skip
    with jackfield.load(model_of("llama"), decoding=decoding, cache_implementation=cache) as engine:

        def run(chosen: Any, **settings: Any) -> list[Any]:
            found = engine.generate(chosen, max_new_tokens=COUNT, **settings)
            return [(c.token_ids, c.score and round(c.score, 5)) for c in found]

        together = run(everyone, settings=kinds)
        alone = flat(run(p, **own) for p, own in zip(everyone, kinds, strict=True))
    assert together == alone
    asked = {"num_beams": 2, "length_penalty": -2.0, "early_stopping": "never"}
    assert together[-1][0] == search(plain("llama"), everyone[-1], **asked)[0][0]


def colder(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Even token ids lose as the text grows; rows as they come."""
    scores[:, ::2] -= 0.1 * ids.shape[1]
    return scores


SHAPED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"sequence_bias": [[[5], 4.0], [[5, 6], 8.0]]},
    {"bad_words_ids": [[18], [33, 114], [103, 67]]},
    {"suppress_tokens": [10, 11, 12]},
    {"min_new_tokens": 6, "eos_token_id": list(ENDS)},
    {"min_length": 15, "eos_token_id": list(ENDS), "repetition_penalty": 0.8},
]


@pytest.mark.parametrize("settings", SHAPED, ids=repr)
def test_what_shapes_scores_shapes_log_probabilities(settings: dict[str, Any]) -> None:
    asked = {"num_beams": 4, "num_return_sequences": 3, **settings}
    expected = [search(plain("llama"), prompt, **asked) for prompt in prompts(LENGTHS)]
    assert expected != [search(plain("llama"), p, num_beams=4, num_return_sequences=3)
                        for p in prompts(LENGTHS)]  # fmt: skip
    with jackfield.load(model_of("llama"), decoding="beam") as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT, **asked)
    assert_same(texts(found), flat(expected))


def test_a_processor_of_the_request_sees_each_beam() -> None:
    import transformers

    asked: dict[str, Any] = {"num_beams": 3, "logits_processor": [colder]}
    expected = [
        search(
            plain("llama"),
            p,
            num_beams=3,
            logits_processor=transformers.LogitsProcessorList([colder]),
        )
        for p in prompts(LENGTHS)
    ]
    assert expected != references("llama", num_beams=3)
    with jackfield.load(model_of("llama"), decoding="beam") as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT, **asked)
    assert_same(texts(found), flat(expected))


def test_stop_strings_end_a_beam_as_in_transformers() -> None:
    """One character a token, so that a text ends at its stop string in both."""
    tokenizer = character_tokenizer()
    asked: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": -1.0}
    ended = 0
    with jackfield.load(model_of("llama"), decoding="beam", tokenizer=tokenizer) as engine:
        free = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT, **asked)
        for number, prompt in enumerate(prompts(LENGTHS)):
            stop = [free[2 * number].text[4:6], free[2 * number + 1].text[3]]
            found = engine.generate(prompt, max_new_tokens=COUNT, stop=stop, **asked)
            expected = search(
                plain("llama"), prompt, stop_strings=stop, tokenizer=tokenizer, **asked
            )
            cut = [(text[: len(c.token_ids)], s) for (text, s), c in
                   zip(expected, found, strict=True)]  # fmt: skip
            assert_same(texts(found), cut)
            ended += sum(c.finish_reason == "stop" for c in found)
            assert not any(s in c.text for s in stop for c in found)
    assert ended > 2


STRUCTURED: list[dict[str, Any]] = [
    {"regex": r"[A-Z][a-z]{2,5} \d{2}"},
    {"choices": ["yes", "no", "perhaps", "nobody knows"]},
    {"json_schema": {"type": "object", "properties": {"age": {"type": "integer"}},
                     "required": ["age"], "additionalProperties": False}},
]  # fmt: skip


@pytest.mark.parametrize("structure", STRUCTURED, ids=repr)
def test_a_structure_holds_in_every_beam_as_transformers_confines_them(
    structure: dict[str, Any],
) -> None:
    """transformers is told by a matcher of its own, made anew for each row and step."""
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    asked: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
    with jackfield.load("demo", dtype="float32", decoding=BOTH) as engine:
        chat = [{"role": "user", "content": "Extract: Ann is 31 years old."}]
        prompt = engine._assembly.text.encode(chat)
        found = engine.generate(prompt, max_new_tokens=16, **asked, **structure)
        beside = engine.generate(
            [prompt] * 3,
            settings=[{"regex": "[a-z ]+"}, {**asked, **structure}, {"temperature": 1, "seed": 1}],
            max_new_tokens=16,
        )
        settings = engine._intake.sequence(
            prompt, {"num_beams": 2, **structure}, streams=False
        ).settings
    ends = settings.eos_token_ids

    def after(ids: torch.Tensor) -> Any:
        constraint = engine._assembly.structures.start(settings.structure, ends)
        assert constraint is not None
        return constraint, constraint.advance(ids[len(prompt) :].tolist())

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        bits = after(ids)[0].matcher.compute_bitmask()
        return [
            t for t in range(engine._assembly.text.vocab_size) if bits[t // 8] >> t % 8 & 1
        ] or [0]

    def whole(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([after(row)[1] is not None for row in ids])

    expected = search(
        engine.model, prompt, prefix_allowed_tokens_fn=allowed, max_new_tokens=16,
        stopping_criteria=[whole], eos_token_id=list(ends), **asked,
    )  # fmt: skip
    expected = [(text[: len(c.token_ids)], s) for c, (text, s) in zip(found, expected, strict=True)]
    assert_same(texts(found), expected, close=1e-4)
    assert [c.token_ids for c in beside[1:3]] == [c.token_ids for c in found]


def test_the_demo_model_in_float32() -> None:
    model = jackfield.load("demo", dtype="float32").model
    chats = ["sort: 4 2 9", "Once upon a time", "What is 23 + 45?"]
    with jackfield.load("demo", dtype="float32", decoding=BOTH) as engine:
        everyone = [
            engine._assembly.text.encode([{"role": "user", "content": text}]) for text in chats
        ]
        ends = model.generation_config.eos_token_id
        for asked in ({"num_beams": 4}, {"num_beams": 3, "length_penalty": 0.0,
                      "early_stopping": True, "num_return_sequences": 3}):  # fmt: skip
            found = engine.generate(everyone, max_new_tokens=24, **asked)
            own = {**asked, "max_new_tokens": 24, "eos_token_id": ends if isinstance(ends, list)
                   else [ends]}  # fmt: skip
            expected = flat(search(model, ids, **own) for ids in everyone)
            assert_same(texts(found), expected, close=1e-4)


#: Structures stand on either side of what parts a step: groups that search, and all others.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "beam": {"num_beams": 2},
    "structure": {"regex": "[0-9]{3,20}"},
    "beam with structure": {"num_beams": 2, "regex": "[0-9]{3,20}"},
    "lookup": {"decoding": "prompt_lookup"},
    "lookup with structure": {"decoding": "prompt_lookup", "regex": "[0-9]{3,20}"},
}


@pytest.mark.parametrize("chosen", list(itertools.combinations(KINDS, 3)), ids="+".join)
@pytest.mark.one_in(4)
def test_searches_and_structures_in_one_step(demo_of_all: Any, chosen: tuple[str, ...]) -> None:
    engine, alone = demo_of_all
    asked = [engine.submit("a b c a b c", max_new_tokens=12, **KINDS[kind]) for kind in chosen]
    assert [one.result(60).token_ids for one in asked] == [alone[kind] for kind in chosen]


@pytest.fixture(scope="module")
def demo_of_all() -> Any:
    """The demo model with all of these strategies, and what each kind says alone."""
    named = {"sample": "sample", "beam": "beam", "prompt_lookup": "prompt_lookup"}
    with jackfield.load("demo", decoding=named, dtype="float32") as engine:
        alone = {
            kind: engine.generate("a b c a b c", max_new_tokens=12, **own)[0].token_ids
            for kind, own in KINDS.items()
        }
        yield engine, alone
