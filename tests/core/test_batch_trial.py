"""What a model does over its columns shows in a small one, before a weight is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, WINDOW, build, config_of, oracle, prompts
from transformers import LlamaForCausalLM

import jackfield
from jackfield.bridge.batch_trial import decoder_trial, drawn, tried
from jackfield.bridge.shrinking import shrunk
from jackfield.contracts import CacheCapabilities, TransformersCache
from jackfield.contracts.cache import not_fixed
from jackfield.errors import CheckpointError, PlanError, UsageError
from jackfield.testing import models as kit

TINY = FAMILIES["llama"].arguments
DSA = {
    **TINY, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "index_topk": 4,
    "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 1,
    "experts_implementation": "eager",
}  # fmt: skip


class Altered(LlamaForCausalLM):
    """Does something to its columns first."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
        past_key_values: Any = None, use_cache: Any = True, logits_to_keep: Any = 0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        return super().forward(
            inputs_embeds=self.alter(self.model.embed_tokens(input_ids), before),
            attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache, logits_to_keep=logits_to_keep,
            **kwargs,
        )  # fmt: skip

    def alter(self, states: torch.Tensor, before: int) -> torch.Tensor:
        raise NotImplementedError


class MeanOverTime(Altered):
    """Adds to each token what all columns are on average."""

    def alter(self, states: torch.Tensor, before: int) -> torch.Tensor:
        return states + states.mean(1, keepdim=True)


class BestOfColumns(Altered):
    """Reads three of its columns louder, whichever they are."""

    def alter(self, states: torch.Tensor, before: int) -> torch.Tensor:
        best = states[..., 0].topk(min(3, states.shape[1]), dim=1).indices
        return states + torch.zeros_like(states[..., :1]).scatter_(1, best[..., None], 1)


class ColumnsAsPositions(Altered):
    """Numbers columns, and not tokens."""

    def alter(self, states: torch.Tensor, before: int) -> torch.Tensor:
        at = torch.arange(states.shape[1], device=states.device) + before
        return states * (2 + at.to(states)).log()[None, :, None]


class Capacity(Altered):
    """Drops what is beyond a number of tokens, whoever asked for them."""

    def alter(self, states: torch.Tensor, before: int) -> torch.Tensor:
        count = torch.arange(states[..., 0].numel(), device=states.device)
        return states * (count < 24).view(*states.shape[:2], 1)


def live(cls: type[Altered]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(transformers.LlamaConfig(**TINY, attn_implementation="eager"))
    model.generation_config.pad_token_id = 0
    return model.double().eval()


@pytest.mark.parametrize("cls", [MeanOverTime, BestOfColumns, ColumnsAsPositions])
def test_what_reads_columns_runs_with_rows_of_its_own_length(cls: type[Altered]) -> None:
    model = live(cls)
    texts = prompts((5, 9, 5))
    needs = jackfield.plan(model, cache_implementation="dynamic").requirements
    assert needs.ragged == "a row padded at the left says something else"
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        alone = [engine.generate(text, max_new_tokens=6)[0].token_ids for text in texts]
        together = engine.generate(texts, max_new_tokens=6)
    assert [c.token_ids for c in together] == alone
    with pytest.raises(PlanError, match="has the tokens of other requests in a model's columns"):
        jackfield.plan(model, cache_implementation="paged")
    with pytest.raises(PlanError, match=r"cannot take back tokens \(rollback\) of this model"):
        jackfield.plan(model, cache_implementation="dynamic", decoding="prompt_lookup")


def test_rows_that_change_one_another_are_refused() -> None:
    with pytest.raises(CheckpointError, match="requests would change one another"):
        jackfield.plan(live(Capacity))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "mixtral", "gpt-oss"])
def test_what_reads_tokens_is_padded(family: str) -> None:
    needs = jackfield.plan(config_of(family)).requirements
    assert needs.ragged is needs.pieces is needs.fixed is None
    assert bool(needs.holes) == ("sliding_attention" in needs.layer_types)


