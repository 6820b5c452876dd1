"""Perplexity is transformers' own; what is lost between two selections is said, and is an error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import build, character_tokenizer, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.errors import CacheFullError, PromptError, SettingsError, UsageError
from jackfield.estimates.comparing import Comparison, Quality, built_in_text, compare
from jackfield.estimates.evaluation import Evaluation, TaskScore
from jackfield.estimates.perplexity import Perplexity, perplexity, token_logprobs

if TYPE_CHECKING:
    from command_line import Cli


def plainly(model: Any, ids: list[int], window: int, stride: int) -> float:
    """The sum of negative log-likelihoods, as transformers' own guide computes it."""
    nll, scored = 0.0, 1
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        piece = torch.tensor([ids[begin:end]])
        with torch.no_grad():
            scores = model(piece).logits[0, :-1].log_softmax(-1)
        nll -= scores.gather(1, piece[0, 1:, None])[-(end - scored) :].sum().item()
        scored = end
        if end == len(ids):
            return nll
    raise AssertionError


@pytest.mark.parametrize("cache", ["dynamic", "static", "paged", "paged?page_size=4"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "mixtral"])
@pytest.mark.one_in(4)
def test_perplexity_is_that_of_plain_transformers(family: str, cache: str) -> None:
    (ids,) = prompts((100,))
    wanted = [plainly(build(family), ids, 128, 64), plainly(build(family), ids, 40, 15)]
    model = build(family)
    with jackfield.load(model, attn_implementation="eager", cache_implementation=cache) as engine:
        whole = perplexity(engine, ids)
        pieces = perplexity(engine, ids, window=40, stride=15)
        again = perplexity(engine, ids)
    assert [whole.nll, pieces.nll] == pytest.approx(wanted, rel=1e-9)
    assert again.nll == pytest.approx(whole.nll, rel=1e-9)
    assert whole.tokens == pieces.tokens == 99
    assert whole.value == pytest.approx(math.exp(wanted[0] / 99))


def test_a_text_longer_than_a_step_and_the_context() -> None:
    text = built_in_text()
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float64)
    ids = AutoTokenizer.from_pretrained(MODEL_PATH)(text)["input_ids"]
    done: list[int] = []
    with jackfield.load("demo", dtype="float64") as engine:
        found = perplexity(engine, text, progress=done.append)
        assert engine.generate("Once", max_new_tokens=2)  # it still does what it is for
    assert len(ids) > engine.plan.requirements.context_length
    assert found.nll == pytest.approx(plainly(model, ids, 512, 256), rel=1e-9)
    assert sum(done) == found.tokens == len(ids) - 1


def test_what_cannot_be_scored() -> None:
    with jackfield.load(build("llama"), cache_implementation="paged?num_tokens=32") as engine:
        with pytest.raises(PromptError, match="at least two tokens"):
            perplexity(engine, [5])
        for window in (1, 129):
            with pytest.raises(SettingsError, match="window must be from 2 to 128"):
                perplexity(engine, [5, 6, 7], window=window)
        with pytest.raises(SettingsError, match="stride must be from 1 to 9"):
            perplexity(engine, [5, 6, 7], window=10, stride=10)
        with pytest.raises(CacheFullError):
            perplexity(engine, prompts((100,))[0])
        assert token_logprobs(engine, [5, 6, 7])
        request = engine.submit([5, 6], max_new_tokens=20)
        request.result()
    with pytest.raises(UsageError, match="closed"):
        token_logprobs(engine, [5, 6, 7])


def quality(right: int, nll: float) -> Quality:
    none: Any = None
    tasks = Evaluation((TaskScore("a", right, 100),), 100, 0, 1.0)
    return Quality(none, none, 10, tasks, Perplexity(100, nll, 10, 5, 1.0))


@pytest.mark.parametrize(
    ("right", "nll", "failures"),
    [
        (98, 100.0, []),
        (96, 100.0, []),
        (95, 100.0, ["accuracy fell by 3.0%, from 98.0% to 95.0%"]),
        (99, 104.0, []),
        (98, 106.0, ["perplexity rose by 6.2%"]),
        (98, math.nan, ["perplexity rose by nan%"]),
        (0, math.inf, ["accuracy fell by 98.0%", "perplexity rose by inf%"]),
    ],
)
def test_bounds(right: int, nll: float, failures: list[str]) -> None:
    found = Comparison(quality(98, 100.0), quality(right, nll), 0.02, 0.05)
    assert len(found.failures) == len(failures)
    assert all(map(str.startswith, found.failures, failures))


