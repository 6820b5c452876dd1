"""Models of a hub: headers are looked at before files are fetched, and files before they are read.

Nothing is asked of a network that need not be. The hub is a server on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEADER = 100_000  # bytes that are asked for at most, where a header is not longer

#: What is wrong on the hub -> what is said of it.
BAD = {
    "cut": "bytes where its header promises",
    "longer": "bytes where its header promises",
    "four bytes": "has 4 bytes",
    "long header": "is not a safetensors file (a header of 1,099,511,627,776 bytes",
    "deep header": "is not valid JSON",
    "other shape": "has other bytes than its shape and dtype need",
    "odd dtype": "has no dtype, shape and place of a tensor",
    "no offsets": "has no dtype, shape and place of a tensor",
    "whole numbers": "names no quantization that it is of",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hub")
    script = Path(__file__).with_name("hub_calls.py")
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads((folder / "told.json").read_text()))


@pytest.mark.long
def test_a_header_comes_before_the_weights(told: dict[str, Any]) -> None:
    assert told["whole"]["tokens"] == told["folder"]["tokens"]
    (_, header), (_, whole) = told["whole"]["sent"]
    assert header <= HEADER < whole
    assert told["again"]["tokens"] == told["folder"]["tokens"]
    assert told["again"]["sent"] == []


@pytest.mark.long
def test_only_parts_that_are_missing_are_fetched(told: dict[str, Any]) -> None:
    for name, parts in (("parts", 3), ("one part", 1)):
        assert told[name]["tokens"] == told["folder"]["tokens"]
        headers = [size for _, size in told[name]["sent"] if size <= HEADER]
        fetched = [size for _, size in told[name]["sent"] if size > HEADER]
        assert (len(headers), len(fetched)) == (parts, parts)


@pytest.mark.long
def test_a_server_that_sends_whole_files_only(told: dict[str, Any]) -> None:
    assert told["no ranges"]["tokens"] == told["folder"]["tokens"]


@pytest.mark.parametrize("what", BAD)
def test_what_is_broken_on_the_hub_is_not_fetched(told: dict[str, Any], what: str) -> None:
    found = told[what]
    assert found["error"].startswith("CheckpointError: ")
    assert "model.safetensors" in found["error"]
    assert BAD[what] in found["error"]
    assert sum(size for _, size in found["sent"]) <= (4 if what == "deep header" else 1) * HEADER


def test_nothing_is_asked_offline(told: dict[str, Any]) -> None:
    assert told["offline"]["tokens"] == told["folder"]["tokens"]
    said = "the hub's cache has no part-2.safetensors of me/parts, and HF_HUB_OFFLINE is set"
    assert said in told["offline, a part"]["error"]
    assert "bytes where its header promises" in told["offline, cut"]["error"]
    for name in ("offline", "offline, a part", "offline, cut"):
        assert told[name]["asked"] == 0


def test_a_model_without_a_tokenizer_serves_token_ids_wherever_it_is(told: dict[str, Any]) -> None:
    for name in ("bare folder", "bare", "bare again", "bare, offline", "unsure folder, offline"):
        assert told[name]["tokens"] == told["folder"]["tokens"], told[name]
        assert told[name]["of a text"].startswith("this model has no tokenizer")
    assert told["folder"]["of a text"] == told["whole"]["of a text"] != []
    assert told["bare again"]["asked"] <= told["again"]["asked"]
    assert told["bare, offline"]["asked"] == 0


def test_a_tokenizer_that_is_not_all_there_is_no_model_without_one(told: dict[str, Any]) -> None:
    assert told["half"]["error"].startswith("CheckpointError: ")
    assert "the tokenizer of me/half" in told["half"]["error"]
    said = "the hub's cache does not say whether me/unsure has a tokenizer.json, and HF_HUB_OFFLINE"
    assert said in told["unsure, offline"]["error"]
