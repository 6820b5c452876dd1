"""Models with linear layers: padded batches whose rows end early; states beside pages."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, STATES_APART, Family, build, oracle, prompts

import jackfield
from jackfield.bridge.state_layers import state_modules
from jackfield.errors import ExecutionError, PlanError, UsageError
from jackfield.estimates.perplexity import token_logprobs
from jackfield.registry.backends import Registered

PROMPTS = prompts((2, 5, 12))
COUNTS = (3, 10, 6)
GATED = FAMILIES["llama"].arguments

SMALL = {
    "vocab_size": GATED["vocab_size"], "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip

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
    "mamba2": Family(
        "Mamba2Config",
        {**SMALL, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
}  # fmt: skip


@pytest.fixture(params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(FAMILIES, "hybrid", HYBRIDS[request.param])
    return build("hybrid")


#: Models that only keep states. The code of the first two begins each piece of a prompt anew.
STATES = {
    "mamba": Family("MambaConfig", {**SMALL, "intermediate_size": 64}),
    "falcon-mamba": Family("FalconMambaConfig", {**SMALL, "intermediate_size": 64}),
    "mamba2": HYBRIDS["mamba2"],
}


@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", [*HYBRIDS, *STATES])
@pytest.mark.one_in(4)
def test_rows_that_end_early_leave_the_others_right(
    monkeypatch: pytest.MonkeyPatch, family: str, cache: str, attention: str
) -> None:
    if family in STATES and attention != "auto":
        pytest.skip("no layer attends")
    monkeypatch.setitem(FAMILIES, "hybrid", {**HYBRIDS, **STATES}[family])
    hybrid = build("hybrid")
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
@pytest.mark.one_in(2)
def test_states_beside_pages(hybrid: Any, chunk: int | None) -> None:
    """Requests wait, are read in pieces, lose their pages and come back, and begin alike."""
    expected = [oracle(hybrid, prompt, 10) for prompt in BEGIN_ALIKE]
    cache = "paged?page_size=3&num_tokens=42"
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
    assert not any("forward" in vars(module) for module in hybrid.modules())


@in_pages
def test_preempted_requests_are_read_again(hybrid: Any, strangers: Any) -> None:
    """Nothing of what they had is taken for theirs, however closely the cache is watched."""
    expected = [oracle(hybrid, prompt, 12) for prompt in PROMPTS] * 2
    cache = "paged?page_size=2&num_tokens=40"
    with jackfield.load(hybrid, cache_implementation=cache) as engine:
        found = engine.generate(PROMPTS * 2, max_new_tokens=12)
        assert [c.token_ids for c in found] == expected
        assert engine.statistics().preemptions > 0


@pytest.fixture(params=[False, True])
def strangers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all backends are another package's, and looked at in every step."""
    if request.param:
        monkeypatch.setattr(Registered, "own", False)


@in_pages
@pytest.mark.parametrize("where", ["processor", "thread"])
def test_what_others_call_of_a_live_model_changes_no_state(hybrid: Any, where: str) -> None:
    expected = [oracle(hybrid, prompt, 10) for prompt in PROMPTS]
    ids, over = torch.tensor([PROMPTS[2][:5]]), threading.Event()
    called = []

    def call(*args: Any) -> Any:
        with contextlib.suppress(Exception), torch.no_grad():
            hybrid(input_ids=ids)
        called.append(1)
        return args[-1] if args else None

    def calls() -> None:
        while not over.is_set():
            call()

    asked: list[dict[str, Any]] = [{"logits_processor": [call]}, {}, {}]
    with jackfield.load(hybrid, cache_implementation="paged?page_size=3") as engine:
        if where == "processor":
            found = engine.generate(PROMPTS, settings=asked, max_new_tokens=10)
            assert [c.token_ids for c in found] == expected
        else:
            other = threading.Thread(target=calls)
            other.start()
            try:
                with contextlib.suppress(ExecutionError):  # it may be found out
                    found = engine.generate(PROMPTS, max_new_tokens=10)
                    assert [c.token_ids for c in found] == expected
            finally:
                over.set()
                other.join()
    assert called


@in_pages
def test_a_forward_of_the_users_is_used_and_given_back(hybrid: Any) -> None:
    expected = [oracle(hybrid, prompt, 6) for prompt in PROMPTS]
    (module, *_) = state_modules(hybrid).values()  # type: ignore[union-attr]
    theirs, seen = module.forward, []

    @functools.wraps(theirs)
    def mine(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return theirs(*args, **kwargs)

    module.forward = mine
    try:
        with jackfield.load(hybrid, cache_implementation="paged") as engine:
            assert [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=6)] == expected
            module.forward = mine  # in the midst: the states are passed over
            with pytest.raises(ExecutionError, match="0 times in a step through the engine"):
                engine.generate(PROMPTS, max_new_tokens=6)
        assert vars(module)["forward"] is mine
    finally:
        del module.forward
    assert seen


