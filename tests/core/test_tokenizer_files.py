"""A tokenizer whose files are not all there is refused: of every class that transformers has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import jackfield
from jackfield.bridge.source import find
from jackfield.bridge.tokenizer_files import tokenizer_of
from jackfield.errors import CheckpointError

FAMILIES = {str(name): family for family, name in TOKENIZER_MAPPING_NAMES.items()}
TEXTS = ("A sentence of 3 or 4 words.", "MKTAYIAK")  # the second one is a protein


@pytest.mark.parametrize("one_in", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_class_without_its_vocabulary_is_refused_or_needs_none(
    one_in: int, tmp_path: Path
) -> None:
    """transformers makes many of them with special tokens alone, which drop a text or say <unk>."""
    demo, usable, refused = find("demo", None), [], 0
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for family in list(FAMILIES.values())[::one_in]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        try:
            tokenizer = tokenizer_of(tmp_path, demo)
        except CheckpointError as error:
            refused += str(tmp_path) in str(error)
            continue
        usable.append(type(tokenizer).__name__)
        tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        assert any({*ids} - {tokenizer.unk_token_id} for ids in tokens), usable[-1]
    assert refused > 50 / one_in
    assert one_in > 1 or "CanineTokenizer" in usable  # one that needs no file


def test_a_folder_with_settings_of_a_tokenizer_alone_is_not_loaded(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with jackfield.load(tmp_path) as engine:
        assert len(engine.generate([[1, 2, 3]], max_new_tokens=2)[0].token_ids) == 2
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(CheckpointError, match="has no vocabulary, so every text"):
        jackfield.load(tmp_path)
