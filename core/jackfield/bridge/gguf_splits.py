"""How texts are split before the merges of a byte-level vocabulary in a GGUF file.

A file names the rule (`tokenizer.ggml.pre`) and does not hold it. Whoever reads it by another one
gives a model tokens that it never learned in that place. Names and rules are llama.cpp's, which
has them of each model's own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from tokenizers import Regex, Tokenizer, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_LINES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_OTHER}[\r\n]*|{_LINES}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_BEFORE, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)  # fmt: skip
_CASES = (f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*")
_TEKKEN = rf"{_CASES[0]}|{_CASES[1]}|\p{{N}}|{_OTHER}[\r\n/]*|{_LINES}"
_GPT4O = rf"{_CASES[0]}{_ENDINGS}?|{_CASES[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_LINES}"
_MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _MARKED)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")

#: Names of whose vocabularies a whole word is one token before any merge, if it is one.
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
)  # fmt: skip
#: Names after which llama.cpp writes a BOS before texts where the file does not say.
WITH_BOS = _WHOLE_WORDS
#: Each expression splits what those before it left whole: what it finds, and what lies between.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    name: splits
    for names, splits in (
        (("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "gigachat", "a.x-4.0", "mellum",
          "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code"), (_GPT2,)),
        (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
         (r"\p{N}", _GPT2)),
        ((*_WHOLE_WORDS, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe", "jina-v5-nano"), (_LLAMA3,)),
        (("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), (_QWEN2,)),
        (("qwen35",), (_QWEN35,)),
        (("tekken",), (_TEKKEN,)),
        (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
        (("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
        (("deepseek-coder",), _DEEPSEEK_CODER),
        (("falcon",), _FALCON),
        (("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
        (("viking",), (_BLOOM, r"\p{N}")),
    )
    for name in names
}  # fmt: skip
#: What files say that were written before there were names.
UNNAMED = (None, "", "default")


def knows(name: object) -> TypeGuard[str | None]:
    """Whether texts can be split as a vocabulary of that name wants."""
    return name in UNNAMED or (isinstance(name, str) and name in _SPLITS)


def split_as(made: Tokenizer, name: str | None) -> None:
    """Have `made` split texts by the rule of that name, which `knows`; without one, as GPT-2 does.

    It is changed in place.
    """
    splits = (_GPT2,) if name in UNNAMED else _SPLITS[name]
    made.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.model.ignore_merges = name in (*_WHOLE_WORDS, "tekken")
