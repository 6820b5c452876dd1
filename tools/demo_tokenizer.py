"""The tokenizer and the chat template of the demo model; `train_demo.py` writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jackfield.demo import tasks

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (PAD, END, *(f"<|{role}|>" for role in ROLES))
VOCABULARY = 768
CONTEXT = 512
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE, so that every text survives; digits alone, so that sums can be learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for document in sample(seed, 20_000) for _, text in document)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample(seed: int, count: int) -> Iterator[tasks.Document]:
    """A fixed sample of the training text."""
    return islice(tasks.documents(random.Random(f"sample {seed}"), tasks.FIRST_MIXTURE), count)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer files by hand: what a library version would add is not wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "padding_side": "left",
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write `content` as readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
