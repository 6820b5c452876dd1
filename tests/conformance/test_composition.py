"""The composition tables have no third outcome, and would show one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cells_of_attention
import cells_of_compiling
import cells_of_decoding
import cells_of_quantizing
import composition
import composition_page
import pytest
import torch
from cells import ALL, Cell, judge, names
from samples import drawn

from jackfield.contracts import BoundAttention
from jackfield.errors import ExecutionError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield.sampling.structured import Structures
from jackfield_plugins.attention.sdpa import SdpaAttention, torch_attention


class LyingAttention(SdpaAttention):
    """Declares windows and prefixes that are read in both directions, and knows neither."""

    name = "lying"
    auto_rank = None

    def bind(self, context: Any) -> BoundAttention:
        honest = torch_attention()

        def mask(**kwargs: Any) -> Any:
            from transformers.masking_utils import causal_mask_function, sdpa_mask

            return sdpa_mask(**{**kwargs, "mask_function": causal_mask_function})

        def packed(module: Any, query: torch.Tensor, layer: Any, **kwargs: Any) -> torch.Tensor:
            window, layer.tables.window = layer.tables.window, None
            try:
                return honest.packed(module, query, layer, **kwargs)
            finally:
                layer.tables.window = window

        return BoundAttention(honest.forward, mask, packed)


@pytest.fixture
def lying() -> Iterator[str]:
    attentions = registry().backends["attention"]
    attentions.append(Registered(LyingAttention(), "outside", "1.0", "lying"))
    yield "lying"
    attentions.pop()


def test_a_lying_attention_is_caught(lying: str) -> None:
    assert cells_of_attention.run("mistral", "sdpa", "dynamic").outcome == "equal"
    caught = cells_of_attention.run("mistral", lying, "dynamic")
    assert (caught.outcome, "single" in caught.note) == ("wrong", True)
    assert cells_of_attention.run("llama", lying, "dynamic").outcome == "equal"


def test_an_attention_that_ignores_a_prefix_is_caught(lying: str) -> None:
    for honest in ("eager", "sdpa", "cpu_decode", "flex_attention"):
        assert cells_of_attention.run("hrm-text", honest, "dynamic").outcome == "equal"
    assert cells_of_attention.run("hrm-text", lying, "dynamic").outcome == "wrong"


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt-oss", "hrm-text", "gemma3n", "gemma4", "diffllama"]
)
@pytest.mark.one_in(4)
def test_attentions_have_no_third_outcome(family: str) -> None:
    """A third of a family's cells; the long test below runs them all."""
    pairs = {
        f"{family} {attention} {cache}": (attention, cache)
        for attention, cache in cells_of_attention.pairs()
    }
    cells = [cells_of_attention.run(family, *pairs[name]) for name in drawn(pairs, 3)]
    assert len(cells) > 8
    assert [cell for cell in cells if cell.outcome == "wrong"] == []


def test_every_decoding_has_a_row() -> None:
    rows = {way.decoding.partition("?")[0] for way in cells_of_decoding.WAYS.values()}
    # `mtp` runs the models that have heads (test_mtp.py); these have none.
    assert rows == set(names("decoding")) - {"mtp"}


@pytest.mark.parametrize(
    ("family", "row", "cache", "outcome"),
    [
        ("llama", "sample", "static", "equal"),
        ("gemma3", "prompt_lookup", "paged", "equal"),
        ("llama", "prompt_lookup", "quantized", "refused"),
        ("llama", "assisted", "dynamic", "equal"),
        ("mistral", "assisted", "dynamic", "refused"),
        ("mistral", "assisted, another tokenizer", "paged", "equal"),
        ("hrm-text", "beam", "dynamic", "equal"),
        ("gemma3", "beam", "static", "refused"),
        ("lfm2", "sample, structured", "dynamic", "equal"),
        ("llama", "prompt_lookup, structured", "dynamic", "equal"),
        ("mistral", "assisted, structured", "paged", "equal"),
        ("llama", "assisted, another tokenizer, structured", "dynamic", "equal"),
        ("gemma3", "beam, structured", "paged", "equal"),
    ],
)
@pytest.mark.one_in(2)
def test_decodings(family: str, row: str, cache: str, outcome: str) -> None:
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    found = cells_of_decoding.run(family, row, cache)
    assert found.outcome == outcome, found.note


