"""Workloads: presets, files, arrivals, and what is wrong with them, by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield.benchmarking.contenders import OURS, Contender, contender, of_file, product, rival
from jackfield.benchmarking.preparing import reader
from jackfield.benchmarking.prompt_files import NEW_TOKENS
from jackfield.benchmarking.prompt_files import of_file as workload_of
from jackfield.benchmarking.workload import PRESETS, Request, Shape, Workload, preset
from jackfield.bridge.tokenizer import Text
from jackfield.errors import UsageError

DEMO = Contender("demo", {"model": "demo"})


@pytest.fixture(scope="module")
def text() -> Text:
    return reader(DEMO)[0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_the_model_inside_the_package(name: str, text: Text) -> None:
    context = reader(DEMO)[1]
    assert context == 512
    work = preset(name, Shape(), text, context)
    asked = PRESETS[name]
    assert len(work.requests) == work.batch == asked.requests
    assert work.longest <= 512
    for one in work.requests:
        assert asked.prompt[0] <= len(one.prompt) <= asked.prompt[1]
        assert asked.new[0] <= one.new_tokens <= asked.new[1]
    assert len({one.prompt for one in work.requests}) == len(work.requests)
    assert not work.waits
    assert work == preset(name, Shape(), text, context)
    assert (
        work.to_dict()["digest"] != preset(name, Shape(seed=1), text, context).to_dict()["digest"]
    )


def test_a_shape_overrides_the_preset(text: Text) -> None:
    work = preset("chat", Shape(3, 20, 5, 2, 10.0), text, 512)
    assert [(len(one.prompt), one.new_tokens) for one in work.requests] == [(20, 5)] * 3
    assert (work.batch, work.new_tokens, work.prompt_tokens, work.longest) == (2, 15, 60, 25)
    arrivals = [one.arrival for one in work.requests]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert work.waits


def test_arrivals_come_at_the_rate(text: Text) -> None:
    work = preset("chat", Shape(2000, 1, 1, None, 50.0), text, 512)
    assert work.requests[-1].arrival == pytest.approx(2000 / 50, rel=0.1)


def test_without_a_tokenizer_prompts_are_random_ids() -> None:
    work = preset("chat", Shape(), Text(None, 99), None)
    ids = [token for one in work.requests for token in one.prompt]
    assert set(ids) <= set(range(99))
    assert len(set(ids)) > 80


WRONG = [
    (Shape(requests=0), "requests must be a whole number, at least 1, not 0"),
    (Shape(new_tokens=-1), "new_tokens must be a whole number"),
    (Shape(rate=0.0), "rate must be above 0"),
    (Shape(prompt_tokens=500, new_tokens=13), "the model's context is 512; ask for fewer"),
]


@pytest.mark.parametrize(("shape", "words"), WRONG)
def test_a_wrong_shape_is_named(shape: Shape, words: str, text: Text) -> None:
    with pytest.raises(UsageError, match=words):
        preset("chat", shape, text, 512)


def test_a_workload_that_is_none_is_named(text: Text) -> None:
    with pytest.raises(UsageError, match=r"no workload 'sumarize' .*did you mean 'summarize'"):
        preset("sumarize", Shape(), text, 512)


def test_a_file_has_texts_ids_and_chats(text: Text, tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    lines = [
        {"prompt": "Once upon a time"},
        {"prompt": [5, 6, 7], "max_new_tokens": 3, "arrival": 0.5},
        {"messages": [{"role": "user", "content": "Hello!"}]},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    work = workload_of(file, Shape(), text, 512)
    assert work.name == "work.jsonl"
    assert work.requests[1] == Request((5, 6, 7), 3, 0.5)
    assert [one.new_tokens for one in work.requests] == [NEW_TOKENS, 3, NEW_TOKENS]
    assert text.decode(list(work.requests[0].prompt)).strip() == "Once upon a time"
    assert len(work.requests[2].prompt) > 3
    assert workload_of(file, Shape(new_tokens=2), text, 512).new_tokens == 6


BAD = [
    ("{", "line 1: it is not JSON"),
    ('{"prompt": "a"}\n[1]', "line 2: it is no JSON object"),
    ('{"promt": "a"}', "line 1: there is no field 'promt' .*did you mean 'prompt'"),
    ("{}", "line 1: it needs a prompt or messages"),
    ('{"prompt": "a", "messages": []}', "line 1: it needs a prompt or messages, and not both"),
    ('{"prompt": ""}', "line 1: the prompt is empty"),
    ('{"prompt": [99999]}', "line 1: "),
    ('{"prompt": "a", "max_new_tokens": 0}', "line 1: max_new_tokens must be"),
    ('{"prompt": "a", "max_new_tokens": true}', "line 1: max_new_tokens must be"),
    ('{"prompt": "a", "arrival": -1}', "line 1: arrival must be seconds"),
    (f'{{"prompt": "a", "arrival": {10**400}}}', "line 1: arrival must be seconds"),
    ('{"prompt": "a", "arrival": NaN}', "line 1: arrival must be seconds"),
    (
        '\n{"prompt": "a", "max_new_tokens": 600}',
        "line 2: it has 1 token .*context is 512",
    ),
    ("\n \n", "has no requests"),
]


@pytest.mark.parametrize(("content", "words"), BAD)
def test_a_wrong_line_is_named(content: str, words: str, text: Text, tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=words):
        workload_of(file, Shape(), text, 512)


def test_a_file_that_cannot_be_read_or_is_no_text(text: Text, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        workload_of(tmp_path / "nowhere", Shape(), text, 512)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        workload_of(tmp_path / "bytes", Shape(), text, 512)
    (tmp_path / "fine").write_text('{"prompt": "a", "arrival": 1}')
    with pytest.raises(UsageError, match="drop --rate"):
        workload_of(tmp_path / "fine", Shape(rate=1.0), text, 512)
    with pytest.raises(UsageError, match="drop --prompt-tokens"):
        workload_of(tmp_path / "fine", Shape(prompt_tokens=1), text, 512)


def test_every_combination_is_a_row_that_says_what_is_its_own() -> None:
    rows = product(
        {"attention": ["sdpa", "plugin:eager"], "cache": ["paged"], "dtype": ["float32"]},
        {"model": "demo"},
    )
    assert [row.label for row in rows] == ["sdpa", "eager"]
    assert rows[1].arguments == {
        "model": "demo", "attn_implementation": "plugin:eager", "cache_implementation": "paged",
        "dtype": "float32",
    }  # fmt: skip
    more = product({"attention": ["a", "b"], "cache": ["c", "d"]}, {"model": "demo"})
    assert [row.label for row in more] == ["a + c", "a + d", "b + c", "b + d"]
    shared = product({"tp_size": [1, 2]}, {"model": "demo"})
    assert [(row.label, row.arguments["tp_size"]) for row in shared] == [("tp 1", 1), ("tp 2", 2)]
    assert [row.label for row in product({}, {"model": "demo"})] == ["auto"]
    assert {row.program for row in rows} == {OURS}


def test_selections_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[{"attention": "sdpa", "max_batch_size": 4}, {"label": "x", "dtype": "auto"}]')
    rows = of_file(file, {"model": "demo"})
    assert [row.label for row in rows] == ["sdpa + 4", "x"]
    assert rows[0].arguments["max_batch_size"] == 4
    file.write_text('[{"tp_size": 2}, {"tp_size": 2, "expert_parallel": true}]')
    shared = of_file(file, {"model": "demo"})
    assert [row.label for row in shared] == ["tp 2", "tp 2 + expert_parallel"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "is not JSON"),
        ("{}", "must be a list of selections"),
        ("[]", "must be a list of selections"),
        ("[1]", "must be a list of selections"),
        ('[{"atention": "sdpa"}]', "has no 'atention' .*did you mean 'attention'"),
        ('[{"attention": "a"}, {"attention": "a"}]', "two rows are called 'a'"),
    ],
)
def test_wrong_selections_are_named(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=words):
        of_file(file, {"model": "demo"})


def test_a_rival_that_is_none_is_named() -> None:
    assert not rival("generate", {"model": "demo"}).ours
    with pytest.raises(UsageError, match=r"no rival 'generat' .*did you mean 'generate'"):
        rival("generat", {})
    with pytest.raises(UsageError, match="a selection has no 'nope'"):
        contender("x", {"nope": 1})


def test_a_workload_says_what_it_is() -> None:
    work = Workload("mine", (Request((1, 2), 3), Request((4,), 5, 0.5)), 2, 7)
    told = work.to_dict()
    assert {key: told[key] for key in ("name", "requests", "prompt_tokens", "new_tokens")} == {
        "name": "mine", "requests": 2, "prompt_tokens": 3, "new_tokens": 8,
    }  # fmt: skip
    assert (told["batch"], told["arrivals"], told["seed"]) == (2, True, 7)


def test_a_line_ends_where_json_lines_end(tmp_path: Path, text: Text) -> None:
    """Not at what may stand in a JSON text, and that Python takes for the end of a line."""
    path = tmp_path / "prompts.jsonl"
    prompts = [f"one{mark}two" for mark in "\u2028\u2029\x85"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    found = workload_of(path, Shape(), text, None)
    assert [list(one.prompt) for one in found.requests] == [text.encode(one) for one in prompts]
    path.write_text("\n".join([*lines, "{"]), encoding="utf-8")
    with pytest.raises(UsageError, match="line 4: it is not JSON"):
        workload_of(path, Shape(), text, None)
