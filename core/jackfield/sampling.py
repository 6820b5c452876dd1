"""The sampler: one token a row, each row by its own settings, vectorized over the batch.

The order of the stages and what each one does follow transformers' logits processors (bias,
penalties, minimum length, temperature, top-k, top-p, min-p); presence and frequency penalties
follow the OpenAI API (new tokens only). Random numbers are keyed by (seed, sample, position) and
drawn on the host, so neither batch-mates nor devices change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from jackfield.contracts import Accepted
from jackfield.sequences import Sequence, TokenLogprob
from jackfield.settings import Settings

_MASK = (1 << 64) - 1
NEVER = -math.inf
_COLDEST = float(torch.finfo(torch.float32).tiny)


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) from a key: three rounds of splitmix64 (Steele, Lea, Flood 2014)."""
    state = 0
    for word in (seed, sample, position):
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


class Sampler:
    """Chooses the next token of each row. Keeps the tensors of the current batch between steps."""

    def __init__(self) -> None:
        self._batch: _Batch | None = None

    def sample(self, sequences: Seq[Sequence], logits: torch.Tensor) -> list[Accepted]:
        """One token per row of `logits` (`[rows, vocab]`, modified), one device-to-host copy."""
        batch = self._batch
        if batch is None or not batch.fits(sequences):
            batch = self._batch = _Batch(sequences, logits)
        wanted = batch.most_logprobs
        raw = logits if wanted is None else torch.log_softmax(_precise(logits), -1)
        tokens, scores = batch.choose(logits)
        wide = _widest(logits.device)
        columns = [tokens.to(wide), scores.to(wide)]
        if wanted is not None:
            columns.append(raw.gather(1, tokens[:, None])[:, 0].to(wide))
            top = raw.topk(wanted, -1)
            columns += [*top.indices.T.to(wide), *top.values.T.to(wide)]
        rows = torch.stack(columns, 1).tolist()
        batch.record(tokens)
        return [
            Accepted(error=batch.failures[i])
            if i in batch.failures
            else _accepted(sequence.settings, row, wanted)
            for i, (sequence, row) in enumerate(zip(sequences, rows, strict=True))
        ]


def _widest(device: torch.device) -> torch.dtype:
    """The widest float of a device; MPS has no float64 (float32 holds token ids up to 2²⁴)."""
    return torch.float32 if device.type == "mps" else torch.float64


