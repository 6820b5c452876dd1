"""The sampler: the next token of each row, each by its own request's settings, vectorized.

A sequence that is fed drafts has one row for each of them and one more: row j asks what follows
its tokens and its first j drafts. So one call says what plain decoding would have said at every
position for which the drafts hold, and verifying them is comparing (`Sampler.sample`).

The order of the stages and what each one does follow transformers' logits processors (bias,
penalties, minimum length, temperature, top-k, top-p, min-p); presence and frequency penalties
follow the OpenAI API (new tokens only). Random numbers are keyed by (seed, sample, position), so
neither batch-mates nor drafts change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import accumulate

import torch

from jackfield.contracts import Accepted, Sequence, Settings, StepBlock, TokenLogprob
from jackfield.contracts.counter_rng import uniform
from jackfield.sampling.fenced import OwnFailure, processed
from jackfield.sampling.structured import unpacked

NEVER = -math.inf
_COLDEST = float(torch.finfo(torch.float32).tiny)


class Sampler:
    """Chooses tokens for sequences. Keeps the tensors of the current batch between steps."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._block: StepBlock | None = None
        self._expected: Seq[Seq[int]] | None = None  # the drafts that the batch is spread for

    def block(self, device: torch.device) -> StepBlock:
        """By what the numbers of a step go to `device`."""
        if self._block is None or self._block.device != device:
            self._block, self._batch, self._expected = StepBlock(device), None, None
        return self._block

    @property
    def sends(self) -> bool:
        """Whether anything is won by `expect`: not before the first batch, and not on a CPU."""
        return self._batch is not None and self._batch.block.stages

    def expect(self, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> None:
        """Send what the next `sample` of these needs, before its logits are computed.

        Nothing before the first call of `sample`, which tells the device and the vocabulary.
        """
        batch = self._batch
        if batch is None or not sequences:
            return
        if not batch.fits(sequences):
            batch = self._batch = Batch(sequences, batch.like, batch.block)
        batch.spread(drafts)
        batch.block.send()
        self._expected = drafts

    def sample(
        self,
        sequences: Seq[Sequence],
        logits: torch.Tensor,
        drafts: Seq[Seq[int]] | None = None,
        allowed: torch.Tensor | None = None,
    ) -> list[Accepted]:
        """What each sequence gains: its next token, and after each draft that was right, another.

        `logits` is `[rows, vocab]` and may be modified: `1 + len(drafts[i])` rows in a row for
        sequence i. `allowed` has the bits of the tokens that may come (int32 `[rows, words]`), for
        the rows of the sequences with a constraint only. One device-to-host copy, and one for each
        draft of a request with processors of its own.
        """
        batch = self.batch_of(sequences, logits)
        if self._expected is None or self._expected != drafts:
            batch.spread(drafts)
        self._expected = None
        batch.confine(allowed)
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
        gains = [batch.gain(i, rows) for i in range(len(sequences))]
        batch.record([gain.tokens for gain in gains])
        return gains

    def batch_of(self, sequences: Seq[Sequence], logits: torch.Tensor) -> Batch:
        """The tensors of these sequences, made anew where they are not those of the last step."""
        block, batch = self.block(logits.device), self._batch
        like = batch is not None and batch.vocab_size == logits.shape[-1]
        if batch is None or not like or not batch.fits(sequences):
            batch = self._batch = Batch(sequences, logits, block)
            self._expected = None
        return batch


def _widest(device: torch.device) -> torch.dtype:
    """The widest float of a device; MPS has no float64 (float32 holds token ids up to 2²⁴)."""
    return torch.float32 if device.type == "mps" else torch.float64


def _precise(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _impossible(best: float) -> str | None:
    """Why no token can be chosen from a row with this best score; None: one can."""
    if math.isfinite(best):
        return None
    what = "its settings forbid every token" if best == NEVER else "the logits are not numbers"
    return f"no token can be chosen: {what}"


def _logprob(settings: Settings, row: list[float], wanted: int) -> TokenLogprob:
    """`row` is [token, its row's best score, its log-probability, top ids…, top logprobs…]."""
    ids, values = row[3 : 3 + wanted], row[3 + wanted :]
    top = tuple((int(i), v) for i, v in zip(ids, values, strict=True))[: settings.logprobs]
    return TokenLogprob(int(row[0]), row[2], top)


class Batch:
    """The settings of some sequences as tensors; valid while they grow by what `record` is told.

    What is per sequence stays from step to step. `spread` says which rows a step has.
    """

    def __init__(
        self, sequences: Seq[Sequence], logits: torch.Tensor, block: StepBlock | None = None
    ) -> None:
        self.sequences = list(sequences)
        self.like = logits.new_empty(0, logits.shape[-1])  # what is expected of more
        self.device = logits.device
        self.block = block or StepBlock(self.device)
        self.vocab_size = logits.shape[-1]
        self.lengths = [len(s.tokens) for s in sequences]
        every = [s.settings for s in sequences]
        self.samples = any(s.do_sample for s in every)
        counts = [s.logprobs for s in every if s.logprobs is not None]
        self.most_logprobs = max(counts) if counts else None
        self.short = any(s.num_new < s.settings.min_new_tokens for s in sequences)
        self.bias = self._single_token_bias()
        self.phrases = [
            (i, ids, value)
            for i, s in enumerate(every)
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
        self.processed_by = [i for i, s in enumerate(every) if s.logits_processor]
        self.spread(None)
        self.confine(None)

    def _column(self, values: Seq[float], inert: float | None = None) -> torch.Tensor | None:
        """`[sequences, 1]`, or None where none asks for anything."""
        if all(v == inert for v in values):
            return None
        # Not torch's default dtype, which is whatever a process has set it to.
        dtype = torch.float32 if any(isinstance(v, float) for v in values) else None
        return self.block.put(values, dtype)[:, None]

    def _single_token_bias(self) -> torch.Tensor | None:
        entries = [
            (i, ids[0], value)
            for i, sequence in enumerate(self.sequences)
            for ids, value in sequence.settings.sequence_bias.items()
            if len(ids) == 1
        ]
        if not entries:
            return None
        places = self._places([(i, token) for i, token, _ in entries])
        values = self.block.put([value for *_, value in entries], torch.float32)
        self.block.send()
        shape = (len(self.sequences), self.vocab_size)
        bias = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return bias.index_put_(places, values)

    def _places(self, pairs: Seq[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and tokens, to index by; put into the block, which is to be sent."""
        both = self.block.put(list(zip(*pairs, strict=True)))
        return both[0], both[1]

    def _history(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which tokens each has seen (prompt too), and how often it generated each one."""
        shape = (len(self.sequences), self.vocab_size)
        seen = counts = None
        if self.repetition is not None:
            places = self._texts([s.tokens for s in self.sequences])
            seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            seen.index_put_(places, seen.new_ones(()))
        if self.presence is not None or self.frequency is not None:
            counts = torch.zeros(shape, dtype=torch.float32, device=self.device)
            places = self._texts([s.new_tokens for s in self.sequences])
            counts.index_put_(places, counts.new_ones(()), accumulate=True)
        return seen, counts

    def _texts(self, texts: Seq[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and tokens of all of these."""
        rows = [row for row, text in enumerate(texts) for _ in range(len(text))]
        every = self.block.put([rows, [token for text in texts for token in text]], torch.long)
        self.block.send()
        return every[0], every[1]

    def fits(self, sequences: Seq[Sequence]) -> bool:
        """Whether these are the sequences, and the lengths, that the tensors stand for."""
        return (
            len(sequences) == len(self.sequences)
            and all(a is b for a, b in zip(sequences, self.sequences, strict=True))
            and self.lengths == [len(s.tokens) for s in sequences]
        )

    def spread(self, drafts: Seq[Seq[int]] | None, depths: Seq[Seq[int]] | None = None) -> None:
        """The rows of the next call: sequence i after its first j drafts, for j in `depths[i]`.

        Without `depths` every j, from none of its drafts to all. Without `drafts` one row each.
        """
        self.failures: dict[int, str] = {}  # row -> what a request's own processor did wrong there
        self.reached: dict[int, int] = {}  # sequence -> as many of its drafts may be kept at most
        count = len(self.sequences)
        self.drafts: Seq[Seq[int]] = drafts or [()] * count
        if depths is None:
            depths = [range(1 + len(own)) for own in self.drafts]
        self.rows = [(i, depth) for i, own in enumerate(depths) for depth in own]
        self.first = [0, *accumulate(map(len, depths))]  # the first row of each sequence
        one_each = len(self.rows) == count and all(len(own) == 1 for own in depths)
        owners = [i for i, _ in self.rows]
        self._owner = None if one_each else self.block.put(owners)
        self._draws = self._drawn() if self.samples else None
        self._behind = self._drafted()
        self._too_early = self._early()

    def _drawn(self) -> torch.Tensor:
        """The random number of each row, `[rows, 1]`."""
        numbers = [
            [uniform(s.settings.seed, s.sample, len(s.tokens) + depth)]
            for s, depth in ((self.sequences[i], depth) for i, depth in self.rows)
        ]
        return self.block.put(numbers, _widest(self.device))

    def _drafted(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows and the drafts before them, where there are penalties for those."""
        if self.seen is None and self.counts is None:
            return None
        pairs = [
            (row, token)
            for row, (i, depth) in enumerate(self.rows)
            for token in self.drafts[i][:depth]
        ]
        return self._places(pairs) if pairs else None

    def _early(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows that are too short to end, each with the tokens that would end it."""
        if not self.short:
            return None
        every = [(row, self.sequences[i], depth) for row, (i, depth) in enumerate(self.rows)]
        pairs = [
            (row, token)
            for row, s, depth in every
            if s.num_new + depth < s.settings.min_new_tokens
            for token in s.settings.eos_token_ids
        ]
        return self._places(pairs) if pairs else None

    def confine(self, allowed: torch.Tensor | None) -> None:
        """The tokens that the rows of sequences with a constraint are left with."""
        self.forbidden: torch.Tensor | None = None
        if allowed is not None:
            bits = self.block.put(allowed)
            own = [s.settings.structure is not None for s in self.sequences]
            rows = [r for r, (i, _) in enumerate(self.rows) if own[i]]
            at = self.block.put(rows) if len(rows) < len(self.rows) else None
            self.block.send()
            found = ~unpacked(bits, self.vocab_size)
            if at is None:
                self.forbidden = found
                return
            self.forbidden = found.new_zeros(len(self.rows), self.vocab_size)
            self.forbidden.index_copy_(0, at, found)

    def _by_row(self, of_sequences: torch.Tensor) -> torch.Tensor:
        return of_sequences if self._owner is None else of_sequences.index_select(0, self._owner)

    def _tail(self, row: int, count: int) -> list[int]:
        """The last `count` tokens before what `row` asks for."""
        i, depth = self.rows[row]
        return [*self.sequences[i].tokens[-count:], *self.drafts[i][:depth]][-count:]

    def gain(self, i: int, rows: list[list[float]]) -> Accepted:
        """What sequence i gains by the chosen rows: `rows[r][0]` is the token, [1] the best score.

        A failure after a draft is met again where the token before it is the last one, in the next
        step, and counts there.
        """
        sequence, wanted = self.sequences[i], self.most_logprobs
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for row in range(self.first[i], self.first[i + 1]):
            _, depth = self.rows[row]
            error = self.failures.get(row) or _impossible(rows[row][1])
            if error is not None:
                return Accepted(tuple(tokens), tuple(logprobs), None if depth else error)
            tokens.append(int(rows[row][0]))
            if sequence.settings.logprobs is not None and wanted is not None:
                logprobs.append(_logprob(sequence.settings, rows[row], wanted))
            most = self.reached.get(i, len(self.drafts[i]))
            if depth >= most or self.drafts[i][depth] != tokens[-1]:
                break
        return Accepted(tuple(tokens), tuple(logprobs))

    def record(self, gained: Seq[Seq[int]]) -> None:
        """The sequences grow by these tokens."""
        self.lengths = [n + len(new) for n, new in zip(self.lengths, gained, strict=True)]
        pairs = [(i, token) for i, new in enumerate(gained) for token in new]
        if pairs and (self.seen is not None or self.counts is not None):
            places = self._places(pairs)
            self.block.send()
            if self.seen is not None:
                self.seen.index_put_(places, self.seen.new_ones(()))
            if self.counts is not None:
                self.counts.index_put_(places, self.counts.new_ones(()), accumulate=True)
        if self.short:
            self.short = any(
                n - s.prompt_length < s.settings.min_new_tokens
                for n, s in zip(self.lengths, self.sequences, strict=True)
            )

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `[rows]`, and the best processed score of each row, NaN if any score is."""
        return self._chosen(self.processed(logits), slice(None))

    def _chosen(self, scores: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        if self.forbidden is not None:
            scores = scores.masked_fill(self.forbidden[rows], NEVER)
        best, tokens = scores.max(-1)
        if self.samples and self.do_sample is not None:
            drawn = self._draw(self.warped(scores, rows), rows)
            tokens = torch.where(self._by_row(self.do_sample)[rows, 0], drawn, tokens)
        return tokens, best

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores that greedy rows take the best of.

        Bias, penalties, minimum length, then the request's own processors.
        """
        self.block.send()
        scores = self._apply_bias(_precise(logits))
        scores = self._forbid_early_end(self._apply_penalties(scores))
        return self._apply_processors(scores)

    def _apply_bias(self, scores: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            scores = scores + self._by_row(self.bias)
        if self.phrases:
            scores = scores.clone()
        for i, ids, value in self.phrases:
            for row in range(self.first[i], self.first[i + 1]):
                if self._tail(row, len(ids) - 1) == list(ids[:-1]):
                    scores[row, ids[-1]] += value
        return scores

    def _apply_penalties(self, scores: torch.Tensor) -> torch.Tensor:
        seen, counts = self._histories()
        if seen is not None and self.repetition is not None:
            penalty = self._by_row(self.repetition)
            scaled = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(seen, scaled, scores)
        if counts is not None and self.frequency is not None:
            scores = scores - counts * self._by_row(self.frequency)
        if counts is not None and self.presence is not None:
            scores = scores - (counts > 0) * self._by_row(self.presence)
        return scores

    def _histories(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`seen` and `counts` of each row: its sequence's, and the drafts before it."""
        seen, counts = (None if h is None else self._by_row(h) for h in (self.seen, self.counts))
        if self._behind is not None:
            if seen is not None:
                seen = seen.index_put(self._behind, seen.new_ones(()))
            if counts is not None:
                counts = counts.index_put(self._behind, counts.new_ones(()), accumulate=True)
        return seen, counts

    def _forbid_early_end(self, scores: torch.Tensor) -> torch.Tensor:
        if self._too_early is None:
            return scores
        return scores.index_put(self._too_early, scores.new_full((), NEVER))

    def _apply_processors(self, scores: torch.Tensor) -> torch.Tensor:
        """A processor sees its own row alone; one that fails ends its own request alone.

        It is asked about nothing that plain decoding would not have asked it, as it may have a
        memory: position by position, as long as the drafts hold.
        """
        if not self.processed_by:
            return scores
        scores = scores.clone()
        for i in self.processed_by:
            for row in range(self.first[i], self.first[i + 1]):
                _, depth = self.rows[row]
                self.reached[i] = depth
                if not self._process(row, scores) or depth == len(self.drafts[i]):
                    break
                tokens, _ = self._chosen(scores[row : row + 1], slice(row, row + 1))
                if int(tokens) != self.drafts[i][depth]:
                    break
        return scores

    def _process(self, row: int, scores: torch.Tensor) -> bool:
        """Apply the processors of its request to a row of `scores`; False where one fails."""
        i, depth = self.rows[row]
        sequence = self.sequences[i]
        ids = self.block.put([[*sequence.tokens, *self.drafts[i][:depth]]])
        self.block.send()
        own = sequence.settings.logits_processor
        try:
            scores[row] = processed(sequence.id, own, ids, scores[row : row + 1])[0]
        except OwnFailure as failure:
            self.failures[row] = str(failure)
            return False
        return True

    def warped(self, scores: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Temperature, top-k, top-p, min-p: what sampled `rows` draw from. The best stays."""
        if self.temperature is not None:
            # Relative to the best score, a tiny temperature tends to greedy instead of inf - inf.
            relative = scores - scores.max(-1, keepdim=True).values
            scores = relative / self._by_row(self.temperature)[rows]
        return self.narrowed(scores, rows)

    def narrowed(self, scores: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Top-k, top-p, min-p. The best stays."""
        if self.top_k is not None:
            largest = scores.topk(self.most_kept, -1).values
            least = largest.gather(1, self._by_row(self.top_k)[rows] - 1)
            scores = scores.masked_fill(scores < least, NEVER)
        if self.top_p is not None:
            ordered, order = scores.sort(-1)
            drop = ordered.softmax(-1).cumsum(-1) <= 1 - self._by_row(self.top_p)[rows]
            drop[:, -1] = False
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), NEVER)
        if self.min_p is not None:
            probabilities = scores.softmax(-1)
            best = probabilities.max(-1, keepdim=True).values
            floor = self._by_row(self.min_p)[rows] * best
            scores = scores.masked_fill(probabilities < floor, NEVER)
        return scores

    def _draw(self, scores: torch.Tensor, rows: slice) -> torch.Tensor:
        """Invert the cumulative distribution at each row's random number, in float64."""
        wide = _widest(self.device)
        cumulative = scores.to(wide).softmax(-1).cumsum(-1)
        assert self._draws is not None
        draws = self._draws[rows]
        found = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        return found[:, 0].clamp(max=self.vocab_size - 1)
