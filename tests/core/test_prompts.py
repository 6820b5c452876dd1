"""Prompts as a tokenizer of transformers returns them, and those that are far too long."""

from __future__ import annotations

import asyncio
import threading
from collections import UserDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from families import build, character_tokenizer

import jackfield
from jackfield.bridge.tokenizer import Text
from jackfield.errors import PromptError, UsageError
from jackfield.requests.prompts import taken

if TYPE_CHECKING:
    from transformers import BatchEncoding

TEXTS = ["one", "and two", "3"]
COUNT = 4


@pytest.fixture(scope="module")
def engine() -> Any:
    with jackfield.load(build("llama"), tokenizer=character_tokenizer()) as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine: Any) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(TEXTS, max_new_tokens=COUNT)]


def tokenized(**more: Any) -> BatchEncoding:
    tokenizer = character_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "<end>", more.pop("side", "left")
    return tokenizer(TEXTS, **{"padding": True, "return_tensors": "pt", **more})


GIVEN = {
    "a batch": lambda: (tokenized(),),
    "arrays": lambda: (tokenized(return_tensors="np"),),
    "lists": lambda: (tokenized(return_tensors=None),),
    "no padding": lambda: (tokenized(return_tensors=None, padding=False),),
    "a dict": lambda: (dict(tokenized()),),
    "a mapping": lambda: (UserDict(tokenized()),),
    "a mask of truths": lambda: (
        {
            "input_ids": tokenized()["input_ids"],
            "attention_mask": tokenized().attention_mask.bool(),
        },
    ),
    "a list of tensors": lambda: (
        [torch.tensor(ids) for ids in tokenized(return_tensors=None, padding=False)["input_ids"]],
    ),
}


@pytest.mark.parametrize("what", GIVEN)
def test_what_a_tokenizer_returns_is_a_prompt(engine: Any, expected: Any, what: str) -> None:
    found = engine.generate(*GIVEN[what](), max_new_tokens=COUNT)
    assert [c.token_ids for c in found] == expected


def test_inputs_by_name(engine: Any, expected: Any) -> None:
    found = engine.generate(**tokenized(), max_new_tokens=COUNT)
    assert [c.token_ids for c in found] == expected
    one = character_tokenizer()(TEXTS[1], return_tensors="pt")
    assert engine.generate(**one, max_new_tokens=COUNT)[0].token_ids == expected[1]
    assert engine.submit(**one, max_new_tokens=COUNT).result(60).token_ids == expected[1]
    assert list(engine.stream(**one, max_new_tokens=COUNT))[-1].completion.token_ids == expected[1]
    row = one["input_ids"][0]
    assert engine.generate(row, max_new_tokens=COUNT)[0].token_ids == expected[1]
    assert engine.generate(row[None], max_new_tokens=COUNT)[0].token_ids == expected[1]
    mask = torch.ones_like(row)
    found = engine.generate(input_ids=row, attention_mask=mask, max_new_tokens=COUNT)
    assert found[0].token_ids == expected[1]
    with pytest.raises(UsageError, match="submit takes one prompt"):
        engine.submit(**tokenized())


@pytest.mark.parametrize("empty", [[], (), "", [[]], [""], torch.zeros(0, dtype=torch.long)])
@pytest.mark.parametrize("call", ["submit", "submit_samples", "stream"])
def test_an_empty_prompt_is_called_so(engine: Any, call: str, empty: Any) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        getattr(engine, call)(empty)


def test_an_empty_prompt_is_called_so_in_an_event_loop(engine: Any) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        asyncio.run(engine.asubmit([]))


