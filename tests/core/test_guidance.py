"""Guidance: two sequences of one request say what `generate` says, in any company."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
import transformers
from drafting import draft_of
from families import STATES_APART, build, prompts

import jackfield
from jackfield.contracts import Schedule, Sequence
from jackfield.demo import MODEL_PATH
from jackfield.engine.checked_schedule import CheckedSchedule
from jackfield.errors import CacheFullError, JackfieldError, PromptError, SettingsError

PROMPTS = prompts((5, 13, 30, 1))
NEGATIVE = prompts((21, 2, 9))
STORY = "Once upon a time, there was a little fox"
NEW, EOS = 12, 7
ASKED: list[dict[str, Any]] = [
    {"guidance_scale": 2.5},
    {"guidance_scale": 1.5, "negative_prompt": NEGATIVE[0]},
    {"guidance_scale": 3.0, "negative_prompt": NEGATIVE[1], "repetition_penalty": 1.3},
    {"guidance_scale": 0.0, "negative_prompt": NEGATIVE[2], "eos_token_id": EOS},
    {
        "guidance_scale": -1.5, "negative_prompt": NEGATIVE[1], "no_repeat_ngram_size": 1,
        "min_new_tokens": 3, "eos_token_id": EOS, "suppress_tokens": [11, 12],
    },
]  # fmt: skip
#: How an engine is loaded -> that several requests, pieces and guesses share its steps.
WAYS: dict[str, dict[str, Any]] = {
    "paged": {"cache_implementation": "paged?page_size=4"},
    "rows": {"cache_implementation": "dynamic"},
    "pieces of rows": {"cache_implementation": "dynamic", "prefill_chunk_size": 4},
    "static": {"cache_implementation": "static?max_cache_len=64"},
    "pieces": {"prefill_chunk_size": 3, "max_batch_size": 4, "max_batch_tokens": 9},
    "two places": {"max_batch_size": 2},
    "small pool": {"cache_implementation": "paged?page_size=4&num_tokens=104"},
    "swapped": {"cache_implementation": "paged?page_size=4&num_tokens=104&swap=True"},
    "guesses": {"decoding": "prompt_lookup?min_acceptance_rate=0&max_matching_ngram_size=1"},
    "guesses of rows": {
        "decoding": "prompt_lookup?min_acceptance_rate=0&max_matching_ngram_size=1",
        "cache_implementation": "dynamic",
    },
    "assistant": {"decoding": "assisted?min_acceptance_rate=0", "assistant_model": "llama"},
    "short first": {"scheduler": "short-first", "max_batch_size": 3, "max_batch_tokens": 8},
    "in the same pieces": {"deterministic": True, "prefill_chunk_size": 4, "max_batch_size": 4},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """Of plain transformers; engines have a copy of it."""
    return build("llama")


def load(model: Any, **arguments: Any) -> jackfield.Engine:
    if "assistant_model" in arguments:
        arguments["assistant_model"] = draft_of(arguments["assistant_model"])
    return jackfield.load(copy.deepcopy(model), **arguments)


def right(model: Any, prompt: list[int], **asked: Any) -> Any:
    """What plain transformers says, of this request alone."""
    ids, own = torch.tensor([prompt]), {"do_sample": False, "max_new_tokens": NEW, **asked}
    if (negative := own.pop("negative_prompt", None)) is not None:
        own["negative_prompt_ids"] = torch.tensor([negative])
        own["negative_prompt_attention_mask"] = torch.ones(1, len(negative), dtype=torch.long)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True,
        output_logits=True, output_scores=True, **own,
    )  # fmt: skip


def tokens(model: Any, prompt: list[int], **asked: Any) -> list[int]:
    found: list[int] = right(model, prompt, **asked).sequences[0, len(prompt) :].tolist()
    return found


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return [tokens(model, prompt, **asked) for prompt in PROMPTS for asked in [{}, *ASKED]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_tokens_are_those_of_generate(model: Any, wanted: list[list[int]], way: str) -> None:
    """Prompts and negative prompts of all lengths in one batch, beside requests without any."""
    pairs = [(prompt, asked) for prompt in PROMPTS for asked in [{}, *ASKED]]
    assert len(set(map(str, wanted))) > len(wanted) * 3 // 4
    with load(model, **WAYS[way]) as engine:
        for _ in range(2):  # the second time beginnings are found in the cache
            found = engine.generate(
                [prompt for prompt, _ in pairs], settings=[asked for _, asked in pairs],
                max_new_tokens=NEW,
            )  # fmt: skip
            assert [one.token_ids for one in found] == wanted
        figures = engine.statistics()
        assert (figures.running, figures.waiting) == (0, 0)
        assert figures.cache is None or figures.cache.pages_used == 0
        assert way not in {"small pool", "swapped"} or figures.preemptions
        guesses = figures.speculation
        assert guesses is None or guesses.accepted


@pytest.mark.parametrize("family", ["gemma3", "mixtral", *["qwen3-next"] * STATES_APART])
@pytest.mark.parametrize("cache", ["paged?page_size=4&num_tokens=104", "paged"])
@pytest.mark.one_in(4)
def test_windows_experts_and_states(family: str, cache: str) -> None:
    model = build(family)
    pairs = [(prompt, asked) for prompt in PROMPTS[:3] for asked in ASKED[:3]]
    due = [tokens(model, prompt, **asked) for prompt, asked in pairs]
    with load(model, cache_implementation=cache) as engine:
        found = engine.generate(
            [p for p, _ in pairs], settings=[asked for _, asked in pairs], max_new_tokens=NEW
        )
    assert [one.token_ids for one in found] == due


def test_logits_and_scores_are_those_of_generate(model: Any) -> None:
    """Logits are the prompt's own; scores are led away from the negative one's."""
    for asked in ASKED[1:3]:
        due = right(model, PROMPTS[1], **asked)
        with load(model) as engine:
            (one,) = engine.generate(
                PROMPTS[1], max_new_tokens=NEW, output_logits=True, output_scores=True, logprobs=1,
                **asked,
            )  # fmt: skip
        assert one.logits is not None
        assert one.scores is not None
        torch.testing.assert_close(one.logits, torch.cat(due.logits).float(), rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(one.scores, torch.cat(due.scores).float(), rtol=2e-4, atol=2e-5)
        shares = one.logits.log_softmax(-1)
        for row, entry in zip(shares, one.logprobs, strict=True):
            assert abs(entry.logprob - float(row[entry.token_id])) < 1e-4


def test_samples_are_drawn_of_what_generate_draws_from(model: Any) -> None:
    """Each text has a negative one of its own; neighbours and places change nothing."""
    asked = {
        "temperature": 1.4, "top_k": 30, "seed": 5, "max_new_tokens": NEW,
        "guidance_scale": 1.8, "negative_prompt": NEGATIVE[0],
    }  # fmt: skip
    texts = []
    for more in ({}, {"max_batch_size": 2}, {"cache_implementation": "dynamic"}):
        with load(model, **more) as engine:
            beside = engine.submit(PROMPTS[0], max_new_tokens=30)
            found = engine.generate(PROMPTS[2], num_return_sequences=4, output_scores=True, **asked)
            beside.result()
            texts.append([one.token_ids for one in found])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(map(tuple, texts[0]))) == 4
    one = found[0]
    config = transformers.GenerationConfig(
        do_sample=True, temperature=1.4, top_k=30, guidance_scale=1.8, use_cache=True
    )
    processors = model._get_logits_processor(
        config, input_ids_seq_length=len(PROMPTS[2]), device="cpu",
        negative_prompt_ids=torch.tensor([NEGATIVE[0]]),
    )  # fmt: skip
    assert one.scores is not None
    for at in range(len(one.token_ids)):
        ids = torch.tensor([[*PROMPTS[2], *one.token_ids[:at]]])
        with torch.no_grad():
            scores = processors(ids, model(ids).logits[:, -1].float())
        torch.testing.assert_close(
            one.scores[at].softmax(-1), scores[0].softmax(-1).float(), rtol=1e-4, atol=1e-6
        )


def test_streams_and_ends(model: Any) -> None:
    due = tokens(model, PROMPTS[1], **ASKED[1])
    with load(model, max_batch_size=2) as engine:
        stream = engine.stream(PROMPTS[1], max_new_tokens=NEW, **ASKED[1])
        assert [token for delta in stream for token in delta.token_ids] == due
        long = engine.submit(PROMPTS[2], max_new_tokens=60, **ASKED[0])
        waits = engine.submit(PROMPTS[0], max_new_tokens=NEW, **ASKED[1])
        next(iter(long))
        long.cancel()
        assert long.result().finish_reason == "cancelled"
        assert waits.result().token_ids == tokens(model, PROMPTS[0], **ASKED[1])
        late = engine.submit(PROMPTS[2], max_new_tokens=90, deadline=1e-9, **ASKED[0])
        assert late.result().finish_reason == "cancelled"

        def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > len(PROMPTS[0]) + 3:
                raise ValueError("no more")
            return scores

        failed = engine.submit(PROMPTS[0], max_new_tokens=NEW, logits_processor=fails, **ASKED[1])
        assert "no more" in str(failed.result().error)
        (after,) = engine.generate(PROMPTS[1], max_new_tokens=NEW, **ASKED[1])
        assert after.token_ids == due
        figures = engine.statistics()
        assert (figures.running, figures.waiting) == (0, 0)
        assert figures.cache is not None
        assert figures.cache.pages_used == 0


def test_a_text_with_a_structure_and_stops() -> None:
    """What may not come is taken out after the scores are led away."""
    asked = {"guidance_scale": 3.0, "negative_prompt": STORY, "max_new_tokens": 40}
    plain_model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float64)
    with jackfield.load("demo", dtype="float64") as engine:
        ids = engine.tokenizer(STORY)["input_ids"]
        (chosen, said, by_ids, plain) = engine.generate(
            ["Once upon a time"] * 4,
            settings=[
                {**asked, "regex": "[a-z]{4,9} and [a-z]{3}"}, asked,
                {**asked, "negative_prompt": None, "negative_prompt_ids": torch.tensor([ids])},
                {"max_new_tokens": 40},
            ],
        )  # fmt: skip
        assert " and " in chosen.text
        assert chosen.finish_reason == "stop"
        assert said.token_ids == by_ids.token_ids != plain.token_ids
        assert said.token_ids == tokens(
            plain_model, engine.tokenizer("Once upon a time")["input_ids"],
            negative_prompt=ids, guidance_scale=3.0, max_new_tokens=40,
        )  # fmt: skip
        stop = said.text[10:13]
        (stopped,) = engine.generate("Once upon a time", stop=[stop], **asked)
        assert stopped.text == said.text[: said.text.index(stop)]


def test_a_chat_led_away_from_another() -> None:
    chat = [{"role": "user", "content": "Tell me a story."}]
    other = [{"role": "user", "content": "Sort these numbers: 3 1 2"}]
    with jackfield.load("demo", dtype="float64") as engine:
        ids = [engine.tokenizer.apply_chat_template(
            one, add_generation_prompt=True, return_dict=True)["input_ids"] for one in (chat, other)
        ]  # fmt: skip
        (one,) = engine.generate(
            chat, negative_prompt=other, guidance_scale=1.5, max_new_tokens=NEW,
            add_generation_prompt=True,
        )  # fmt: skip
        (same,) = engine.generate(
            ids[0], negative_prompt=ids[1], guidance_scale=1.5, max_new_tokens=NEW
        )
    assert one.token_ids == same.token_ids


def test_guidance_keeps_its_bits(model: Any) -> None:
    """Both sequences are read in the same pieces, whatever runs, waits or is preempted."""
    model = build("llama", torch.float32)
    batch = [(prompt, asked) for prompt in PROMPTS for asked in ASKED[:3]]
    bounds: list[dict[str, Any]] = [
        {},
        {"max_batch_size": 2, "max_batch_tokens": 66},
        {"max_batch_size": 5, "max_batch_tokens": 69},
        {"cache_implementation": "paged?page_size=4&num_tokens=120"},
        {"cache_implementation": "paged?page_size=4&num_tokens=120&swap=true"},
        {"scheduler": "short-first", "max_batch_size": 3},
    ]
    seen, preemptions = [], 0
    for bound in bounds:
        with load(model, deterministic=True, **bound) as engine:
            found = engine.generate(
                [p for p, _ in batch], settings=[asked for _, asked in batch],
                max_new_tokens=NEW, output_scores=True,
            )  # fmt: skip
            seen.append([(one.token_ids, one.scores.tolist()) for one in found])  # type: ignore[union-attr]
            (alone,) = engine.generate(
                batch[1][0], max_new_tokens=NEW, output_scores=True, **batch[1][1]
            )
            assert alone.scores is not None
            assert (alone.token_ids, alone.scores.tolist()) == seen[0][1]
            preemptions += engine.statistics().preemptions
    assert seen[1:] == seen[:1] * (len(bounds) - 1)
    assert preemptions


class DecodesFirst(Schedule):
    """Prompts are read where nobody decodes, and then one of them."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.id,)

    def schedule(
        self, running: Seq[Sequence], num_uncached_tokens: Seq[int], token_budget: int, now: float
    ) -> list[int]:
        found = [int(count == 1) for count in num_uncached_tokens]
        if not any(found):
            at = max(range(len(found)), key=lambda i: num_uncached_tokens[i])
            found[at] = min(token_budget, num_uncached_tokens[at])
        return found


