"""Encoder-decoder models in an engine: what transformers generates of each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from encoder_decoders import START, TYPES, build, generated

import jackfield
from jackfield.bridge import requirements
from jackfield.bridge.requirements import described
from jackfield.errors import (
    CheckpointError,
    JackfieldError,
    PlanError,
    PromptError,
    SettingsError,
    UsageError,
)
from jackfield.estimates.perplexity import perplexity

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16, 17, 18, 19, 20]]
FEW = ("bart", "t5", "t5gemma")
ALL = [pytest.param(t, marks=() if t in FEW else pytest.mark.long) for t in TYPES]
#: Random weights say one token for ever, where nobody keeps them from it.
VARIED = {"no_repeat_ngram_size": 1}
BOTH = {"sample": "sample", "beam": "beam"}


@pytest.fixture(scope="module")
def bart() -> Any:
    return build("bart")


@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.one_in(4)
def test_a_ragged_batch_is_what_each_prompt_gets_alone(model_type: str, attention: str) -> None:
    model = build(model_type)
    if "code of its own" in (why := refused(model)):
        pytest.skip(why)
    greedy = {"max_new_tokens": 12, "eos_token_id": None, **VARIED}
    beams = {"max_new_tokens": 8, "eos_token_id": None, "num_beams": 3}
    expected = [generated(model, prompt, **greedy) for prompt in PROMPTS]
    searched = [generated(model, prompt, **beams) for prompt in PROMPTS]
    if attention in ("sdpa", "flex_attention"):
        try:
            jackfield.plan(model, attn_implementation=attention)
        except PlanError:
            return
    with jackfield.load(model, attn_implementation=attention, decoding=BOTH) as engine:
        found = engine.generate(PROMPTS, **greedy, output_logits=True)
        assert [c.token_ids for c in found] == expected
        for prompt, completion in zip(PROMPTS, found, strict=True):
            right = logits(model, prompt, **greedy)
            rounding = 1e-3 * max(1.0, float(right.std()))
            torch.testing.assert_close(completion.logits, right, rtol=0, atol=rounding)
        assert [c.token_ids for c in engine.generate(PROMPTS, **beams)] == searched


def logits(model: Any, prompt: list[int], **settings: Any) -> torch.Tensor:
    """`[new, vocab]`, what transformers says of the prompt alone."""
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, output_logits=True, return_dict_in_generate=True,
        **settings,
    )  # fmt: skip
    return torch.cat(out.logits)


def refused(model: Any) -> str:
    """Why a model, or one of its config, is not run."""
    try:
        jackfield.plan(model)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model_type", ["seamless_m4t", "seamless_m4t_v2"])
def test_what_generates_by_code_of_its_own_is_refused(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    with pytest.raises(CheckpointError, match="generates by code of its own"):
        jackfield.plan(config)


@pytest.mark.parametrize("model_type", ["pop2piano", "dia", "pix2struct"])
def test_an_encoder_of_no_text_is_refused(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    with pytest.raises(CheckpointError, match="has an encoder that reads no text"):
        jackfield.plan(config)


def test_rows_that_come_and_go_change_no_text(bart: Any) -> None:
    lengths = (3, 9, 1, 6, 12)
    prompts = [*PROMPTS, [21, 22], [23, 24, 25, 26]]
    expected = [
        generated(bart, prompt, max_new_tokens=most, eos_token_id=None)
        for prompt, most in zip(prompts, lengths, strict=True)
    ]
    with jackfield.load(bart, max_batch_size=3) as engine:
        requests = [
            engine.submit(prompt, max_new_tokens=most, eos_token_id=None)
            for prompt, most in zip(prompts, lengths, strict=True)
        ]
        cancelled = engine.submit([30, 31], max_new_tokens=40, eos_token_id=None)
        assert [request.result().token_ids for request in requests] == expected
        engine.cancel(cancelled)
        streamed = [
            token
            for delta in engine.stream(prompts[1], max_new_tokens=9, eos_token_id=None)
            for token in delta.token_ids
        ]
    assert streamed == expected[1]


def test_samples_are_the_same_in_any_batch(bart: Any) -> None:
    drawn = {"max_new_tokens": 8, "eos_token_id": None, "temperature": 2.0, "seed": 7}
    with jackfield.load(bart) as engine:
        alone = [engine.generate(prompt, **drawn)[0].token_ids for prompt in PROMPTS]
        together = [c.token_ids for c in engine.generate(PROMPTS, **drawn)]
        several = engine.generate(PROMPTS[2], **drawn, num_return_sequences=3)
    assert together == alone
    assert several[0].token_ids == alone[2]
    assert len({tuple(c.token_ids) for c in several}) == 3


@pytest.mark.parametrize("model_type", ["t5", "bart", "m2m_100", "t5gemma"])
@pytest.mark.one_in(4)
def test_a_request_says_what_its_text_begins_with(model_type: str) -> None:
    """By a keyword, an object, or its row's settings; of the model's own what it says now."""
    model = build(model_type)
    usual = {"max_new_tokens": 6, "eos_token_id": None, **VARIED}
    begun = {s: generated(model, PROMPTS[0], **usual, decoder_start_token_id=s) for s in (2, 9, 50)}
    plain = {s: generated(model, PROMPTS[1], **usual, decoder_start_token_id=s) for s in (2, 9, 50)}
    assert len({*map(tuple, begun.values()), *map(tuple, plain.values())}) > 3, "it changes nothing"
    with jackfield.load(model) as engine:
        for start, right in begun.items():
            (found,) = engine.generate(PROMPTS[0], decoder_start_token_id=start, **usual)
            assert found.token_ids == right
            asked = transformers.GenerationConfig(decoder_start_token_id=start)
            (found,) = engine.generate(PROMPTS[0], generation_config=asked, **usual)
            assert found.token_ids == right
        rows = [{"decoder_start_token_id": start} for start in begun]
        found_beside = engine.generate([PROMPTS[1]] * 3, settings=rows, **usual)
        assert [c.token_ids for c in found_beside] == list(plain.values())
        (found,) = engine.generate(PROMPTS[0], decoder_start_token_id=None, **usual)
        assert found.token_ids == begun[2]
        for wrong, words in ((97, "no token id"), (-1, "no token id"), ([2, 9], "one token id")):
            with pytest.raises(SettingsError, match=f"decoder_start_token_id .*{words}"):
                engine.generate(PROMPTS[0], decoder_start_token_id=wrong)
        model.generation_config.decoder_start_token_id = 9
        assert engine.generate(PROMPTS[0], **usual)[0].token_ids == begun[9]


LONG = [5 + i * 7 % 80 for i in range(40)]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bigbird_pegasus", {"block_size": 2, "num_random_blocks": 1}),
        *(pytest.param(t, {}, marks=() if t in FEW else pytest.mark.long) for t in TYPES),
    ],
)  # fmt: skip
def test_what_was_read_before_changes_no_text(model_type: str, changes: dict[str, Any]) -> None:
    model = build(model_type, **changes)
    if not changes and refused(model):
        pytest.skip("refused")
    encoder, settings = model.get_encoder(), {"max_new_tokens": 4, "eos_token_id": None}
    parts, random = [*encoder.modules()], torch.get_rng_state()
    with jackfield.load(model) as engine:
        first = [engine.generate(p, **settings, output_logits=True)[0] for p in (LONG, PROMPTS[1])]
        again = [engine.generate(p, **settings, output_logits=True)[0] for p in (LONG, PROMPTS[1])]
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=0)
    assert [*map(id, encoder.modules())] == [*map(id, parts)]
    found = torch.get_rng_state()
    torch.set_rng_state(random)
    assert first[0].token_ids == generated(model, LONG, **settings)
    # Some draw in each step whether a layer is left out in training (FSMT, LED, NLLB-MoE).
    assert torch.equal(found, random) or not torch.equal(torch.get_rng_state(), random)


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1, "no_repeat_ngram_size": None},
    {"no_repeat_ngram_size": None},
    {"encoder_repetition_penalty": 5.0},
    {"encoder_no_repeat_ngram_size": 1},
    {"min_new_tokens": 6},
    {"min_length": 7},
    {"max_length": 6},
    {"begin_suppress_tokens": [*range(3, 90)]},
    {"forced_eos_token_id": 50, "eos_token_id": 50},
    {"exponential_decay_length_penalty": (1, 3.0)},
    {"suppress_tokens": [*range(40, 90)]},
    {"forced_bos_token_id": 33},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
]


@pytest.mark.parametrize("asked", SETTINGS, ids=lambda asked: next(iter(asked)))
@pytest.mark.one_in(2)
def test_settings_mean_what_they_mean_in_generate(bart: Any, asked: dict[str, Any]) -> None:
    text = generated(bart, PROMPTS[0], max_new_tokens=10, eos_token_id=None, **VARIED)
    usual = {"max_new_tokens": 10, "eos_token_id": text[3], **VARIED}
    settings = {**usual, **asked}
    if "max_length" in asked:
        del settings["max_new_tokens"]
    prompts = [*PROMPTS, [*range(20, 97)]]  # the last has nearly all that a text can say
    expected = [generated(bart, prompt, **settings) for prompt in prompts]
    with jackfield.load(bart, decoding=BOTH) as engine:
        found = [c.token_ids for c in engine.generate(prompts, **settings)]
    for prompt, text, right in zip(prompts, found, expected, strict=True):
        if text != right:  # only among several may two be as likely: their order then is rounding
            assert "num_beams" in asked
            assert likelihood(bart, prompt, text) == pytest.approx(likelihood(bart, prompt, right))
    plain = [generated(bart, prompt, **usual) for prompt in prompts]
    assert expected != plain, "the setting changes nothing here"


@torch.no_grad()
def likelihood(model: Any, prompt: list[int], text: list[int]) -> float:
    """The sum of the log-probabilities of a text's tokens."""
    ids = torch.tensor([[START, *text]])
    out = model(input_ids=torch.tensor([prompt]), decoder_input_ids=ids)
    said = out.logits[0, :-1].log_softmax(-1)
    return float(said.gather(1, ids[0, 1:, None]).sum())