IDS = [[7, 7, 1, 2], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention_mask": [[1, 1, 0, 0], [1] * 4]}, "row 0: .*padding at the right.*'left'"),
        ({"attention_mask": [[1] * 4, [1, 0, 1, 1]]}, "row 1: attention_mask has holes"),
        ({"attention_mask": [[0, 1, 0, 1], [1] * 4]}, "row 0: attention_mask has holes"),
        ({"attention_mask": [[0, 0, 0, 0], [1] * 4]}, "row 0: attention_mask leaves no token"),
        ({"attention_mask": [[1] * 4]}, "must have 2 rows"),
        ({"attention_mask": [1] * 4}, "must have 2 rows"),
        ({"attention_mask": [[1] * 3, [1] * 4]}, "row 0: .*as many columns"),
        ({"attention_mask": [[2] * 4, [1] * 4]}, "row 0: attention_mask must be of 0 and 1"),
        ({"attention_mask": torch.zeros(2, 4) - 1}, "must be of 0 and 1"),
        ({"attention_mask": 1}, "must have 2 rows"),
        ({"token_type_ids": [[0, 0, 1, 1], [0] * 4]}, "nothing here reads token_type_ids"),
        ({"flags": [1]}, "nothing here reads 'flags' of a prompt; drop it"),
        (
            {"pixel_values": torch.zeros(1)},
            "pixel_values stands beside .*given in a chat: .*'user'",
        ),
        ({"image_grid_thw": [[1, 2, 2]]}, "image_grid_thw stands beside .*given in a chat"),
        ({"pixel_values": torch.zeros(1), "token_type_ids": [[0, 1, 1, 0]]}, "given in a chat"),
        ({"mm_token_type_ids": [[0, 1, 1, 0]]}, "mm_token_type_ids .*given in a chat"),
        ({"input_features": torch.zeros(1, 2, 3)}, "a sound is a prompt by itself"),
    ],
)
def test_what_would_be_dropped_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(PromptError, match=why):
        taken({"input_ids": IDS, **given}, {})


def test_rows_are_cut_by_the_mask() -> None:
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    kinds = dict.fromkeys(("token_type_ids", "mm_token_type_ids"), np.zeros_like(mask))
    more = {"attention_mask": mask, **kinds, "pixel_values": None, "max_new_tokens": 3}
    assert taken(np.array(IDS), more) == [[1, 2], [1, 2, 3, 4]]
    assert more == {"pixel_values": None, "max_new_tokens": 3}
    with pytest.raises(PromptError, match="give one of the two"):
        taken("text", {"input_ids": IDS})


def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning(engine: Any) -> None:
    asked: list[int] = []

    class Counting:
        is_fast = False

        def __call__(self, text: str, **how: Any) -> Any:
            asked.append(len(text))
            return inner(text, **how)

    inner = character_tokenizer()
    text = Text(Counting(), 256)
    with pytest.raises(PromptError, match="first 1600 of the prompt's 1000000 characters are 1600"):
        text.encode("a" * 1_000_000, 100)
    assert asked == [1600]
    assert len(text.encode("a" * 5000, 4000)) == 5000
    with pytest.raises(PromptError, match="context is"):
        engine.generate("a" * 1_000_000)


def test_text_is_made_while_a_prompt_is_read() -> None:
    """Of a tokenizer that may not be used by two at a time for one thing."""
    entered, leave = threading.Event(), threading.Event()

    class Slow:
        is_fast = False

        def __call__(self, text: str, **how: Any) -> Any:
            entered.set()
            assert leave.wait(60)
            return inner(text, **how)

        def decode(self, ids: list[int], **how: Any) -> str:
            return inner.decode(ids, **how)

    inner = character_tokenizer()
    text = Text(Slow(), 256)
    reader = threading.Thread(target=text.encode, args=("abc",))
    reader.start()
    assert entered.wait(60)
    assert text.decode(inner("xyz")["input_ids"]) == "xyz"
    leave.set()
    reader.join(60)
    assert not reader.is_alive()


def test_many_read_and_say_at_once() -> None:
    """A tokenizer that is written in Rust, with no lock."""
    text, failures = Text(character_tokenizer(), 256), []

    def work(n: int) -> None:
        said = f"number {n} " * 50
        for _ in range(40):
            ids = text.encode(said)
            if text.decode(ids) != said:
                failures.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


@pytest.mark.parametrize("prompt", ["\ud800", "a\udfff", [{"role": "user", "content": "\ud800"}]])
def test_half_a_character_is_told(engine: Any, prompt: Any) -> None:
    with pytest.raises(PromptError, match="half a character"):
        engine.generate(prompt)


def test_a_chat_of_no_tokens_is_told() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = Text(tokenizer, 256)
    with pytest.raises(PromptError, match="makes no token"):
        text.encode([{"role": "user", "content": ""}])
