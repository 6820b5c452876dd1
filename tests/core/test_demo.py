"""The model inside the package: its text, its tokenizer, and that it really answers."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
import torch
import transformers

from jackfield.demo import DRAFT_PATH, MODEL_PATH, stories, tasks

HARD_TEXTS = (
    "plain words",
    "naïve e\u0301 \u0928\u093f \u05e9\u05c1",
    "👩‍👩‍👧‍👦 🇪🇺 \U0001f9ff",
    "two\n\nlines\ttab  double  space \r\n end ",
    "漢字 עברית العربية \u200b\ufeff\x00",
    "1234567890",
)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_PATH)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_PATH).eval()


def test_paths_and_tasks_import_nothing_heavy() -> None:
    code = "import sys, jackfield.demo.tasks; print('torch' in sys.modules, end='')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False"


@pytest.mark.parametrize("task", tasks.TASKS)
def test_heldout_is_deterministic_and_distinct(task: str) -> None:
    items = tasks.heldout(task, 50, seed=3)
    assert items == tasks.heldout(task, 50, seed=3)
    assert items != tasks.heldout(task, 50, seed=4)
    assert len({item.prompt for item in items}) == 50
    assert all(item.task == task and item.matches(f" {item.answer}\n") for item in items)
    assert not any(item.matches(item.answer + "x") for item in items)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_heldout_and_training_never_meet(task: str) -> None:
    rng = random.Random(1)
    trained = {tasks.training_item(task, rng).prompt for _ in range(3000)}
    assert trained.isdisjoint(item.prompt for item in tasks.heldout(task, 400))


def test_a_sum_is_on_one_side_however_it_is_asked() -> None:
    def numbers(answer: str) -> tuple[str, frozenset[str]]:
        first, sign, second = answer.split(" = ")[0].split()
        return sign, frozenset((first, second))

    rng = random.Random(2)
    trained = {numbers(tasks.training_item("arithmetic", rng).answer) for _ in range(5000)}
    assert trained.isdisjoint(numbers(item.answer) for item in tasks.heldout("arithmetic", 400))


@pytest.mark.parametrize("mixture", [tasks.FIRST_MIXTURE, tasks.LAST_MIXTURE])
def test_documents_hold_no_heldout_prompt(mixture: dict[str, float]) -> None:
    known = {item.prompt for task in tasks.TASKS for item in tasks.heldout(task, 400)}
    shown = itertools.islice(tasks.documents(random.Random(5), mixture), 3000)
    assert known.isdisjoint(text for document in shown for _, text in document)


def test_documents_are_deterministic() -> None:
    first, second = (
        list(itertools.islice(tasks.documents(random.Random(7), tasks.LAST_MIXTURE), 200))
        for _ in range(2)
    )
    assert first == second


def test_no_word_is_part_of_another() -> None:
    groups = (stories.NAMES, stories.OBJECTS, stories.PLACES, stories.ANIMALS, stories.COLORS)
    words = [word for group in groups for word in group]
    assert not [(a, b) for a, b in itertools.permutations(words, 2) if f" {b}".startswith(f" {a}")]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_tokenizer_keeps_every_text(tokenizer, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_digits_are_single_tokens(tokenizer) -> None:
    assert len(tokenizer("90210")["input_ids"]) == 5


def test_pad_and_eos_are_distinct_and_shared_with_the_draft(tokenizer, model) -> None:
    draft = transformers.AutoTokenizer.from_pretrained(DRAFT_PATH)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert draft.get_vocab() == tokenizer.get_vocab()
    assert draft.chat_template == tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_chat_template(tokenizer) -> None:
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
    ]
    plain = "<|system|>Be kind.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == plain
    asked = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert asked == "<|system|>Be kind.<|end|><|user|>Hello!<|end|><|assistant|>"
    with pytest.raises(Exception, match="unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_weights_are_small() -> None:
    files = [folder / "model.safetensors" for folder in (MODEL_PATH, DRAFT_PATH)]
    assert sum(file.stat().st_size for file in files) < 12_000_000


def test_model_loads_in_float32(model) -> None:
    assert model.dtype == torch.float32
    assert model.config.num_key_value_heads < model.config.num_attention_heads


def greedy(model, tokenizer, text: str, limit: int) -> str:
    inputs = tokenizer(text, return_tensors="pt")
    new = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
    return tokenizer.decode(new[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.one_in(4)
def test_model_answers(model, tokenizer, task: str) -> None:
    items = tasks.heldout(task, 4, seed=9)
    right = 0
    for item in items:
        chat = [{"role": "user", "content": item.prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        right += item.matches(greedy(model, tokenizer, text, 96))
    assert right >= 3


def test_model_goes_on_with_a_story(model, tokenizer) -> None:
    text = greedy(model, tokenizer, "Once upon a time", 200)
    assert 100 < len(text) < 800
    assert text.endswith((".", '"'))