def test_a_prompt_is_read_once(bart: Any) -> None:
    read: list[int] = []
    handle = bart.get_encoder().register_forward_hook(
        lambda _module, _args, kwargs, _out: read.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    try:
        with jackfield.load(bart, decoding=BOTH) as engine:
            many = {"max_new_tokens": 4, "eos_token_id": None}
            completions = engine.generate(PROMPTS, **many)
            assert sorted(read) == [3, 5, 8]
            assert [c.usage.prompt_tokens for c in completions] == [5, 3, 8]
            assert engine.count_tokens(PROMPTS[2]) == 8
            read.clear()
            engine.generate(PROMPTS[0], **many, temperature=1.0, num_return_sequences=4)
            engine.generate(PROMPTS[0], **many, num_beams=3)
            assert read == [5, 5]
    finally:
        handle.remove()


def test_a_model_is_given_back_as_it_was(bart: Any) -> None:
    t5 = build("t5")
    for model in (bart, t5):
        before = [c._attn_implementation for c in configs(model)]
        expected = generated(model, PROMPTS[0], max_new_tokens=6)
        with jackfield.load(model) as engine:
            assert engine.generate(PROMPTS[0], max_new_tokens=6)[0].token_ids == expected
            assert engine.report()["cache"].calls > 0
        assert [c._attn_implementation for c in configs(model)] == before
        assert generated(model, PROMPTS[0], max_new_tokens=6) == expected


def configs(model: Any) -> list[Any]:
    return [m.config for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]


def test_an_encoder_of_fewer_layers_than_its_decoder() -> None:
    """transformers 5.22 makes its cache for as many layers as the encoder has, and fails."""
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=3,
        num_heads=4, decoder_start_token_id=START, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(config).eval()
    text = [START]
    for _ in range(6):
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([PROMPTS[0]]), decoder_input_ids=torch.tensor([text]),
                use_cache=False,
            ).logits  # fmt: skip
        text.append(int(logits[0, -1].argmax()))
    with jackfield.load(model) as engine:
        (found,) = engine.generate(PROMPTS[0], max_new_tokens=6, eos_token_id=None)
    assert found.token_ids == text[1:]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cache_implementation": "paged"}, "has no place for what an encoder said"),
    ({"cache_implementation": "static"}, "columns that are not written yet"),
    ({"compile": "inductor"}, "cannot take out the attention to what an encoder said"),
    ({"decoding": "prompt_lookup"}, "cannot take back tokens"),
    ({"attn_implementation": "metal_flash_sdpa"}, "cross_attention|does not run with device"),
    ({"deterministic": True}, "padded to the longest for the decoder"),
    ({"verify": True}, "from a decoder's tokens alone"),
    ({"adapter": "somewhere"}, "adapters are put on decoders only"),
    ({"adapters": {"a": "somewhere"}}, "adapters are put on decoders only"),
    ({"assistant_model": "demo-draft"}, "takes no token back"),
    ({"tp_size": 2}, "decoders only are shared"),
]


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=lambda case: str(case)[:30])
def test_what_does_not_go_with_an_encoder_is_refused(
    bart: Any, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(JackfieldError, match=words) as caught:
        jackfield.load(bart, **asked)
    assert isinstance(caught.value, PlanError | UsageError)
    assert "\n" not in str(caught.value)


def test_prompts_that_the_encoder_cannot_read(bart: Any) -> None:
    most = bart.config.max_position_embeddings
    with jackfield.load(bart) as engine:
        with pytest.raises(PromptError, match=f"encoder reads {most} at most; shorten it"):
            engine.generate([5] * (most + 1))
        with pytest.raises(PromptError, match="is no token id"):
            engine.generate([5, 10_000])
        with pytest.raises(SettingsError, match="here an encoder reads prompts; drop it"):
            engine.generate([5], guidance_scale=2.0, negative_prompt=[6])
        (longest,) = engine.generate([5] * most, max_new_tokens=2, eos_token_id=None)
    assert len(longest.token_ids) == 2


@pytest.mark.parametrize("model_type", ALL)
def test_the_longest_prompt_is_read_and_a_longer_one_refused(model_type: str) -> None:
    model = build(model_type)
    if refused(model):
        pytest.skip("refused")
    most = jackfield.plan(model).requirements.encoder_length
    if most is None:
        return
    with jackfield.load(model) as engine:
        (longest,) = engine.generate([5] * most, max_new_tokens=2, eos_token_id=None)
        with pytest.raises(PromptError, match=f"encoder reads {most} at most; shorten it"):
            engine.generate([5] * (most + 1))
    assert len(longest.token_ids) == 2


LIMITS = {
    "bart": (1024, 1024), "led": (16384, 1024), "t5": (None, None), "fsmt": (1024, 1024),
    "encoder-decoder": (512, 512), "t5gemma": (8192, 8192),
}  # fmt: skip


@pytest.mark.parametrize("model_type", [t for t in LIMITS if t in TYPES])
@pytest.mark.one_in(4)
def test_what_each_part_reads_at_most(model_type: str) -> None:
    found = described(transformers.AutoConfig.for_model(model_type))
    assert (found.encoder_length, found.context_length) == LIMITS[model_type]


@pytest.mark.parametrize("model_type", ALL)
def test_a_small_model_of_every_type_is_tried(model_type: str) -> None:
    """As published: configs of parts in parts and heads by other names are made small too."""
    config = transformers.AutoConfig.for_model(model_type, **(_PARTS.get(model_type) or {}))
    if why := refused(config):
        assert "code of its own" in why
    else:
        assert "could not be tried" not in str(jackfield.plan(config).requirements.fixed)


_PARTS = {
    "encoder-decoder": {
        "encoder": transformers.BertConfig().to_dict(),
        "decoder": transformers.BertConfig(is_decoder=True, add_cross_attention=True).to_dict(),
    }
}


def test_what_cannot_be_tried_is_refused(bart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_model: Any) -> Any:
        raise RuntimeError("no small one")

    monkeypatch.setattr(requirements, "encoder_trial", broken)
    with pytest.raises(CheckpointError, match=r"could not be tried: no small one.*another model"):
        jackfield.plan(bart)


@pytest.mark.parametrize("start", [[2, 3], "two", True, 97, -1])
def test_a_text_that_begins_with_no_token_id_is_refused(start: Any) -> None:
    model = build("bart")
    model.generation_config.decoder_start_token_id = start
    with pytest.raises(PlanError, match="which is no token id; set one token"):
        jackfield.load(model)


def test_a_text_without_a_prompt_is_not_scored(bart: Any) -> None:
    with (
        jackfield.load(bart) as engine,
        pytest.raises(UsageError, match="a text alone is scored by decoders; give a decoder"),
    ):
        perplexity(engine, [5, 6, 7, 8])


def test_a_text_that_begins_with_nothing_is_refused() -> None:
    model = build("bart")
    model.generation_config = transformers.GenerationConfig()
    for config in configs(model):
        config.decoder_start_token_id = config.bos_token_id = None
    with pytest.raises(PlanError, match="does not say which token its texts begin with"):
        jackfield.load(model)


def test_a_folder_with_a_tokenizer(bart: Any, tmp_path: Any) -> None:
    from jackfield.demo import MODEL_PATH

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    model = build("bart", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("once upon a time")["input_ids"]
    expected = generated(model, ids, max_new_tokens=10)
    with jackfield.load(tmp_path) as engine:
        (found,) = engine.generate("once upon a time", max_new_tokens=10)
        assert "encoder" in engine.explain()
    assert found.token_ids == expected
    assert found.text == tokenizer.decode(expected, skip_special_tokens=True)
