"""How surprised a model is by a text: through the engine's own forward, cache and attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.errors import CacheFullError, PromptError, SettingsError, UsageError

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text
    from jackfield.engine.engine import Engine

#: Tokens that a window has at most where nobody says how many, and that a step feeds of it: there
#: are logits for each of them.
WINDOW = 2048
_CHUNK = 256


@dataclass(frozen=True)
class Perplexity:
    """Of a text: `tokens` of it were scored, each once. `nll` is the sum of theirs, in nats."""

    tokens: int
    nll: float
    window: int
    stride: int
    seconds: float

    @property
    def value(self) -> float:
        """exp of the mean over all tokens; infinite where that is beyond a float."""
        mean = self.nll / self.tokens
        return math.inf if mean > 700 else math.exp(mean)

    def to_dict(self) -> dict[str, Any]:
        return {
            "perplexity": self.value,
            "tokens": self.tokens,
            "nll": self.nll,
            "window": self.window,
            "stride": self.stride,
            "seconds": round(self.seconds, 6),
        }


def perplexity(
    engine: Engine,
    text: str | Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Perplexity:
    """The perplexity of a text, or of token ids, under the engine's model.

    The text is read in windows of `window` tokens (None: the model's context, at most 2048), each
    `stride` further on (None: half a window). Of a window only those tokens are scored that no
    window before it has scored, so all but the text's first token count once, and all but those of
    the first window have `window - stride` tokens or more before them. `progress` is called with
    the number of tokens scored since its last call.

    Runs on the caller's thread; the engine must have nothing else to do. Raises PromptError for a
    text of fewer than two tokens, SettingsError for a window or a stride that cannot be, UsageError
    where requests are running or an encoder reads prompts.
    """
    ids = check_text(engine._assembly.text, text)
    window, stride = _sizes(engine, window, stride)
    started, nll, scored = time.perf_counter(), 0.0, 1
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        fresh = end - scored
        nll -= math.fsum(token_logprobs(engine, ids[begin:end])[-fresh:])
        scored = end
        progress(fresh)
        if end == len(ids):
            break
    return Perplexity(len(ids) - 1, nll, window, stride, time.perf_counter() - started)


def check_text(tokens: Text, text: str | Sequence[int]) -> list[int]:
    """The token ids of a text that can be scored. Raises PromptError."""
    from jackfield.bridge.quiet import quiet

    with quiet():  # that a text is longer than the context is no news here
        ids = tokens.encode(text if isinstance(text, str) else list(text))
    if len(ids) < 2:
        raise PromptError("a perplexity needs a text of at least two tokens")
    return ids


def _sizes(engine: Engine, window: int | None, stride: int | None) -> tuple[int, int]:
    context = engine.plan.requirements.context_length
    if window is None:
        window = min(context or WINDOW, WINDOW)
    if not 2 <= window <= (context or window):
        raise SettingsError(f"the window must be from 2 to {context} tokens, not {window}")
    stride = window // 2 if stride is None else stride
    if not 1 <= stride < window:
        raise SettingsError(f"the stride must be from 1 to {window - 1} tokens, not {stride}")
    return window, stride


def token_logprobs(engine: Engine, ids: Sequence[int]) -> list[float]:
    """The log-probability of each token of `ids` but the first, given those before it.

    Tokens are fed as if they were drafts to be verified, so there are logits for all of them.
    Raises UsageError where requests are running or an encoder reads prompts, CacheFullError where
    the cache is too small.
    """
    if engine.closed:
        raise UsageError("the engine is closed; load the model again")
    if encoder := engine.plan.requirements.encoder:
        raise UsageError(f"{encoder}, and a text alone is scored by decoders; give a decoder")
    found: list[float] = []
    engine._worker.while_idle(lambda: found.extend(_scored(engine, ids)))
    return found


def _scored(engine: Engine, ids: Sequence[int]) -> list[float]:
    """The same, while no request can begin."""
    import torch

    cache, forward = engine._loop.cache, engine._loop.forward
    sequence = engine._intake.sequence(
        list(ids[:1]), {"max_new_tokens": len(ids) - 1}, streams=False
    )
    found: list[float] = []
    with torch.inference_mode():
        try:
            cache.admit(sequence)
            for step in _chunks(engine, sequence, ids):
                if not cache.fits(step):
                    raise CacheFullError(
                        f"the cache is too small for a window of {len(ids)} tokens; choose a "
                        "shorter one"
                    )
                (item,) = step.scheduled
                logits = forward(cache.prepare(step))[0]
                fed = 1 + len(item.drafts)
                wanted = torch.tensor(ids[item.start + 1 : item.start + fed + 1])
                exact = logits[-fed:] if logits.dtype == torch.float64 else logits[-fed:].float()
                rows = exact.log_softmax(-1)
                picked = rows.gather(1, wanted.to(rows.device)[:, None])
                found += picked[:, 0].tolist()
                cache.commit(step, [fed])
        finally:
            cache.release([sequence])
    return found


def _chunks(engine: Engine, sequence: Any, ids: Sequence[int]) -> Any:
    """The steps that feed all of `ids` but the last token, which nothing follows."""
    from jackfield.contracts import ScheduledSequence, Step

    needs, most = engine.plan.requirements, engine._loop.limits.max_chunk_size
    last = len(ids) - 1
    size = last if needs.whole_prompt else min(last, _CHUNK, most or _CHUNK)
    for start in range(0, last, size):
        sequence.tokens = list(ids[: start + 1])
        yield Step(
            [ScheduledSequence(sequence, start, 1, list(ids[start + 1 : min(start + size, last)]))]
        )