@in_pages
def test_steps_are_verified(hybrid: Any) -> None:
    with jackfield.load(hybrid, cache_implementation="paged", verify=True) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=6)
    assert [c.token_ids for c in found] == [oracle(hybrid, prompt, 6) for prompt in PROMPTS]


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
def test_samples_read_their_prompt_side_by_side(hybrid: Any) -> None:
    """None of them finds it in the pages without its state, so none waits until one has read it."""
    prompt = PROMPTS[0] * 4
    with jackfield.load(hybrid, cache_implementation="paged", prefill_chunk_size=4) as engine:
        steps = []
        for samples in (1, 3):
            before = engine.report()["cache"].calls
            engine.generate(prompt, max_new_tokens=4, do_sample=True, num_return_sequences=samples)
            steps.append(engine.report()["cache"].calls - before)
    assert steps[0] == steps[1]


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
        ({"cache_implementation": "paged?swap=true"}, "without the states of layers"),
        ({"compile": "native"}, "cannot take the state of linear-attention layers"),
    ],
)
def test_what_states_cannot_do_is_refused(hybrid: Any, asked: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        jackfield.plan(hybrid, **{"cache_implementation": "paged", **asked})


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


@pytest.mark.parametrize("family", STATES)
@pytest.mark.parametrize(
    "asked",
    [{"num_beams": 3}, {"do_sample": True, "seed": 7, "num_return_sequences": 2}, {"stop": None}],
    ids=str,
)
@pytest.mark.one_in(4)
def test_states_alone_are_copied_and_cancelled(
    monkeypatch: pytest.MonkeyPatch, family: str, asked: dict[str, Any]
) -> None:
    """Beams are transformers' own, samples are those of one request at a time."""
    monkeypatch.setitem(FAMILIES, "states", STATES[family])
    model = build("states")
    with jackfield.load(model, decoding="beam" if "num_beams" in asked else "auto") as engine:
        gone = engine.submit(PROMPTS[2], max_new_tokens=90)
        found = engine.generate(PROMPTS, max_new_tokens=8, **asked)
        gone.cancel()
        alone = [engine.generate(prompt, max_new_tokens=8, **asked) for prompt in PROMPTS]
        assert [one.token_ids for one in found] == [one.token_ids for part in alone for one in part]
        report = found[0].report
        assert "attention" not in {one.kind for one in report.observations if one.calls}
    if "num_beams" in asked:
        ids = torch.tensor([PROMPTS[2]])
        theirs = model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
        assert found[2].token_ids == theirs[0, len(PROMPTS[2]) :].tolist()


@pytest.mark.parametrize("family", STATES)
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"attn_implementation": "sdpa"}, "would never be called: no layer of .* attends"),
        ({"attn_implementation": "plugin:triton"}, "would never be called: no layer of .* attends"),
        ({"decoding": "prompt_lookup"}, "cannot take back tokens of linear_attention layers"),
        ({"cache_implementation": "offloaded"}, "does not hold linear_attention layers"),
        ({"compile": "native"}, "cannot take the state of linear-attention layers"),
    ],
    ids=str,
)
def test_what_models_of_states_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, family: str, asked: dict[str, Any], why: str
) -> None:
    monkeypatch.setitem(FAMILIES, "states", STATES[family])
    with pytest.raises(PlanError, match=why):
        jackfield.plan(build("states").config, **asked)


def test_states_take_as_much_however_long_a_text_is() -> None:
    config = transformers.Mamba2Config(**STATES["mamba2"].arguments)
    for cache in ("paged", "dynamic") if STATES_APART else ("dynamic",):
        memory = jackfield.plan(config, cache_implementation=cache).memory()
        assert memory is not None
        assert not memory.grows
        assert "a request, however long" in str(memory)


def test_matrices_that_code_multiplies_with_are_not_quantized() -> None:
    config = transformers.MambaConfig(**STATES["mamba"].arguments)
    for quantizer in ("int8-cpu", "torchao", "bnb-8bit"):
        with pytest.raises(PlanError, match="stores matrices in forms of its own"):
            jackfield.plan(config, quantization=quantizer)
    other = transformers.FalconMambaConfig(**STATES["falcon-mamba"].arguments)
    assert jackfield.plan(other, quantization="int8-cpu").requirements.plain_matrices is None