def test_a_schedule_that_looks_at_those_that_decode_reads_both_prompts(model: Any) -> None:
    with load(model, cache_implementation="paged", max_batch_size=4) as engine:
        engine._loop.scheduler = CheckedSchedule(DecodesFirst(), "decodes-first")
        pairs = [(prompt, asked) for prompt in PROMPTS for asked in ASKED[:3]]
        found = engine.generate(
            [p for p, _ in pairs], settings=[asked for _, asked in pairs], max_new_tokens=NEW
        )
        due = [tokens(model, prompt, **asked) for prompt, asked in pairs]
        assert [one.token_ids for one in found] == due


def test_both_sequences_are_forgotten(model: Any) -> None:
    with load(model) as engine:
        sequence = engine._intake.sequence(PROMPTS[0], {**ASKED[1], "max_new_tokens": 3})
        assert sequence.pair is not None
        pair = weakref.ref(sequence.pair)
        engine._loop.submit(sequence)
        while engine._loop.running or engine._loop.waiting:
            engine._loop.step()
        assert sequence.pair.members[1].new_tokens == sequence.new_tokens
        del sequence
        gc.collect()
        assert pair() is None


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"guidance_scale": 2, "negative_prompt": [5, 10**9]}, PromptError,
         "negative_prompt: the prompt holds 1000000000, which is no token id"),
        ({"guidance_scale": 2, "negative_prompt": []}, PromptError, "negative_prompt: .*is empty"),
        ({"guidance_scale": 2, "negative_prompt": 5.5}, PromptError, "^negative_prompt: a prompt"),
        ({"guidance_scale": 2, "negative_prompt": "a text"}, PromptError,
         "negative_prompt: this model has no tokenizer"),
        ({"guidance_scale": 2, "negative_prompt_ids": [[5], [6]]}, PromptError,
         "negative_prompt: it has 2 rows.*settings="),
        ({"guidance_scale": 2, "negative_prompt": [5] * 200}, PromptError,
         "a negative_prompt of 200 tokens and 4 new ones do not fit into the model's context"),
        ({"negative_prompt": [5]}, SettingsError, "negative_prompt .*is what guidance_scale leads"),
        ({"guidance_scale": 1.0, "negative_prompt": [5]}, SettingsError, "and that is 1"),
        ({"guidance_scale": "2"}, SettingsError, "guidance_scale must be a number"),
        ({"guidance_scale": True}, SettingsError, "guidance_scale must be a number"),
        ({"guidance_scale": float("nan")}, SettingsError, "guidance_scale must be a finite"),
        ({"guidance_scale": 2, "num_beams": 2}, SettingsError, "does not honour guidance_scale=2"),
        ({"guidance_scale": 2, "negative_prompt_attention_mask": [[1]]}, SettingsError,
         "negative_prompt has no padding"),
    ],
)  # fmt: skip
def test_what_is_refused(
    model: Any, asked: dict[str, Any], error: type[JackfieldError], text: str
) -> None:
    with (
        load(model, decoding={"sample": "sample", "beam": "beam"}) as engine,
        pytest.raises(error, match=text) as caught,
    ):
        engine.generate(PROMPTS[0], max_new_tokens=4, **asked)
    assert "\n" not in str(caught.value)