@pytest.mark.parametrize("config", ["DeepseekV32Config", "GlmMoeDsaConfig"])
def test_ties_between_keys_of_a_sparse_attention(config: str) -> None:
    """Few heads leave many scores at zero, and which of these are kept depends on the columns."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**DSA), attn_implementation="eager"
        )
    model.generation_config.pad_token_id = 0
    model = model.double().eval()
    texts = prompts((1, 12, 12, 7, 3))
    with jackfield.load(model) as engine:
        found = engine.generate(texts, max_new_tokens=8)
        assert engine.report()["cache"].calls == 4 * 8  # the two that are alike run together
    assert [c.token_ids for c in found] == [oracle(model, text, 8) for text in texts]


def test_what_counts_the_columns_of_a_buffer_has_no_cache_of_fixed_shape() -> None:
    config = transformers.AutoConfig.for_model(
        "doge",
        **{**TINY, "num_hidden_layers": 4, "initializer_range": 0.35, "keep_window_size": 4},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    evidence = "columns that are not written yet .which of equal scores it keeps changes"
    for cache in ("static", "offloaded_static"):
        with pytest.raises(PlanError, match=evidence):
            jackfield.plan(model, cache_implementation=cache)
    with pytest.raises(PlanError, match=evidence):
        jackfield.cache("plugin:static?max_cache_len=32", model)
    text = prompts((9,))[0]
    with jackfield.load(model) as engine:
        assert engine.generate(text, max_new_tokens=12)[0].token_ids == oracle(model, text, 12)
        needs = engine.plan.requirements
    shapes = CacheCapabilities(
        layout="padded", layer_types=frozenset({"full_attention"}), static_shapes=True
    )
    stranger: Any = type("Stranger", (TransformersCache,), {"make": None, "capabilities": shapes})
    assert stranger().impossible(needs) == not_fixed(needs) != []


@pytest.mark.parametrize("seed", range(12))
def test_what_few_texts_show_is_found_by_more(seed: int) -> None:
    """One text shows by chance which keys a sparse attention keeps of padded rows."""
    small = next(shrunk(kit.config_of("own_mask"), None))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        assert decoder_trial(drawn(small, None, torch.float32)).ragged is not None


def test_a_scale_by_columns_shows_though_it_begins_late() -> None:
    """Llama 4 scales queries by their column, from the 8192nd on."""
    config = transformers.Llama4TextConfig(
        **TINY, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    assert config.floor_scale == 8192
    assert (
        jackfield.plan(config).requirements.ragged == "a row padded at the left says something else"
    )


def test_a_large_config_is_tried_in_small() -> None:
    config = transformers.MistralConfig()
    small = next(shrunk(config, None))
    assert (small.num_hidden_layers, small.sliding_window, config.sliding_window) == (2, 4, 4096)
    found = tried(config, None, torch.float32, decoder_trial)
    assert (found.failed, found.ragged) == (None, None)
    assert found.holes is not None
    assert tried(transformers.MistralConfig(), None, torch.float32, decoder_trial) is found


@pytest.mark.parametrize("name", ["CwmConfig", "ModernBertDecoderConfig", "ProphetNetConfig"])
def test_configs_that_refuse_to_be_changed_are_tried(name: str) -> None:
    """Of tokens that must be numbers, as CWM wants; of a sum of layers, ProphetNet's."""
    small = next(shrunk(getattr(transformers, name)(), None))
    assert small.vocab_size <= 97
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        one = getattr(small, token, None)
        assert one is None or isinstance(one, list) or one < small.vocab_size


def test_one_layer_of_each_kind_is_kept() -> None:
    small = next(shrunk(transformers.Gemma3TextConfig(num_hidden_layers=26), None))
    assert small.layer_types == ["sliding_attention", "full_attention"]


def test_what_cannot_be_tried_runs_with_rows_of_its_own_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jackfield.bridge.batch_trial.shrunk", lambda config, cls: iter(()))
    model = build("llama")
    model.config.unheard_of = 1  # not tried before
    needs = jackfield.plan(model).requirements
    assert needs.ragged == "a small model of its kind could not be tried: none can be built"
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        texts = prompts((WINDOW, 3))
        found = engine.generate(texts, max_new_tokens=4)
    assert [c.token_ids for c in found] == [oracle(model, text, 4) for text in texts]


def test_a_prompt_that_has_to_be_read_at_once_is_not_cut() -> None:
    model = live(MeanOverTime)
    with pytest.raises(UsageError, match="a prompt read in pieces says something else"):
        jackfield.load(model, cache_implementation="dynamic", prefill_chunk_size=2)


def test_nothing_of_a_trial_stays() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    tried(transformers.LlamaConfig(**TINY, attention_bias=True), None, torch.float32, decoder_trial)
    assert torch.equal(torch.rand(2), expected)
