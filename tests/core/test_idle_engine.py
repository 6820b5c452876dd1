"""An engine in which nothing runs holds nothing of what ran: no sequence, no prompt."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from families import build, character_tokenizer, prompts

import jackfield
from jackfield.engine.sequences import RunningSequence
from jackfield.errors import JackfieldError

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2},
    "several": {"do_sample": True, "num_return_sequences": 2, "seed": 3},
    "log-probabilities": {"logprobs": 3},
    "a structure": {"regex": "[a-z]+"},
    "processors": {"logits_processor": [lambda ids, scores: scores]},
    "drafts": {"decoding": "drafts"},
    "beams": {"decoding": "beam", "num_beams": 2},
}


class Living:
    """How many sequences there are that were made since."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        made = RunningSequence.__init__

        def counted(one: Any, *given: Any, **more: Any) -> None:
            self.count += 1
            made(one, *given, **more)

        def ended(_: Any) -> None:
            self.count -= 1

        patch.setattr(RunningSequence, "__init__", counted)
        patch.setattr(RunningSequence, "__del__", ended, raising=False)

    def gone(self) -> bool:
        """Within a moment: the loop's thread may still be at the end of its step."""
        end = time.monotonic() + 1
        while self.count and time.monotonic() < end:
            time.sleep(0.01)
        if self.count:
            gc.collect()
        return not self.count


@pytest.mark.parametrize("cache", ["dynamic", "paged"])
def test_nothing_is_left_of_what_ran(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its thread waits for ever, as on a GPU, and ends on nobody's behalf."""
    monkeypatch.setattr("jackfield.engine.assembly.linger_on", lambda device: None)
    living = Living(monkeypatch)
    strategies = {"plain": "sample", "drafts": "prompt_lookup", "beam": "beam"}
    model, tokenizer = build("llama"), character_tokenizer()
    how: dict[str, Any] = {"cache_implementation": cache, "decoding": strategies}
    with jackfield.load(model, tokenizer=tokenizer, **how) as engine:
        for name, settings in REQUESTS.items():
            done = engine.generate(prompts((5, 3)), max_new_tokens=4, **settings)
            assert all(one.token_ids for one in done), name
            del done
            assert living.gone(), name
        request = engine.submit(prompts((5,))[0], max_new_tokens=40)
        engine.cancel(request)
        del request
        assert living.gone(), "cancelled"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._loop, "forward", _broken)
            with pytest.raises(JackfieldError):
                engine.generate([5, 6], max_new_tokens=4)
        assert living.gone(), "failed"


def _broken(_: Any) -> Any:
    raise RuntimeError("broken")
