"""Texts of a byte-level vocabulary in a GGUF file are split as the model's own tokenizer does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from families import config_of
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, trainers
from tokenizers import pre_tokenizers as pre
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import jackfield
from jackfield.bridge.gguf_splits import knows, split_as
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError

pytest.importorskip("gguf", reason="needs jackfield[gguf]")

from gguf_files import export

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS as THEIRS,
    )
except ImportError:  # an older transformers has none
    THEIRS = {}

TEXTS = (
    "List:\n\n1. one\n\n22. two", "x =  12345;\n\n\n  y=7", "It's 1,000.50 DON'T", "a\r\n\tb  ",
    "čau 東京 12３ e\u0301 …!", "HTTPServer2Client's", "<|im_start|>user\nhé",
)  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
#: What stands in the tokenizer.json of such models, as its library has it.
OWN: dict[str, list[Any]] = {
    "gpt-2": [pre.ByteLevel(add_prefix_space=False)],
    "smollm": [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
    "starcoder": [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre.Split(Regex(LLAMA3), "isolated"), BYTES],
    "qwen2": [pre.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES],
    "deepseek-coder": [
        *(pre.Split(Regex(one), "isolated")
          for one in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
        pre.Digits(individual_digits=True), BYTES,
    ],
}  # fmt: skip


def own(name: str) -> PreTrainedTokenizerFast:
    """A vocabulary of merges over such pieces."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre.Sequence(OWN[name]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=pre.ByteLevel.alphabet()
    )
    made.train_from_iterator([" ".join(TEXTS)] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def written(path: Path, tokenizer: Any, name: str, **more: Any) -> Path:
    config = config_of("llama")
    config.vocab_size, config.eos_token_id = len(tokenizer), 0
    model = LlamaForCausalLM(config).eval()
    return export(model, path, tokenizer=tokenizer, **{"tokenizer.ggml.pre": name}, **more)


@pytest.mark.parametrize("name", OWN)
def test_a_file_splits_as_the_tokenizer_it_was_made_of(name: str, tmp_path: Path) -> None:
    tokenizer = own(name)
    with jackfield.load(written(tmp_path / "model.gguf", tokenizer, name)) as engine:
        for text in TEXTS:
            assert engine.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"], text


@pytest.mark.parametrize("name", OWN)
@given(text=st.text(alphabet="ab 1é东\n\r\t.'sS…_(", max_size=24))
@example(text="\n\n1")
def test_of_any_text(name: str, text: str) -> None:
    ours = Tokenizer(models.BPE())
    split_as(ours, name)
    assert ours.pre_tokenizer.pre_tokenize_str(text) == pre.Sequence(OWN[name]).pre_tokenize_str(
        text
    )


@pytest.mark.parametrize("name", THEIRS)
def test_every_rule_that_transformers_has_is_the_same_here(name: str) -> None:
    assert knows(name)
    ours = Tokenizer(models.BPE())
    split_as(ours, name)
    theirs = pre.Sequence([pre.Split(Regex(THEIRS[name]), "isolated"), BYTES])
    for text in TEXTS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_a_rule_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    tokenizer = own("smollm")
    path = written(tmp_path / "model.gguf", tokenizer, "nonsense-pre")
    with pytest.raises(CheckpointError, match=r"as 'nonsense-pre' does .*; give tokenizer=…"):
        jackfield.load(path)
    with jackfield.load(path, tokenizer=tokenizer) as engine:
        assert engine.generate("1. one", max_new_tokens=2)[0].token_ids


@pytest.mark.parametrize("name", [5, ["gpt-2"], b"gpt-2", True])
def test_what_is_no_name_is_not_known(name: Any) -> None:
    assert not knows(name)


def test_a_file_without_a_rule_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "model.gguf", own("gpt-2"), "default")
    with caplog.at_level(logging.WARNING, "jackfield"):
        jackfield.load(path).close()
    assert "does not say how its vocabulary splits texts" in caplog.text


@pytest.mark.parametrize("name", ["gpt-2", "qwen2"])
def test_there_are_no_tokens_but_those_of_the_file(name: str, tmp_path: Path) -> None:
    """transformers adds GPT-2's `<|endoftext|>` to a vocabulary without it."""
    path = written(tmp_path / "model.gguf", own(name), name)
    with jackfield.load(path) as engine:
        assert len(engine.tokenizer) == engine.model.config.vocab_size
        (found,) = engine.generate("x", choices=["yes", "no"], max_new_tokens=8)
        assert found.text in ("yes", "no")
        assert engine.generate("what is <|endoftext|>?", max_new_tokens=2)[0].token_ids


def test_the_demo_model_in_a_file_chooses(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        kind.from_pretrained(MODEL_PATH) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    with jackfield.load(export(model, tmp_path / "demo.gguf", tokenizer=tokenizer)) as engine:
        (found,) = engine.generate("Once", choices=["yes", "no"])
        assert found.text in ("yes", "no")