def _precise(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _one_row(found: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What a processor returned; anything that broadcasts would otherwise become a wrong text."""
    if found.shape != (1, scores.shape[1]):
        raise ValueError(f"it must return [1, {scores.shape[1]}] scores, not {list(found.shape)}")
    return found[0]


def _accepted(settings: Settings, row: list[float], wanted: int | None) -> Accepted:
    """`row` is [token, its row's best score, its log-probability, top ids…, top logprobs…]."""
    token, best = int(row[0]), row[1]
    if not math.isfinite(best):
        what = "its settings forbid every token" if best == NEVER else "the logits are not numbers"
        return Accepted(error=f"no token can be chosen: {what}")
    if settings.logprobs is None or wanted is None:
        return Accepted((token,))
    ids, values = row[3 : 3 + wanted], row[3 + wanted :]
    top = tuple((int(i), v) for i, v in zip(ids, values, strict=True))[: settings.logprobs]
    return Accepted((token,), (TokenLogprob(token, row[2], top),))


class _Batch:
    """The settings of some rows as tensors; valid while the rows grow by what `record` is told."""

    def __init__(self, sequences: Seq[Sequence], logits: torch.Tensor) -> None:
        self.sequences = list(sequences)
        self.device = logits.device
        self.vocab_size = logits.shape[-1]
        self.lengths = [len(s.tokens) for s in sequences]
        every = [s.settings for s in sequences]
        self.samples = any(s.do_sample for s in every)
        counts = [s.logprobs for s in every if s.logprobs is not None]
        self.most_logprobs = max(counts) if counts else None
        self.short = any(s.num_new < s.settings.min_new_tokens for s in sequences)
        self.bias = self._single_token_bias()
        self.phrases = [
            (row, ids, value)
            for row, s in enumerate(every)
            for ids, value in s.sequence_bias.items()
            if len(ids) > 1
        ]
        self.do_sample = self._column([s.do_sample for s in every])
        self.temperature = self._column([max(s.temperature, _COLDEST) for s in every], 1.0)
        kept = [min(s.top_k or self.vocab_size, self.vocab_size) for s in every]
        self.most_kept = max(kept)
        self.top_k = self._column(kept, self.vocab_size)
        self.top_p = self._column([s.top_p for s in every], 1.0)
        self.min_p = self._column([s.min_p for s in every], 0.0)
        self.repetition = self._column([s.repetition_penalty for s in every], 1.0)
        self.presence = self._column([s.presence_penalty for s in every], 0.0)
        self.frequency = self._column([s.frequency_penalty for s in every], 0.0)
        self.seen, self.counts = self._history()
        self.processors = [
            (row, processor) for row, s in enumerate(every) for processor in s.logits_processor
        ]
        self.failures: dict[int, str] = {}  # row -> what its own processor did wrong in this step

    def _column(self, values: Seq[float], inert: float | None = None) -> torch.Tensor | None:
        """`[rows, 1]`, or None where no row asks for anything."""
        if all(v == inert for v in values):
            return None
        return torch.tensor(values, device=self.device)[:, None]

    def _single_token_bias(self) -> torch.Tensor | None:
        entries = [
            (row, ids[0], value)
            for row, sequence in enumerate(self.sequences)
            for ids, value in sequence.settings.sequence_bias.items()
            if len(ids) == 1
        ]
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        bias = torch.zeros(len(self.sequences), self.vocab_size, device=self.device)
        bias[list(rows), list(ids)] = torch.tensor(values, device=self.device)
        return bias

    def _history(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which tokens each row has seen (prompt too), and how often it generated each one."""
        shape = (len(self.sequences), self.vocab_size)
        seen = counts = None
        if self.repetition is not None:
            seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            for row, sequence in enumerate(self.sequences):
                seen[row, sequence.tokens] = True
        if self.presence is not None or self.frequency is not None:
            counts = torch.zeros(shape, device=self.device)
            for row, sequence in enumerate(self.sequences):
                new = torch.tensor(sequence.new_tokens, dtype=torch.long, device=self.device)
                counts[row] = torch.bincount(new, minlength=self.vocab_size)
        return seen, counts

    def fits(self, sequences: Seq[Sequence]) -> bool:
        """Whether these are the rows, and the lengths, that the tensors stand for."""
        return (
            len(sequences) == len(self.sequences)
            and all(a is b for a, b in zip(sequences, self.sequences, strict=True))
            and self.lengths == [len(s.tokens) for s in sequences]
        )

    def record(self, tokens: torch.Tensor) -> None:
        """The rows grow by `tokens` (`[rows]`)."""
        self.lengths = [n + 1 for n in self.lengths]
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        if self.counts is not None:
            self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(self.counts[:, :1]))
        if self.short:
            self.short = any(
                n - s.prompt_length < s.settings.min_new_tokens
                for n, s in zip(self.lengths, self.sequences, strict=True)
            )

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `[rows]`, and the best processed score of each row, NaN if any score is."""
        scores = self.processed(logits)
        best, tokens = scores.max(-1)
        if self.samples and self.do_sample is not None:
            drawn = self._draw(self.warped(scores))
            tokens = torch.where(self.do_sample[:, 0], drawn, tokens)
        return tokens, best

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores that greedy rows take the best of.

        Bias, penalties, minimum length, then the request's own processors.
        """
        scores = self._apply_bias(_precise(logits))
        scores = self._forbid_early_end(self._apply_penalties(scores))
        return self._apply_processors(scores)

    def _apply_processors(self, scores: torch.Tensor) -> torch.Tensor:
        """A processor sees its own row alone; one that fails ends its own request alone."""
        if not self.processors:
            return scores
        self.failures = {}
        scores = scores.clone()
        for row, processor in self.processors:
            if row in self.failures:
                continue
            ids = torch.tensor([self.sequences[row].tokens], device=self.device)
            try:
                scores[row] = _one_row(processor(ids, scores[row : row + 1].clone()), scores)
            except Exception as error:  # noqa: BLE001 - a request must not harm another
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.failures[row] = f"its logits_processor failed: {what}"
        return scores

    def _apply_bias(self, scores: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            scores = scores + self.bias
        if self.phrases:
            scores = scores.clone()
        for row, ids, value in self.phrases:
            if self.sequences[row].tokens[1 - len(ids) :] == list(ids[:-1]):
                scores[row, ids[-1]] += value
        return scores

    def _apply_penalties(self, scores: torch.Tensor) -> torch.Tensor:
        if self.seen is not None and self.repetition is not None:
            scaled = torch.where(scores < 0, scores * self.repetition, scores / self.repetition)
            scores = torch.where(self.seen, scaled, scores)
        if self.counts is not None and self.frequency is not None:
            scores = scores - self.counts * self.frequency
        if self.counts is not None and self.presence is not None:
            scores = scores - (self.counts > 0) * self.presence
        return scores

    def _forbid_early_end(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.short:
            return scores
        scores = scores.clone()
        for row, sequence in enumerate(self.sequences):
            if sequence.num_new < sequence.settings.min_new_tokens:
                scores[row, list(sequence.settings.eos_token_ids)] = NEVER
        return scores

    def warped(self, scores: torch.Tensor) -> torch.Tensor:
        """Temperature, top-k, top-p, min-p: what sampled rows draw from. The best stays."""
        if self.temperature is not None:
            # Relative to the best score, a tiny temperature tends to greedy instead of inf - inf.
            scores = (scores - scores.max(-1, keepdim=True).values) / self.temperature
        if self.top_k is not None:
            largest = scores.topk(self.most_kept, -1).values
            scores = scores.masked_fill(scores < largest.gather(1, self.top_k - 1), NEVER)
        if self.top_p is not None:
            ordered, order = scores.sort(-1)
            drop = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            drop[:, -1] = False
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), NEVER)
        if self.min_p is not None:
            probabilities = scores.softmax(-1)
            floor = self.min_p * probabilities.max(-1, keepdim=True).values
            scores = scores.masked_fill(probabilities < floor, NEVER)
        return scores

    def _draw(self, scores: torch.Tensor) -> torch.Tensor:
        """Invert the cumulative distribution at each row's random number, in float64."""
        wide = _widest(self.device)
        cumulative = scores.to(wide).softmax(-1).cumsum(-1)
        numbers = [uniform(s.settings.seed, s.sample, len(s.tokens)) for s in self.sequences]
        draws = torch.tensor(numbers, dtype=wide, device=self.device)[:, None]
        found = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        return found[:, 0].clamp(max=self.vocab_size - 1)
