"""Drafts of a model's own first layers change how fast a text comes and never the text."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
import transformers
from drafting import model_of, repetitive
from driven import Arrival, drive, tokens
from families import (
    FAMILIES,
    MORE_FAMILIES,
    WINDOW,
    build,
    character_tokenizer,
    config_of,
    oracle,
    prompts,
    references,
)

import jackfield
from jackfield.bridge.first_layers import by_themselves, first_layers
from jackfield.bridge.meta_model import meta_model
from jackfield.errors import PlanError

EARLY = (
    "assisted?assistant_early_exit=1&min_acceptance_rate=0&min_speedup=0"
    "&assistant_confidence_threshold=0"
)
COUNT = 2 * WINDOW
LENGTHS = (3, WINDOW + 1, 2 * WINDOW, 5)
SAMPLED = {"temperature": 1.3, "seed": 8, "top_p": 0.95}
CACHES = ["paged?page_size=4", "dynamic"]
#: What of a layer is added to what it was given.
ADDED = ("o_proj.weight", "down_proj.weight")


@functools.cache
def faint(name: str = "llama", share: float = 0.1, layers: int = 4) -> Any:
    """A model of which all layers but the first add little, so that its drafts are often right."""
    config = config_of(name)
    config.num_hidden_layers = layers
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(ADDED) and ".layers.0." not in parameter_name:
                parameter *= share
    model.generation_config.pad_token_id = 0
    return model.double().eval()


def said(found: list[jackfield.Completion]) -> list[list[int]]:
    return [one.token_ids for one in found]


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_the_first_layers_are_a_model_by_themselves_or_are_refused(family: str) -> None:
    """Against a model with fewer layers, built anew, that is given the same weights."""
    model = build(family)
    before, ids = model.config.to_dict(), torch.tensor(prompts((WINDOW + 3,)))
    try:
        by_themselves(meta_model(model.config, type(model)), 1)
    except PlanError:
        assert family in ("gemma3n", "gemma4", "hrm-text")  # layers that share, layers in cycles
        return
    view = first_layers(model, 1)
    alone = type(model)(view.config).to(model.dtype).eval()
    weights = model.state_dict()
    alone.load_state_dict({name: weights[name] for name in alone.state_dict()})
    with torch.inference_mode():
        whole = model(ids, use_cache=False).logits
        found, right = (one(ids, use_cache=False).logits for one in (view, alone))
        assert torch.equal(found, right)
        assert torch.equal(model(ids, use_cache=False).logits, whole)
    assert {id(p) for p in view.parameters()} < {id(p) for p in model.parameters()}
    assert model.config.to_dict() == before


def check(family: str, cache: str | list[str]) -> jackfield.engine.speculation.Speculation:
    """Greedy and drawn texts, ragged, together and one by one; returns what its drafts did."""
    texts, expected = prompts(LENGTHS), references(family, LENGTHS, COUNT)
    offered = {"early": EARLY, "plain": "sample"}
    with jackfield.load(model_of(family), decoding=offered, cache_implementation=cache) as engine:
        drawn = engine.generate(texts, max_new_tokens=COUNT, decoding="plain", **SAMPLED)
        for settings, right in (({}, expected), (SAMPLED, said(drawn))):
            assert said(engine.generate(texts, max_new_tokens=COUNT, **settings)) == right
            (alone,) = engine.generate(texts[1], max_new_tokens=COUNT, **settings)
            assert alone.token_ids == right[1]
        assert engine.plan.assistant.early_exit == 1
        assert len(engine.plan.assistant.requirements.layer_types) == 1
        return engine.report().speculation


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@pytest.mark.one_in(8)
def test_every_family_gives_the_plain_text_or_is_refused(family: str) -> None:
    try:
        figures = check(family, CACHES)
    except PlanError as refused:
        assert "take back tokens" in str(refused)  # noqa: PT017
        return
    assert 0 < figures.accepted < figures.proposed


@pytest.mark.parametrize("cache", CACHES)
def test_caches(cache: str) -> None:
    figures = check("llama", cache)
    assert 0 < figures.accepted < figures.proposed


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral", "deepseek-v3"])
@pytest.mark.one_in(4)
def test_the_text_is_that_of_early_exit_in_transformers(family: str) -> None:
    (prompt,) = prompts((WINDOW + 1,))
    model, ids = build(family), torch.tensor([prompt])
    try:
        theirs = model.generate(ids, max_new_tokens=COUNT, do_sample=False, assistant_early_exit=1)
    except TypeError as error:  # 5.17 cannot take back what it has not cached
        pytest.skip(f"early exit of this transformers fails: {error}")
    with jackfield.load(model, decoding=EARLY) as engine:
        (ours,) = engine.generate(prompt, max_new_tokens=COUNT, assistant_early_exit=1)
    assert ours.token_ids == theirs[0, len(prompt) :].tolist()


def test_layers_that_add_nothing_leave_every_draft_right() -> None:
    model = faint(share=0.0)
    with jackfield.load(model, decoding=EARLY.replace("exit=1", "exit=3")) as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        report = engine.report()
    assert said(found) == [oracle(model, prompt, COUNT) for prompt in prompts(LENGTHS)]
    assert report.speculation.acceptance_rate == 1
    assert found[0].report.speculation.tokens_per_step == COUNT / 4  # 1 of the prompt, 5, 5, 5
    steps = report["assistant cache"].calls
    assert report["assistant attention"].calls == 3 * steps  # of three layers
    assert found[0].report.speculation.accepted == found[0].report.speculation.proposed == 12


@pytest.mark.parametrize("swap", [False, True])
def test_requests_that_come_and_are_preempted(swap: bool) -> None:
    texts, model = repetitive(12, WINDOW), faint()
    cache = f"paged?page_size=4&num_tokens=72&swap={swap}"
    arrivals = [Arrival(n // 2, text, max_new_tokens=COUNT) for n, text in enumerate(texts)]
    with jackfield.load(
        model, decoding=EARLY, cache_implementation=cache, prefill_chunk_size=5
    ) as engine:
        found = tokens(drive(engine, arrivals))
        figures, drafts = engine.statistics(), engine.report().speculation
    assert found == [oracle(model, text, COUNT) for text in texts]
    assert figures.preemptions > 0
    assert figures.cache.pages_used == 0
    assert drafts.acceptance_rate > 0.3


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 2.0, "seed": 4, "top_p": 0.9, "top_k": 50},
    {"repetition_penalty": 1.7, "decoding": "lookup"},
    {"temperature": 1.5, "seed": 8, "num_return_sequences": 3},
    {"stop": ["a", "e", "xy"], "temperature": 2.0, "seed": 9},
    {"logprobs": 3, "num_assistant_tokens": 7},
]
if importlib.util.find_spec("llguidance"):
    MIXED.append({"regex": "[ -k]{3,6}[x-z]{0,9}", "eos_token_id": 119})


def test_every_setting_gives_what_it_gives_without_drafts() -> None:
    texts = repetitive(len(MIXED), WINDOW)
    offered = {"early": EARLY, "lookup": "prompt_lookup"}
    with jackfield.load(faint(), decoding=offered, tokenizer=character_tokenizer()) as engine:
        drafted = engine.generate(texts, settings=MIXED, max_new_tokens=COUNT)
        own = [{k: v for k, v in one.items() if "assistant" not in k} for one in MIXED]
        plain = [{**one, "decoding": "sample"} for one in own]
        alone = engine.generate(texts, settings=plain, max_new_tokens=COUNT)
        assert engine.report().speculation.accepted > 20
    assert [(c.token_ids, c.text, c.finish_reason) for c in drafted] == [
        (c.token_ids, c.text, c.finish_reason) for c in alone
    ]


def test_a_row_that_waits_for_a_prompt_in_chunks_is_drafted_too() -> None:
    """Its draft copy is taken back to nothing while the other reads."""
    prompts, found = [[5], list(range(6, 36))], []
    for decoding in ("sample", "assisted?assistant_early_exit=1"):
        how = {"cache_implementation": "dynamic", "prefill_chunk_size": 5}
        with jackfield.load(build("llama"), decoding=decoding, **how) as engine:
            found.append([c.token_ids for c in engine.generate(prompts, max_new_tokens=6)])
    assert found[0] == found[1]
