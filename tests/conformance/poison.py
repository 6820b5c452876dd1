"""Hostile requests: families of prompts, chats, settings, processors and structures by chance."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from families import VOCAB
from torch._subclasses import FakeTensorMode

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
USER = {"role": "user", "content": "a"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
}

#: Templates that take too much time or memory.
GREEDY = {
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a product of lists": "{{ ([messages] * 10 ** 10) | length }}",
    "a product the other way": "{{ 10 ** 10 * 'a' }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{% set n = namespace(x=10) %}{% for i in range(99) %}"
                        "{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
                "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by sums": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
                        "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by blocks": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
                          "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling by replacing": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
                             "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "doubling by joining": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
                           "{% set n.x = n.x.join(['a', n.x]) %}{% endfor %}",
    "lists in lists": "{% set n = namespace(x=['ab']) %}{% for i in range(99) %}"
                      "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "dicts in dicts": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
                      "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "made dicts": "{% set n = namespace(x='ab') %}{% for i in range(40) %}"
                  "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | tojson }}",
    "a width": "{{ 'a'.center(10000000000) }}", "a filter's width": "{{ 'a' | center(10 ** 10) }}",
    "a constant width": "{{ 'a' | center(10000000000) }}",
    "justified": "{{ 'a'.ljust(10 ** 10) }}", "zeros": "{{ 'a'.zfill(10 ** 10) }}",
    "tabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "a format": "{{ '%10000000000d' % 1 }}", "a star": "{{ '%*d' % (10 ** 10, 1) }}",
    "a format's filter": "{{ '%10000000000d' | format(1) }}",
    "a method's format": "{{ '{:10000000000}'.format(1) }}",
    "a nested format": "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "a width in a list": "{{ '{0[0]:{0[1]}}'.format([1, 10 ** 10]) }}",
    "a width in a dict": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 10 ** 10}) }}",
    "an indent": "{{ 'a' | indent(10 ** 10, true) }}",
    "an indent of JSON": "{{ messages | tojson(indent=10 ** 10) }}",
    "batches": "{{ messages | batch(10 ** 10, 'x') | list }}",
    "many filters": "{{ ['a'] | map('center', 10 ** 10) | join }}",
    "bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless and quiet": "{% for a in range(99999) %}{% for b in range(99999) %}"
                         "{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
    "endless talk": "{% for a in range(99999) %}{% for b in range(99999) %}a"
                    "{% endfor %}{% endfor %}",
    "a long talk": "{% set x = 'a' * 999999 %}{% for b in range(99999) %}{{ x }}{% endfor %}",
    "a talk in a block": "{% set x = 'a' * 999999 %}{% set y %}{% for b in range(99999) %}{{ x }}"
                         "{% endfor %}{% endset %}",
    "a call of itself": "{% macro a() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}",
    "lipsum": "{{ lipsum(n=10 ** 7) }}",
}  # fmt: skip


def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise ValueError("no\nthanks")


class Mute(Exception):  # noqa: N818
    """An exception that cannot be told."""

    def __str__(self) -> str:
        raise SystemExit(3)


def raises(error: BaseException) -> Callable[..., Any]:
    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise error

    return processor


def writes(ids: torch.Tensor, scores: torch.Tensor) -> Any:
    """Into all that it can reach, before it returns nothing."""
    for tensor in (ids, scores):
        tensor.fill_(0)
        storage = tensor.untyped_storage()
        storage.copy_(torch.zeros(len(storage), dtype=torch.uint8).untyped_storage())
    return None


def leaves_on(act: Callable[[], Any]) -> Callable[..., Any]:
    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        act()
        return scores

    return processor


NONSENSE: dict[str, Callable[..., Any]] = {
    "leaves a default device": leaves_on(lambda: torch.set_default_device("meta")),
    "leaves a device on": leaves_on(lambda: torch.device("meta").__enter__()),
    "leaves a mode on": leaves_on(lambda: FakeTensorMode().__enter__()),
    "leaves autocast on": leaves_on(lambda: torch.autocast("cpu").__enter__()),
    "raises": fails,
    "asks to end": raises(SystemExit(1)),
    "is interrupted": raises(KeyboardInterrupt()),
    "ends a generator": raises(GeneratorExit()),
    "is cancelled": raises(asyncio.CancelledError()),
    "cannot be told": raises(Mute()),
    "writes": writes,
    "whole numbers": lambda ids, scores: scores.long(),
    "complex": lambda ids, scores: scores + 1j,
    "truths": lambda ids, scores: scores > 0,
    "elsewhere": lambda ids, scores: scores.to("meta"),
    "None": lambda ids, scores: None,
    "a text": lambda ids, scores: "scores",
    "one number": lambda ids, scores: scores[:, :1],
    "no row": lambda ids, scores: scores[:0],
    "a flat row": lambda ids, scores: scores[0],
    "two rows": lambda ids, scores: scores.repeat(2, 1),
    "too many": lambda ids, scores: torch.cat([scores, scores], 1),
    "one more axis": lambda ids, scores: scores[None],
    "not numbers": lambda ids, scores: scores * float("nan"),
    "nothing left": lambda ids, scores: scores - float("inf"),
    "infinite": lambda ids, scores: scores + float("inf"),
    "an index": lambda ids, scores: scores[:, [VOCAB + 5]],
}


Asked = tuple[Any, dict[str, Any]]


class Odd:
    """Fails at whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise Mute

    def __repr__(self) -> str:
        raise Mute

    def __eq__(self, other: object) -> bool:
        raise Mute

    __hash__ = None  # type: ignore[assignment]


def deep(count: int = 50_000) -> Any:
    found: Any = 1
    for _ in range(count):
        found = [found]
    return found


