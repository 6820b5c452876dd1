"""``generate(custom_generate=jackfield.decoding("plugin:NAME"))``: the same tokens, or refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from families import build
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation import LogitsProcessor, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

import jackfield
from jackfield.demo import DRAFT_PATH, MODEL_PATH
from jackfield.errors import JackfieldError, UsageError

TEXTS = ["Copy: red green blue red green blue", "Sort these numbers: 4 1 9"]
STRATEGIES = {
    "sample": {},
    "prompt_lookup": {},
    "assisted": {"assistant_model": "demo-draft"},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float64)


@pytest.fixture(scope="module")
def inputs() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH, padding_side="left")
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.3, "min_new_tokens": 8}, {"suppress_tokens": [5, 70, 71]}],
    ids=["plain", "penalty", "suppressed"],
)
@pytest.mark.one_in(4)
def test_greedy_tokens_are_those_of_generate(
    name: str, settings: dict[str, Any], model: Any, inputs: Any
) -> None:
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False, **settings)
    own = jackfield.decoding(f"plugin:{name}", **STRATEGIES[name])
    found = model.generate(
        **inputs, max_new_tokens=24, do_sample=False, custom_generate=own, **settings
    )
    assert torch.equal(found, expected)
    assert model.config._attn_implementation == "sdpa"


class Only(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forbidden = torch.full_like(scores, -float("inf"))
        forbidden[:, self.token] = 0
        return forbidden


def test_what_a_caller_adds_is_applied(model: Any, inputs: Any) -> None:
    own = jackfield.decoding("prompt_lookup")
    found = model.generate(
        **inputs,
        max_new_tokens=6,
        custom_generate=own,
        logits_processor=LogitsProcessorList([Only(70)]),
    )
    assert (found[:, inputs["input_ids"].shape[1] :] == 70).all()


def test_the_seed_is_torchs(model: Any, inputs: Any) -> None:
    def sampled(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        own = jackfield.decoding("prompt_lookup")
        return model.generate(  # type: ignore[no-any-return]
            **inputs, max_new_tokens=12, do_sample=True, temperature=3.0, top_k=0,
            num_return_sequences=2, custom_generate=own,
        )  # fmt: skip

    assert torch.equal(sampled(1), sampled(1))
    assert sampled(1).shape[0] == 4
    assert not torch.equal(sampled(1)[:, -12:], sampled(2)[:, -12:])


def test_an_installed_attention_stays(inputs: Any) -> None:
    jackfield.install()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            MODEL_PATH, attn_implementation="plugin:sdpa?kernel=math", dtype=torch.float64
        )
        key = model.config._attn_implementation
        own = jackfield.decoding("sample")
        found = model.generate(**inputs, max_new_tokens=5, do_sample=False, custom_generate=own)
        assert model.config._attn_implementation == key
        assert torch.equal(found, model.generate(**inputs, max_new_tokens=5, do_sample=False))
    finally:
        jackfield.uninstall()


def test_processors_that_count_padding_and_criteria_of_a_callers_own(
    model: Any, inputs: Any
) -> None:
    assert (inputs["attention_mask"] == 0).any()
    width = inputs["input_ids"].shape[1]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    own = jackfield.decoding("prompt_lookup")
    for asked in (
        {"min_new_tokens": 12},
        {"begin_suppress_tokens": [22, 70]},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(width + 4)])},
        {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([70, 71, 20])])},
        {"stopping_criteria": [StopStringCriteria(tokenizer, ["blue", "1"])]},
        {"stopping_criteria": [lambda ids, scores: ids[:, -1] == 20]},
    ):
        expected = model.generate(**inputs, max_new_tokens=16, do_sample=False, **asked)
        found = model.generate(
            **inputs, max_new_tokens=16, do_sample=False, custom_generate=own, **asked
        )
        assert torch.equal(found, expected), asked


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"num_beams": 2}, "num_beams=2"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            "num_beams=4, diversity_penalty=0.5, num_beam_groups=2",
        ),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGram"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
    ],
)
def test_what_would_be_lost_is_refused(
    asked: dict[str, Any], words: str, model: Any, inputs: Any
) -> None:
    with pytest.raises(JackfieldError, match=words):
        model.generate(
            **inputs, max_new_tokens=3, custom_generate=jackfield.decoding("sample"), **asked
        )


def test_an_unknown_strategy_and_a_window(inputs: Any) -> None:
    model = build("mistral", torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(JackfieldError, match="there is no decoding 'beamy'"):
        model.generate(ids, max_new_tokens=3, custom_generate=jackfield.decoding("plugin:beamy"))
    right = torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(JackfieldError, match="padded at their left"):
        model.generate(
            ids,
            attention_mask=right,
            max_new_tokens=3,
            custom_generate=jackfield.decoding("sample"),
        )


def test_beams_are_asked_for_in_the_selection(model: Any, inputs: Any) -> None:
    for options, asked in (
        ("num_beams=3", {"num_beams": 3}),
        ("num_beams=2&length_penalty=-1", {"num_beams": 2, "length_penalty": -1.0}),
    ):
        expected = model.generate(**inputs, max_new_tokens=24, do_sample=False, **asked)
        own = jackfield.decoding(f"beam?{options}")
        found = model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=own)
        # Behind the end transformers' beam search writes EOS where the padding is token 0.
        filled = (found[:, 1:] == 0) & (expected[:, 1:] == 1) & (expected[:, :-1] == 1)
        assert torch.equal(found[:, 1:].masked_fill(filled, 1), expected[:, 1:])
        with pytest.raises(JackfieldError, match=r"does not take length_penalty=2\.0"):
            model.generate(**inputs, max_new_tokens=4, custom_generate=own, length_penalty=2.0)


def test_beams_are_drawn_where_generate_samples(model: Any, inputs: Any) -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        own = jackfield.decoding("beam?num_beams=3")
        return model.generate(  # type: ignore[no-any-return]
            **inputs, max_new_tokens=12, do_sample=True, temperature=3.0, top_k=0,
            custom_generate=own,
        )  # fmt: skip

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1)[:, -12:], drawn(2)[:, -12:])


def test_a_streamer_hears_the_prompt_each_token_and_the_end(model: Any, inputs: Any) -> None:
    class Heard:
        def __init__(self) -> None:
            self.puts: list[Any] = []
            self.ends = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts.append(value.tolist())

        def end(self) -> None:
            self.ends += 1

    ids = inputs["input_ids"][1:, (inputs["attention_mask"][1] == 0).sum() :]
    theirs = Heard()
    model.generate(ids, max_new_tokens=9, do_sample=False, streamer=theirs)
    for name, own in STRATEGIES.items():
        heard = Heard()
        strategy = jackfield.decoding(name, **own)
        model.generate(
            ids, max_new_tokens=9, do_sample=False, streamer=heard, custom_generate=strategy
        )
        assert heard.puts == theirs.puts
        assert heard.ends == theirs.ends == 1
    heard = Heard()
    with pytest.raises(JackfieldError, match="streamer is told one text, and 2"):
        model.generate(
            **inputs, max_new_tokens=2, streamer=heard, custom_generate=jackfield.decoding("sample")
        )
    broken = LogitsProcessorList([lambda ids, scores: 1 / 0])
    with pytest.raises(JackfieldError, match="division by zero"):
        model.generate(
            ids, max_new_tokens=2, streamer=heard, logits_processor=broken,
            custom_generate=jackfield.decoding("sample"),
        )  # fmt: skip
    assert heard.ends == 0  # as in transformers


def test_guidance_on_a_padded_cache_and_not_on_a_packed_one(model: Any, inputs: Any) -> None:
    ids = inputs["input_ids"][1:, (inputs["attention_mask"][1] == 0).sum() :]
    asked = {"max_new_tokens": 12, "do_sample": False, "guidance_scale": 12.0}
    expected = model.generate(ids, **asked)
    assert not torch.equal(expected, model.generate(ids, max_new_tokens=12, do_sample=False))
    own = jackfield.decoding("sample", cache_implementation="dynamic")
    assert torch.equal(model.generate(ids, custom_generate=own, **asked), expected)
    for cache in ("paged", "paged?page_size=32"):
        own = jackfield.decoding("sample", cache_implementation=cache)
        with pytest.raises(JackfieldError, match="guidance_scale runs the model a second time"):
            model.generate(ids, custom_generate=own, **asked)


def test_a_model_that_an_engine_runs_is_told_to_be_in_use() -> None:
    mine = AutoModelForCausalLM.from_pretrained(DRAFT_PATH)
    ids = torch.tensor([[5, 6, 7]])
    with jackfield.load(mine), pytest.raises(UsageError, match="already runs in an engine"):
        mine.generate(ids, custom_generate=jackfield.decoding("sample"), max_new_tokens=1)
    mine.generate(ids, custom_generate=jackfield.decoding("sample"), max_new_tokens=1)


def test_a_prefix_function_is_told_the_row(model: Any, inputs: Any) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [70 + row, 80 + row] if len(ids) % 2 else [90 + row, int(ids[-1])]

    asked = {"max_new_tokens": 8, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    expected = model.generate(**inputs, **asked)
    own = jackfield.decoding("prompt_lookup")
    assert torch.equal(model.generate(**inputs, custom_generate=own, **asked), expected)


def test_what_a_models_own_config_says_is_done_once(model: Any, inputs: Any) -> None:
    own = model.generation_config
    own.repetition_penalty, own.top_k = 1.3, 7
    own.cache_implementation, own.prompt_lookup_num_tokens = "static", 3
    try:
        without = {"cache_implementation": None, "prompt_lookup_num_tokens": None}
        expected = model.generate(**inputs, max_new_tokens=16, do_sample=False, **without)
        found = model.generate(
            **inputs,
            max_new_tokens=16,
            do_sample=False,
            custom_generate=jackfield.decoding("sample"),
        )
        assert torch.equal(found, expected)
    finally:
        own.repetition_penalty = own.top_k = None
        own.cache_implementation = own.prompt_lookup_num_tokens = None


#: A value for each field and argument that asks for something.
ASKING: dict[str, Any] = {
    "assistant_confidence_threshold": 0.9,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "bad_words_ids": [[70], [71, 20]],
    "begin_suppress_tokens": [22, 70],
    "bos_token_id": 2,
    "cache_config": {"nbits": 4},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": [object()],
    "continuous_batching_config": object(),
    "decoder_start_token_id": 2,
    "disable_compile": True,
    "diversity_penalty": 0.5,
    "do_sample": False,
    "dola_layers": "low",
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.4,
    "eos_token_id": [1, 70],
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "exponential_decay_length_penalty": (2, 3.0),
    "force_words_ids": [[70]],
    "forced_bos_token_id": 70,
    "forced_eos_token_id": 70,
    "guidance_scale": 12.0,
    "is_assistant": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "max_cache_len": 64,
    "max_length": 30,
    "max_matching_ngram_size": 3,
    "max_new_tokens": 5,
    "max_time": 60.0,
    "min_length": 40,
    "min_new_tokens": 20,
    "min_p": 0.2,
    "no_repeat_ngram_size": 2,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "num_beams": 2,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 3,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 4,
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.3,
    "return_dict_in_generate": True,
    "sequence_bias": {(70,): 5.0},
    "speculation_type": "dflash",
    "stop_strings": ["red green"],
    "suppress_tokens": [5, 70, 71],
    "target_lookbehind": 3,
    "temperature": 0.5,
    "token_healing": True,
    "top_h": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "transformers_version": "5.0",
    "typical_p": 0.5,
    "use_cache": False,
    "use_mtp": True,
    "watermarking_config": WatermarkingConfig(bias=4.0),
    # arguments of `generate`
    "assistant_model": "the model",
    "custom_generate": "ours",
    "generation_config": GenerationConfig(repetition_penalty=1.3, max_new_tokens=7),
    "inputs": "the prompt",
    "logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor([5, 70])]),
    "negative_prompt_attention_mask": torch.ones(1, 1),
    "negative_prompt_ids": torch.tensor([[4]]),
    "prefix_allowed_tokens_fn": lambda row, ids: [70, 71, int(ids[-1])],
    "stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids.shape[1] > 20]),
    "streamer": TextStreamer(None),
    "synced_gpus": True,
    # arguments for the model's forward
    "inputs_embeds": torch.zeros(1, 3, 192),
    "output_router_logits": True,
    "past_key_values": DynamicCache(),
    "position_ids": torch.tensor([[3, 1, 2]]),
    "token_type_ids": torch.tensor([[0, 0, 0]]),
}
OF_GENERATE = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
OF_CONFIG = {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def test_every_field_and_argument_is_in_the_sweep() -> None:
    assert ASKING.keys() >= OF_GENERATE | OF_CONFIG


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(ASKING))
@pytest.mark.one_in(4)
def test_every_field_and_argument_is_honoured_or_refused_by_name(
    name: str, model: Any, inputs: Any
) -> None:
    """Whatever `generate` takes: its tokens, or an error that names it, of ours or its own."""
    if name in {"inputs", "custom_generate"}:  # which every call here has
        return
    value = ASKING[name]
    if name == "assistant_model":
        value = AutoModelForCausalLM.from_pretrained(DRAFT_PATH, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    asked: dict[str, Any] = {name: value} | (
        {"tokenizer": tokenizer} if name in {"stop_strings", "token_healing"} else {}
    )
    if name == "streamer":
        asked[name] = TextStreamer(tokenizer)
    if name not in {"max_length", "generation_config", "min_length"}:
        asked.setdefault("max_new_tokens", 24)
    ids = inputs["input_ids"][1:, (inputs["attention_mask"][1] == 0).sum() :]
    if name == "num_return_sequences":
        asked.update(do_sample=True, top_k=1)

    def run(**more: Any) -> Any:
        try:
            return model.generate(ids.clone(), **asked, **more)
        except Exception as error:  # noqa: BLE001 - transformers' own refusals are of many kinds
            return error

    expected = run()
    own = jackfield.decoding("sample", cache_implementation="dynamic")
    found = run(custom_generate=own)
    if isinstance(found, torch.Tensor):
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(found, expected)
    else:
        # transformers hands its tokenizer to no such function, and says that it has none.
        said = name.replace("_", " ") if name in {"stop_strings", "token_healing"} else name
        assert said in str(found)
        assert isinstance(found, JackfieldError) or said != name or isinstance(expected, Exception)
