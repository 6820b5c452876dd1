"""What is said to a tokenizer in transformers, and what to do where it is said to an engine."""

from __future__ import annotations

from collections.abc import Mapping

_ITS_OWN = "it is the tokenizer's: jackfield.load(tokenizer=…) takes one that has it"
_OF_A_CALL = "call the tokenizer yourself, and give the token ids as the prompt"

#: An argument of a tokenizer's class or call -> the answer.
TOKENIZER_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "add_bos_token", "add_eos_token", "add_prefix_space", "additional_special_tokens",
            "bos_token", "cls_token", "eos_token", "extra_special_tokens", "legacy", "mask_token",
            "model_input_names", "model_max_length", "pad_token", "padding_side", "sep_token",
            "special_tokens_map", "split_special_tokens", "truncation_side", "unk_token",
        ),
        _ITS_OWN,
    ),
    **dict.fromkeys(
        (
            "is_split_into_words", "pad_to_multiple_of", "return_attention_mask", "return_length",
            "return_offsets_mapping", "return_overflowing_tokens", "return_special_tokens_mask",
            "return_token_type_ids", "stride", "text", "text_pair", "text_pair_target",
            "text_target", "tokenizer_kwargs", "verbose",
        ),
        _OF_A_CALL,
    ),
}  # fmt: skip
