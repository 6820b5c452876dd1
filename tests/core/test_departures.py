"""The page of departures: nothing that `generate` takes is missing from it."""

from __future__ import annotations

import inspect

import departures
import pytest
from transformers import GenerationConfig, GenerationMixin

from jackfield.errors import quoted
from jackfield.requests.vocabulary import ARGUMENTS, CODE, DRAFTING, FACTS, REFUSED

FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
#: Arguments of `generate` whose values are read like settings.
READ = {
    "generation_config", "inputs", "logits_processor", "negative_prompt_ids",
    "prefix_allowed_tokens_fn", "stopping_criteria", "streamer",
}  # fmt: skip


def test_the_tables_are_those_of_the_vocabulary() -> None:
    hint = "run python tests/conformance/departures.py"
    assert departures.PAGE.read_text(encoding="utf-8") == departures.written(), hint


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_is_honoured_or_told_of(name: str) -> None:
    honoured = set(departures.honoured()) | {"max_time"}
    kinds = [name in kind for kind in (honoured, FACTS, CODE, REFUSED)]
    assert kinds.count(True) == 1
    assert f"`{name}`" in departures.PAGE.read_text(encoding="utf-8")


def test_every_argument_of_generate_is_read_or_told_of() -> None:
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert arguments <= READ | ARGUMENTS.keys()
    page = departures.PAGE.read_text(encoding="utf-8")
    assert {name for name in arguments if f"`{name}" not in page} == set()


def test_no_table_has_what_is_honoured_or_what_there_is_not() -> None:
    honoured = set(departures.honoured())
    assert not honoured & (CODE.keys() | REFUSED.keys() | ARGUMENTS.keys())
    for table in (CODE, REFUSED, DRAFTING):
        strays = table.keys() - FIELDS
        assert strays <= {"speculation_type", "assistant_ensemble_weight", "max_cache_len", "top_h",
                          "use_mtp", "continuous_batching_config"}, quoted(strays)  # fmt: skip