@pytest.fixture
def spoilt(tmp_path: Path) -> str:
    """The demo model with noise on its weights."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.3 * parameter.data.std() * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_spoilt_model_fails_loudly(cli: Cli, spoilt: str) -> None:
    flags = ("--model", spoilt, "--baseline", "model=demo", "--count", "1", "--tasks")
    done = cli("eval", *flags)
    assert done.code == 1
    assert "error: perplexity rose by" in done.err
    assert "all tasks" in done.out
    found = cli("eval", *flags, "--json")
    assert (found.code, found.json["ok"]) == (1, False)
    assert found.json["rise"] > found.json["max_rise"] == 0.05
    assert cli("eval", *flags, "--max-rise", "1e9", "--max-drop", "1").code == 0


def test_half_the_bytes_and_as_good(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a dog. Sort these numbers: 4 7 1.")
    flags = ("--dtype", "bfloat16", "--baseline", "dtype=float32", "--text", str(file))
    found = cli("eval", *flags, "--no-tasks", "--json").json
    assert found["ok"]
    assert found["before"]["tasks"] is found["drop"] is None
    assert found["before"]["weight_bytes"] == 2 * found["after"]["weight_bytes"]
    assert abs(found["rise"]) < 0.05
    before, after = (found[side]["perplexity"] for side in ("before", "after"))
    assert before["tokens"] == after["tokens"] > 10
    assert before["nll"] != after["nll"]


def test_a_model_other_than_the_demo_is_compared_on_a_text(tmp_path: Path) -> None:
    build("llama", torch.float32).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    found = compare(
        str(tmp_path), {"cache_implementation": "dynamic"}, {"attn_implementation": "eager"},
        text="abc abd",
    )  # fmt: skip
    assert found.before.tasks is None
    assert found.rise == pytest.approx(0, abs=1e-4)
    assert found.failures == []


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.api.read_weights", lambda *_: pytest.fail("weights were read"))


@pytest.mark.usefixtures("no_weights")
def test_a_quantizer_is_compared_with_none() -> None:
    """And nothing is loaded before both sides are known to be possible."""
    with pytest.raises(UsageError, match="there is no quantizer 'nonsense'"):
        compare("demo", {"quantization": "nonsense"})
    with pytest.raises(UsageError, match="before and after are the same"):
        compare("demo", {"quantization": "none"})
    with pytest.raises(UsageError, match="max_drop must be a number, at least 0"):
        compare("demo", {"dtype": "bfloat16"}, {}, max_drop=math.nan)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be a whole number, at least 1, not 0"),
        ({"max_batch_tokens": 4}, "max_batch_tokens=4 is too few"),
        ({"stall_after": 0}, "stall_after must be a number of seconds"),
        ({"max_batchsize": 8}, "load takes no argument 'max_batchsize'; did you mean"),
    ],
)
def test_sizes_of_both_sides_are_checked_at_once(more: dict[str, Any], says: str) -> None:
    for sides in (({**more}, {"dtype": "bfloat16"}), ({"dtype": "bfloat16"}, {**more})):
        with pytest.raises(UsageError, match=says):
            compare("demo", *sides)


@pytest.mark.usefixtures("no_weights")
def test_what_is_asked_of_both_is_checked_at_once(cli: Cli, tmp_path: Path) -> None:
    for count in (0, 1001):
        with pytest.raises(SettingsError, match="the count must be from 1 to 1000"):
            compare("demo", {"dtype": "bfloat16"}, {}, count=count)
    with pytest.raises(PromptError, match="at least two tokens"):
        compare("demo", {"dtype": "bfloat16"}, {}, text="a")
    build("llama", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(PromptError, match="has no tokenizer"):
        compare(str(tmp_path), {"dtype": "bfloat16"}, {})
    cli("eval", "--count", "0").assert_failed(2, "the count must be from 1 to 1000")
    cli("eval", "--no-tasks").assert_failed(2, "--no-tasks leaves nothing to measure")


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """An adapter of the demo model that changes what it says."""
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def test_an_adapter_is_on_both_sides_unless_the_baseline_says_otherwise(
    cli: Cli, adapter: str
) -> None:
    flags = ("eval", "--no-tasks", "--json", "--adapter", adapter, "--max-rise", "1e9")
    flags += ("--dtype", "float32")
    both = cli(*flags, "--attention", "eager", "--baseline", "attention=sdpa").json
    assert [both[side]["plan"]["adapter"]["location"] for side in ("before", "after")] == [
        adapter, adapter,
    ]  # fmt: skip
    assert both["rise"] == pytest.approx(0, abs=1e-4)
    for more in ((), ("--merge-adapter",)):
        without = cli(*flags, *more, "--baseline", "adapter=none").json
        assert without["before"]["plan"]["adapter"] is None
        assert without["after"]["plan"]["adapter"]["location"] == adapter
        assert abs(without["rise"]) > 0.01
    wrong = cli("eval", "--adapter", adapter, "--baseline", "adapter=./nowhere")
    wrong.assert_failed(2, "./nowhere is not a folder")