ODD_VALUES: list[Any] = [
    -1, 0, 1, True, None, 10**400, -(10**400), 10**12, 1e-300, math.nan, math.inf, -math.inf,
    "", "x", "\ud800", "x" * 100_000, [], [[]], {}, {1: 2}, [None], b"x", 1j, object(), Odd(), ...,
    lambda: 0, ["a"] * 100_000, [[1, 2]] * 100_000, torch.zeros(2), torch.tensor(math.nan), deep(),
]  # fmt: skip
SETTINGS = [
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "temperature", "top_k", "top_p",
    "min_p", "seed", "stop", "stop_strings", "cache_salt", "priority", "deadline", "eos_token_id",
    "sequence_bias", "bad_words_ids", "suppress_tokens", "logprobs", "logits_processor", "decoding",
    "num_return_sequences", "num_beams", "repetition_penalty", "presence_penalty", "do_sample",
    "frequency_penalty", "generation_config", "stopping_criteria", "prefix_allowed_tokens_fn",
    "choices", "json_schema", "regex", "grammar", "no_such_setting", "max_time", "guidance_scale",
    "negative_prompt", "watermarking_config", "forced_bos_token_id", "remove_invalid_values",
    "attention_mask", "input_ids", "token_type_ids",
]  # fmt: skip
PROMPTS: list[Any] = [
    "", "\ud800", "a" * 2_000_000, "word " * 400_000, b"x", None, 3, 1.5, True, {}, set(), object(),
    Odd(), [], [[]], [1, -1], [VOCAB], [1.5], [True], ["a", 1], [None], [1] * 100_000, deep(), "\0",
    "😀" * 50,
    torch.zeros(0), torch.zeros(2, 3, dtype=torch.long), torch.zeros(3), torch.tensor(3),
    {"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, {"input_ids": Odd()}, {"input_ids": None},
]  # fmt: skip
CHATS: list[Any] = [
    [{}], [USER, None], [USER, 3], [{"role": "robot", "content": "a"}], [{"role": "user"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "user", "content": [Odd()]}], [{"role": "user", "content": Odd()}],
    [{**USER, "name": "x"}],
    [{**USER, "content": "\ud800"}], [{**USER, "x": deep()}], [USER] * 20_000, [CALL],
    [USER, CALL],
    [{**USER, "content": "a" * 1_000_000}], [{**USER, 3: 4}], [{**USER, "role": "\ud800"}],
    [{**USER, "content": deep()}], [{**USER, "role": Odd()}],
]  # fmt: skip


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*arguments: Any, **more: Any) -> Any:
        raise error

    return act


ENDS: list[BaseException] = [
    SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Mute(),
    MemoryError(), RecursionError("x" * 10_000), StopIteration(), BaseException("no\nthanks"),
]  # fmt: skip


WIDE = {"properties": {f"p{n}": {"type": "string"} for n in range(5000)}}
STRUCTURES: list[dict[str, Any]] = [
    {"regex": "[ab]{3}"}, {"choices": ["yes", "no"]}, {"json_schema": {"type": "integer"}},
    {"grammar": "start: /[a-z]{1,4}/"}, {"json_schema": WIDE}, {"json_schema": '{"a":' * 100_000},
    {"json_schema": {"const": "x" * 1_000_000}}, {"choices": [str(n) for n in range(100_000)]},
    {"json_schema": {"enum": ["\ud800"]}}, {"choices": ["\ud800"]}, {"regex": "("}, {"regex": ""},
    {"regex": "(a{1000}){1000}"}, {"regex": r"[a-z]\d{9}(a{1000}){1000}"},
    {"grammar": "start: start"},
    {"regex": "a", "eos_token_id": []}, {"regex": "()", "eos_token_id": []},
    {"regex": "aaa", "eos_token_id": [ord("a") - 32]}, {"regex": "a", "min_new_tokens": 9},
    {"regex": "a", "suppress_tokens": [ord("a") - 32]},
]  # fmt: skip


def prompts(chance: random.Random) -> Asked:
    return chance.choice(PROMPTS), {}


def chats(chance: random.Random) -> Asked:
    return chance.choice(CHATS), {}


def templates(chance: random.Random) -> Asked:
    return [USER], {"template": PLAIN + GREEDY[chance.choice(list(GREEDY))]}


def one_setting(chance: random.Random) -> Asked:
    return "abc", {chance.choice(SETTINGS): chance.choice(ODD_VALUES)}


def some_settings(chance: random.Random) -> Asked:
    names = chance.sample(SETTINGS, 3)
    return [1, 2, 3], {name: chance.choice(ODD_VALUES) for name in names}


def processors(chance: random.Random) -> Asked:
    own = chance.choice([*NONSENSE.values(), *map(raising, ENDS)])
    return "abc", {"logits_processor": [own], "temperature": chance.choice([None, 1.0])}


def criteria(chance: random.Random) -> Asked:
    name = chance.choice(["stopping_criteria", "prefix_allowed_tokens_fn"])
    return "abc", {name: raising(chance.choice(ENDS))}


def structures(chance: random.Random) -> Asked:
    return "abc", {**chance.choice(STRUCTURES), "seed": chance.randrange(99), "temperature": 3.0}


def stops(chance: random.Random) -> Asked:
    letters = [chr(chance.randrange(32, 127)) for _ in range(4)]
    return "abc", {"stop": letters, "temperature": 5.0, "seed": chance.randrange(99)}


def ordinary(chance: random.Random) -> Asked:
    tokens = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 60))]
    return tokens, {"seed": chance.randrange(9), "temperature": 1.0, "num_beams": None}


FAMILIES = (
    prompts, chats, templates, one_setting, some_settings, processors, criteria, structures, stops,
    ordinary,
)  # fmt: skip
