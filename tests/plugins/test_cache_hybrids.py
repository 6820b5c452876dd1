"""Models with linear layers: padded batches whose rows end early; prompts in one piece only."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, STATES_APART, Family, build, oracle, prompts

import jackfield
from jackfield.bridge.state_layers import StateLayer
from jackfield.errors import PlanError, UsageError
from jackfield.estimates.perplexity import token_logprobs

PROMPTS = prompts((2, 5, 12))
COUNTS = (3, 10, 6)
GATED = FAMILIES["llama"].arguments

HYBRIDS = {
    "lfm2": Family("Lfm2Config", {**GATED, "layer_types": ["conv", "full_attention"]}),
    "falcon-h1": Family(
        "FalconH1Config",
        {**GATED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
         "mamba_n_groups": 1, "mamba_chunk_size": 8},
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {**GATED, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
}  # fmt: skip


@pytest.fixture(params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(FAMILIES, "hybrid", HYBRIDS[request.param])
    return build("hybrid")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_that_end_early_leave_the_others_right(
    hybrid: Any, cache: str, attention: str
) -> None:
    with jackfield.load(
        hybrid, cache_implementation=cache, attn_implementation=attention
    ) as engine:
        found = engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in COUNTS])
    expected = [oracle(hybrid, prompt, n) for prompt, n in zip(PROMPTS, COUNTS, strict=True)]
    assert [completion.token_ids for completion in found] == expected


def test_chunks_are_refused_where_rows_are_padded(hybrid: Any) -> None:
    with pytest.raises(UsageError, match="reads a prompt in one piece"):
        jackfield.load(hybrid, prefill_chunk_size=4, cache_implementation="dynamic")


in_pages = pytest.mark.skipif(not STATES_APART, reason="transformers has no get_conv_state")

BEGIN_ALIKE = [*PROMPTS, [*PROMPTS[2], 3, 1], PROMPTS[2], [*PROMPTS[2][:9], 4]]


@in_pages
@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("swap", [False, True])
def test_states_beside_pages(hybrid: Any, chunk: int | None, swap: bool) -> None:
    """Requests wait, are read in pieces, lose their pages and come back, and begin alike."""
    expected = [oracle(hybrid, prompt, 10) for prompt in BEGIN_ALIKE]
    cache = f"paged?page_size=3&num_tokens=42&swap={swap}"
    with jackfield.load(
        hybrid, cache_implementation=cache, prefill_chunk_size=chunk, max_batch_size=4
    ) as engine:
        for _ in range(2):  # pages of the first round are of no use to the second
            found = engine.generate(BEGIN_ALIKE, max_new_tokens=10)
            assert [completion.token_ids for completion in found] == expected
        usage = engine.statistics().cache
        assert usage is not None
        assert usage.prefix_tokens == 0
        assert engine._assembly.bound.cache.held_bytes() == 0
        states = engine._assembly.bound.cache
        assert not states._preempted
    assert not any("forward" in vars(module) for module in hybrid.modules())


@in_pages
def test_preempted_requests_go_on_from_their_states(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `swap` nothing is computed again; otherwise all is, and no state is mistaken for it."""
    expected = [oracle(hybrid, prompt, 12) for prompt in PROMPTS] * 2
    back: list[int] = []
    put_back = StateLayer.put_back
    monkeypatch.setattr(StateLayer, "put_back", lambda *a: (back.append(a[1]), put_back(*a))[1])
    for swap in (True, False):
        back.clear()
        cache = f"paged?page_size=2&num_tokens=40&swap={swap}"
        with jackfield.load(hybrid, cache_implementation=cache) as engine:
            found = engine.generate(PROMPTS * 2, max_new_tokens=12)
            assert [c.token_ids for c in found] == expected
            assert bool(back) == swap


@in_pages
@pytest.mark.parametrize("decoding", [{"num_beams": 3}, {"do_sample": True, "seed": 7}])
def test_copies_have_states_of_their_own(hybrid: Any, decoding: dict[str, Any]) -> None:
    asked = {"max_new_tokens": 8, "num_return_sequences": 3, **decoding}
    chosen = {"decoding": "beam"} if "num_beams" in decoding else {}
    said = []
    for cache in ("dynamic", "paged?page_size=3"):
        with jackfield.load(hybrid, cache_implementation=cache, **chosen) as engine:
            said.append([c.token_ids for c in engine.generate(PROMPTS, **asked)])
    assert said[0] == said[1]
    assert len({tuple(one) for one in said[0]}) > len(PROMPTS)


@in_pages
def test_a_state_takes_what_was_planned(hybrid: Any) -> None:
    plan = jackfield.plan(hybrid, cache_implementation="paged?page_size=3")
    with jackfield.load(hybrid, cache_implementation="paged?page_size=3") as engine:
        bound = engine._assembly.bound.cache
        held = []
        commit = bound.commit
        bound.commit = lambda *a: (held.append(sum(x.num_bytes for x in bound._layers)), commit(*a))
        engine.generate(PROMPTS, max_new_tokens=6)
        planned = len(PROMPTS) * plan.requirements.state_bytes
        assert planned / 2 < max(held) <= planned  # some keep float32 in a model of float64


@in_pages
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"decoding": "prompt_lookup"}, "cannot take back tokens of linear_attention layers"),
        ({"deterministic": True}, "linear_attention layers compute together what decodes"),
        ({"compile": "native"}, "cannot take the state of linear-attention layers"),
    ],
)
def test_what_states_cannot_do_is_refused(hybrid: Any, asked: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        jackfield.plan(hybrid, cache_implementation="paged", **asked)


@in_pages
def test_a_text_is_scored_the_same_in_pages(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are fed in pieces there, each as one token and what follows it."""
    monkeypatch.setattr("jackfield.estimates.perplexity._CHUNK", 16)
    ids = prompts((100,))[0]
    found = []
    for cache in ("dynamic", "paged"):
        with jackfield.load(hybrid, cache_implementation=cache) as engine:
            found.append(token_logprobs(engine, ids))
    # What recurs is computed in float32, in a model of float64 too, and rounded between pieces.
    assert found[0] == pytest.approx(found[1], abs=1e-4)