def test_where_two_sequences_never_fit(model: Any) -> None:
    with (
        load(model, max_batch_size=1) as engine,
        pytest.raises(SettingsError, match=r"guidance_scale=2 runs .*max_batch_size=1; load"),
    ):
        engine.generate(PROMPTS[0], guidance_scale=2.0)
    with load(model, cache_implementation="paged?page_size=4&num_tokens=24") as engine:
        assert len(engine.generate(PROMPTS[0], max_new_tokens=9)[0].token_ids) == 9
        with pytest.raises(CacheFullError, match="each of 2 sequences by itself"):
            engine.generate(PROMPTS[0], max_new_tokens=9, guidance_scale=2.0)
        (one,) = engine.generate(PROMPTS[0], max_new_tokens=6, guidance_scale=2.0)
        assert one.token_ids == tokens(model, PROMPTS[0], guidance_scale=2.0)[:6]


def test_rows_of_one_length(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot pad reads both prompts at once, where they are equally long."""
    from dataclasses import replace

    with load(model, cache_implementation="dynamic") as engine:
        needs = replace(engine.plan.requirements, ragged="it counts columns")
        monkeypatch.setattr(engine._intake, "_plan", replace(engine.plan, requirements=needs))
        with pytest.raises(PromptError, match=r"2 tokens and the prompt 5.*counts columns.*paged"):
            engine.generate(PROMPTS[0], **ASKED[2])
        equal = {"guidance_scale": 2.0, "negative_prompt": PROMPTS[0][::-1]}
        (one,) = engine.generate(PROMPTS[0], max_new_tokens=NEW, **equal)
        assert one.token_ids == tokens(model, PROMPTS[0], **equal)


def test_a_models_own_config_says_it(model: Any) -> None:
    own = build("llama")
    due = tokens(own, PROMPTS[1], guidance_scale=2.0)
    plain = tokens(own, PROMPTS[1])
    own.generation_config.guidance_scale = 2.0
    with load(own) as engine:
        (one,) = engine.generate(PROMPTS[1], max_new_tokens=NEW)
        (lifted,) = engine.generate(PROMPTS[1], max_new_tokens=NEW, guidance_scale=None)
        config = transformers.GenerationConfig(guidance_scale=2.0, max_new_tokens=NEW)
        (by_object,) = engine.generate(PROMPTS[1], generation_config=config)
    assert [one.token_ids, lifted.token_ids, by_object.token_ids] == [due, plain, due]


def test_a_negative_prompt_that_is_passed_over_for_ever_ends_its_request(model: Any) -> None:
    with load(model) as engine:
        loop = engine._loop
        sequence = engine._intake.sequence(PROMPTS[0], {**ASKED[1], "max_new_tokens": 9})
        loop.submit(sequence)
        loop.step()
        assert sequence.pair is not None
        loop.scheduler._neglected.append(sequence.pair.members[1])
        (event,) = loop.step()
        assert event.sequence is sequence
        assert sequence.finish_reason == "error"
        assert "passed it over" in str(sequence.error)
        assert not loop.running
