"""The checks of quantizers: right ones pass, wrong ones are caught by the fault's name."""

from __future__ import annotations

import extras
import pytest
import quantizer
import right_quantizer
from mutation import mutants
from wrong import Wrong, assert_caught, assert_right, judged, sampled, uninstalled

from jackfield.contracts import QuantizerCapabilities
from jackfield.testing.checks import Verdict, verdict
from jackfield.testing.subject import subject_of
from jackfield.testing.suites import checks_of

#: Which are caught by what is cheap, so that the ordinary run can afford them.
SAMPLE = (
    "weights twice as large", "last group left out", "bias lost", "changes its inputs",
    "an error that is too small",
)  # fmt: skip

OF_LIBRARIES = {
    "bnb-8bit": "bitsandbytes",
    "bnb-4bit": "bitsandbytes",
    "bnb-4bit?type=fp4": "bitsandbytes",
    "torchao": "torchao",
    "torchao?type=int8-dynamic": "torchao",
    "torchao?type=int4-weight-only": "torchao",
    "gptq": "gptqmodel",
}


def found_of(selection: str) -> list[Verdict]:
    return list(map(verdict, checks_of(subject_of(selection, "quantizer"))))


@pytest.mark.long
def test_weights_as_they_are_pass() -> None:
    assert_right(found_of("plugin:none"), 15)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "selection",
    ["int4-cpu", "int4-cpu?group_size=128", "int8-cpu", "transformers", *OF_LIBRARIES],
)
def test_built_in_quantizers_pass(selection: str) -> None:
    if library := OF_LIBRARIES.get(selection):
        extras.needs(library)
    assert_right(found_of(f"plugin:{selection}"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_strangers_quantizer_that_is_right_passes() -> None:
    found = judged(right_quantizer.Nibbles)
    assert_right(found)
    assert sum(v.outcome == "passed" for v in found) > 25


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_that_declares_next_to_nothing_passes() -> None:
    class Few(right_quantizer.Nibbles):
        name = "few"
        capabilities = QuantizerCapabilities(
            dtypes=frozenset({"float32"}), devices=frozenset({"cpu"})
        )

        def weight_bytes(self, requirements: object, options: object) -> None:
            return None

    assert_right(judged(Few))


@pytest.mark.parametrize("wrong", sampled(quantizer.ZOO, SAMPLE), ids=str)
def test_wrong_quantizers_are_caught_by_name(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", [w for w in quantizer.ZOO if w.name not in SAMPLE], ids=str)
def test_all_wrong_quantizers_are_caught_by_name(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
def test_mutants_of_the_right_one_can_be_made() -> None:
    found = mutants(right_quantizer, 20)
    assert len({mutant.what for mutant in found}) == 20


@pytest.mark.parametrize("offered", [None, [], 7])
def test_native_operators_that_are_no_dict_are_told(offered: object) -> None:
    class Offers(right_quantizer.Nibbles):
        def native_operators(self) -> object:  # type: ignore[override]
            return offered

    with uninstalled(Offers()) as subject:
        (one, _) = [check for check in checks_of(subject) if check.name.endswith(".native")]
        found = verdict(one)
    assert found.outcome == "failed"
    assert f"native_operators must return a dict, got {offered}" in found.message
