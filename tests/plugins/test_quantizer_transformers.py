"""The methods of transformers that have no backend of their own, and config objects of any."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import extras
import pytest
from transformers import BitsAndBytesConfig, EetqConfig, GPTQConfig, QuantoConfig

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError, PlanError


@pytest.fixture
def weights_stay_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("jackfield.engine.reading.load_model", opened)


@pytest.mark.usefixtures("weights_stay_closed")
@pytest.mark.parametrize(
    ("config", "says"), [(QuantoConfig(weights="int8"), "quanto"), (EetqConfig(), "kernels|GPU")]
)
def test_a_method_whose_library_is_missing(
    config: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = "transformers.quantizers.quantizer_quanto.is_optimum_quanto_available"
    monkeypatch.setattr(home, lambda: False)
    with pytest.raises(PlanError, match=rf"transformers \(.*({says})") as caught:
        jackfield.load("demo", quantization=config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "name", "library"),
    [
        (lambda: BitsAndBytesConfig(load_in_4bit=True), "bnb-4bit", "bitsandbytes"),
        (lambda: BitsAndBytesConfig(load_in_8bit=True), "bnb-8bit", "bitsandbytes"),
        (lambda: jackfield.quantization("torchao"), "torchao", "torchao"),
        (lambda: GPTQConfig(bits=4, group_size=32, dataset=["a"]), "gptq", "gptqmodel"),
    ],
)
def test_the_backend_of_a_method_takes_its_config(make: Any, name: str, library: str) -> None:
    extras.needs(library)
    config = make()
    plan = jackfield.plan("demo", quantization=config)
    assert plan["quantizer"].registered.name == name
    assert plan["quantizer"].options.config is config
    assert plan.requirements.weight_bytes < 5_000_000


def test_a_config_of_no_method() -> None:
    with pytest.raises(PlanError, match="quantizes nothing: write load_in_4bit=True"):
        jackfield.plan("demo", quantization=BitsAndBytesConfig())


@pytest.mark.usefixtures("weights_stay_closed")
@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"quant_method": "of-my-own"}, "has quant_method 'of-my-own', which no quantizer here"),
        ({"bits": 4}, "names no quant_method"),
        ({"quant_method": "gptq"}, "bits is not there, and has to be 2 or 3 or 4 or 8"),
        ({"quant_method": "gptq", "bits": "many", "group_size": 0}, "bits is 'many', and"),
        ({"quant_method": "torchao"}, "quant_type is not there"),
    ],
)
def test_what_a_checkpoint_says_of_itself(
    stored: dict[str, Any], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(MODEL_PATH, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError) as caught:
        jackfield.load(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not caplog.records
