"""The field `adapter` of a request: one of the model's own adapters, beside requests without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import jackfield
from jackfield.bridge.adapters import hushed
from jackfield.demo import MODEL_PATH

peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
PROMPT = "Once upon a time"


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], lora_alpha=200,
            init_lora_weights=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
        peft.get_peft_model(model, config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_request_names_its_adapter(adapter: str, serve: Callable[..., Any]) -> None:
    with jackfield.load("demo", adapters={"law": adapter}) as engine:
        wanted = [
            engine.generate(PROMPT, max_new_tokens=9, **more)[0].text
            for more in ({"adapter": "law"}, {})
        ]
    assert wanted[0] != wanted[1]
    server = serve(models={"demo": {"model": "demo", "adapters": {"law": adapter}}})

    def ask(**more: Any) -> httpx.Response:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, **more}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    for more, text in zip(({"adapter": "law"}, {}), wanted, strict=True):
        said = ask(**more, include_report=True).json()
        assert said["choices"][0]["text"] == text
        assert bool(said["jackfield"]["reports"][0].get("adapter")) is bool(more)
    refused = ask(adapter="la")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "adapter"
    assert "adapter='la' is not loaded (loaded: law); did you mean 'law'?" in refused.text
    other = ask(lora_name="law")
    assert other.status_code == 400
    assert "write adapter" in other.text
