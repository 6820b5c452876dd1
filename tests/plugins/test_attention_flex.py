"""flex_attention: exact in float64 as torch evaluates it uncompiled; compiled it needs a GPU."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import WINDOW, build, config_of, prompts, references
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import share
from torch.nn.attention import flex_attention as torch_flex
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    sdpa_mask,
    sliding_window_overlay,
)

import jackfield
from jackfield.contracts import BoundAttention
from jackfield.errors import PlanError
from jackfield_plugins.attention.flex_attention import FlexAttention, FlexOptions

LENGTHS = (WINDOW - 2, WINDOW + 1, 3 * WINDOW)
COUNT = WINDOW + 3
SERVED = (
    "llama", "llama-mqa", "llama-wide-heads", "mistral", "qwen2", "gemma2", "gemma3", "phi3",
    "mixtral", "gpt-oss",
)  # fmt: skip

model_of = functools.cache(build)


def bound(compiles: str = "false") -> BoundAttention:
    return FlexAttention().bind(
        SimpleNamespace(options=FlexOptions(compiles), requirements=SimpleNamespace(device=None))
    )


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.one_in(4)
def test_ragged_batch_equals_the_oracle(family: str) -> None:
    expected = references(family, LENGTHS, COUNT)
    with jackfield.load(model_of(family), attn_implementation="flex_attention") as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        seen = engine.report()["attention"]
    assert [completion.token_ids for completion in found] == expected
    assert seen.name == "flex_attention"
    assert seen.source == f"flex_attention of torch {torch.__version__}, not compiled"
    assert set(seen.prefill.values()) == {1}
    assert set(seen.decode.values()) == {COUNT - 1}


def padded(rows: int, columns: int, seed: int) -> torch.Tensor:
    """A padding mask with gaps at the left and holes in between, as rejected drafts leave them."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randint(columns, (rows, 1), generator=generator)
    holes = torch.rand(rows, columns, generator=generator) < 0.2
    return (torch.arange(columns) >= left) & ~holes


def reference(q: Any, k: Any, v: Any, seen: Any, scaling: float, softcap: Any, sinks: Any) -> Any:
    """What it means, on the whole matrix of scores; a query that sees nothing gets zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand_as(scores[..., :1])], -1)
    return (scores.softmax(-1).nan_to_num()[..., : k.shape[2]] @ v).transpose(1, 2)


@settings(max_examples=share(0.4))
@given(
    rows=st.integers(1, 3),
    q_length=st.integers(1, 9),
    earlier=st.integers(0, 12),
    kv_offset=st.integers(0, 5),
    unwritten=st.integers(0, 4),
    overlay=st.sampled_from(("none", "window", "chunk")),
    with_padding=st.booleans(),
    heads=st.sampled_from(((1, 1), (2, 3), (1, 4))),
    head_dim=st.sampled_from((8, 24)),
    softcap=st.sampled_from((None, 2.0)),
    with_sinks=st.booleans(),
    dtype=st.sampled_from((torch.float64, torch.float32)),
)
def test_forward_equals_the_reference(
    rows, q_length, earlier, kv_offset, unwritten, overlay, with_padding, heads, head_dim, softcap,
    with_sinks, dtype,
) -> None:  # fmt: skip
    """Caches that dropped columns (`kv_offset`) or have some to come (`unwritten`), and holes."""
    written = earlier + q_length
    kv_length = written + unwritten
    mask_function = {
        "none": causal_mask_function,
        "window": and_masks(causal_mask_function, sliding_window_overlay(5)),
        "chunk": and_masks(
            causal_mask_function, chunked_overlay(4, torch.arange(rows, dtype=torch.long))
        ),
    }[overlay]
    wanted = padded(rows, kv_offset + written, seed=written) if with_padding else None
    arguments = {
        "batch_size": rows, "q_length": q_length, "kv_length": kv_length,
        "q_offset": kv_offset + earlier, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": wanted, "device": "cpu",
    }  # fmt: skip
    seen = sdpa_mask(**arguments, allow_is_causal_skip=False, use_vmap=overlay == "chunk")
    torch.manual_seed(kv_length)
    q = torch.randn(rows, heads[0] * heads[1], q_length, head_dim, dtype=dtype)
    k, v = (torch.randn(rows, heads[0], kv_length, d, dtype=dtype) for d in (head_dim, 16))
    sinks = torch.randn(q.shape[1], dtype=dtype) if with_sinks else None
    plugin = bound()
    found, weights = plugin.forward(
        None, q, k, v, plugin.mask(**arguments), scaling=0.3, softcap=softcap, s_aux=sinks
    )
    assert weights is None
    assert found.is_contiguous()
    expected = reference(q, k, v, seen, 0.3, softcap, sinks)
    bound_on = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=bound_on, atol=bound_on)


def test_a_mask_of_another_kind_is_an_error() -> None:
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(TypeError, match=r"takes the block mask .* not Tensor"):
        bound().forward(None, q, q, q, torch.ones(1, 1, 2, 2, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_is_one_graph_and_no_new_one_for_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced as for a GPU, then evaluated here: a graph break would be an error (fullgraph)."""
    traces = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal traces
        traces += 1
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    plugin, plain = bound("true"), bound("false")
    sinks, counts = torch.randn(6), []
    with torch.inference_mode():
        for columns in (7, *range(8, 16)):
            length = 1 if columns > 7 else 7
            q = torch.randn(3, 6, length, 16)
            k, v = torch.randn(2, 3, 2, columns, 16)
            arguments = {
                "batch_size": 3, "q_length": length, "kv_length": columns,
                "q_offset": columns - length, "attention_mask": padded(3, columns, seed=1),
            }  # fmt: skip
            found, expected = (
                p.forward(None, q, k, v, p.mask(**arguments), softcap=2.0, s_aux=sinks)[0]
                for p in (plugin, plain)
            )
            torch.testing.assert_close(found, expected)
            counts.append(traces)
    assert counts[0] == 2  # the mask and the attention
    assert counts[3:] == counts[3:4] * len(counts[3:])


def test_torchs_switch_goes_back_when_the_last_thread_is_done() -> None:
    assert not torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    plugin = bound()
    q = torch.randn(2, 2, 5, 8)
    mask = plugin.mask(2, 5, 5)
    threads = [
        threading.Thread(target=lambda: [plugin.forward(None, q, q, q, mask) for _ in range(5)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG


def test_what_it_lacks_is_refused_by_name() -> None:
    def refusal(family: str, attention: str = "flex_attention", **selections: Any) -> str:
        with pytest.raises(PlanError) as caught:
            jackfield.plan(config_of(family), attn_implementation=attention, **selections)
        return str(caught.value)

    assert "position_bias" in refusal("falcon-alibi")
    assert "only padded" in refusal("llama", cache_implementation="paged")
    compiled = refusal("llama", "flex_attention?compile=true", dtype="float64")
    assert "takes no float64" in compiled
    assert "heads of 16 or more, not 8" in compiled
    assert "kernel for the CPU fails on padded batches" in compiled
    assert "flex_attention?compile=false" in compiled
