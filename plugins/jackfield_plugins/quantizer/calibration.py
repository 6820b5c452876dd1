"""The texts that GPTQ measures a model's activations on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.demo.tasks import TASKS, Item, training_item
from jackfield.errors import UsageError

if TYPE_CHECKING:
    import torch


def windows(
    file: str | None, tokenizer: Any, count: int, length: int
) -> list[dict[str, torch.Tensor]]:
    """`count` pieces of `length` tokens, fewer where the file ends: int64 tensors of 1 × length.

    Raises UsageError for a file with no text.
    """
    import torch

    ids: list[int] = []
    for text in _texts(file, tokenizer):
        ids += tokenizer(text, add_special_tokens=file is not None)["input_ids"]
        if len(ids) >= count * length:
            break
    if not ids:
        raise UsageError(f"calibration={file}: the tokenizer makes no token of it")
    pieces = [ids[i : i + length] for i in range(0, min(len(ids), count * length), length)]
    return [
        {"input_ids": torch.tensor([p]), "attention_mask": torch.ones(1, len(p), dtype=torch.int64)}
        for p in pieces
        if len(p) == length or len(pieces) == 1
    ]


def plain_texts(file: str | None, count: int) -> list[str]:
    """`count` texts for whoever tokenizes them: lines of the file, or demo items as they are."""
    texts = lines(file) if file else (f"{i.prompt}\n{i.answer}" for i in _items())
    return [text for text, _ in zip(texts, range(count), strict=False)]


def lines(file: str) -> list[str]:
    """The lines of a UTF-8 file with something in them. Raises UsageError."""
    try:
        found = [line for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"calibration={file} cannot be read as UTF-8 text: {error}") from None
    if not found:
        raise UsageError(f"calibration={file} has no text in it")
    return found


def _texts(file: str | None, tokenizer: Any) -> Iterator[str]:
    if file is not None:
        yield from lines(file)
        return
    for item in _items():
        yield _rendered(item, tokenizer)


def _items() -> Iterator[Item]:
    """What the demo model is trained on, and never asked in an evaluation."""
    rng = random.Random("calibration")
    while True:
        yield from (training_item(task, rng) for task in TASKS)


def _rendered(item: Item, tokenizer: Any) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{item.prompt}\n{item.answer}\n"
    roles = (("user", item.prompt), ("assistant", item.answer))
    messages = [{"role": role, "content": content} for role, content in roles]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))