def test_texts_end_by_tokens_by_structures_and_by_nothing() -> None:
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    lengths = {
        (ends, structured): [
            len(text)
            for family in ("llama", "mistral")
            for text in cells_of_decoding.said(family, torch.float64, ends, structured, None)
        ]
        for ends in (True, False)
        for structured in (True, False)
    }
    longest = cells_of_decoding.COUNT
    assert set(lengths[False, False]) == {longest}
    assert all(min(found) < longest for key, found in lengths.items() if any(key))
    assert lengths[True, True] != lengths[False, True]


def test_a_structure_that_is_not_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    honest = Structures._masks
    monkeypatch.setattr(Structures, "_masks", lambda self, wanted: honest(self, wanted).fill_(-1))
    assert cells_of_decoding.run("llama", "sample", "dynamic").outcome == "equal"
    caught = cells_of_decoding.run("llama", "sample, structured", "dynamic")
    assert (caught.outcome, "batch 1" in caught.note) == ("wrong", True)


@pytest.mark.parametrize(
    ("family", "compiler", "cache", "note"),
    [
        ("gemma3", "inductor", "static", "float64"),
        ("mixtral", "inductor", "paged", "float32"),
        ("mixtral", "native", "paged", "float32"),
        ("gemma4", "native", "dynamic", "float64"),
    ],
)
@pytest.mark.one_in(4)
def test_compilers(family: str, compiler: str, cache: str, note: str) -> None:
    found = cells_of_compiling.run(family, compiler, cache)
    assert (found.outcome, found.note) == ("equal", note)


@pytest.mark.parametrize(
    ("family", "quantizer", "cache", "note"),
    [
        ("gpt2", "int4-cpu", "paged", "rounded"),
        ("deepseek-v3", "bnb-8bit", "static", "same"),
        ("hrm-text", "int4-cpu", "dynamic", "rounded"),
        ("mistral", "none", "static", "same"),
    ],
)
@pytest.mark.one_in(4)
def test_quantizers(family: str, quantizer: str, cache: str, note: str) -> None:
    if quantizer.startswith("bnb"):
        pytest.importorskip("bitsandbytes", reason="needs jackfield[bnb]")
    found = cells_of_quantizing.run(family, quantizer, cache)
    assert (found.outcome, found.note) == ("equal", note)


def test_texts_part_only_where_the_reference_was_not_sure() -> None:
    said = ([4, 9], [{4: -1.0, 5: -1.5}, {9: 0.0}])
    reference = cells_of_quantizing.Reference([said], 0.1)
    assert cells_of_quantizing.away([said], reference) == 0
    assert cells_of_quantizing.away([([5, 8], [])], reference) == 0.5


def test_what_fails_though_it_was_planned_is_a_third_outcome_and_shown() -> None:
    def fails(_: torch.dtype) -> list[tuple[str, bool]]:
        raise ExecutionError("the step failed")

    found = judge("llama", "sample", "paged", lambda _: None, fails)
    assert (found.outcome, found.note) == ("wrong", "not equal: the step failed")
    table = composition_page.DECODING
    shown = composition_page.page({table: [found]})
    assert "| `sample` | 1 WRONG |" in shown


def test_refusals_are_shortened() -> None:
    cells = [
        Cell(family, row, "static", "refused", f"asked: static ({row}); use 'paged'")
        for row, families in (("a", ALL), ("b", ALL[1:]), ("c", ALL[:2]))
        for family in families
    ]
    shown = composition_page.page({composition_page.DECODING: cells})
    assert "- static (a): all\n" in shown
    assert f"- static (b): all but `{ALL[0]}`\n" in shown
    assert f"- static (c): `{ALL[0]}`, `{ALL[1]}`\n" in shown


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_page_is_what_the_run_gives() -> None:
    tables = composition.run()
    assert composition.wrong(tables) == []
    assert composition.PAGE.read_text() == composition_page.page(tables)
