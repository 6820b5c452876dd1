"""Requests of an encoder-decoder model that join those that run, and such that wait.

    python tests/benchmarks/joining_against_waiting.py [t5 | marian] [--requests 64] [--rows 16]

Random weights of T5-small's and of a Marian translation model's shapes, float32; prompts of 8 to 64
tokens, answers of 8 to 96, all asked for at once, so many at a time as there are rows. Engines and
padded batches of `generate` run in turn in one process. A row says tokens a second, and after how
long answers were there; medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig, PreTrainedModel, T5Config

import jackfield

CONFIGS = {
    "t5": T5Config(decoder_start_token_id=0, eos_token_id=None),
    "marian": MarianConfig(
        vocab_size=58101, d_model=512, encoder_layers=6, decoder_layers=6,
        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
        decoder_ffn_dim=2048, decoder_start_token_id=58100, pad_token_id=58100, eos_token_id=None,
        forced_eos_token_id=None, bad_words_ids=None,
    ),
}  # fmt: skip
Asked = list[tuple[list[int], int]]
Timed = tuple[float, list[float], list[list[int]]]  # seconds, of each answer, answers


def asked(count: int) -> Asked:
    draw = random.Random(1)
    return [
        ([draw.randrange(5, 30000) for _ in range(draw.randint(8, 64))], draw.randint(8, 96))
        for _ in range(count)
    ]


def of_engine(model: PreTrainedModel, rows: int, load: Asked) -> Timed:
    with jackfield.load(model, max_batch_size=rows, cache_implementation="dynamic") as engine:
        engine.generate(load[0][0], max_new_tokens=4)
        begin = time.perf_counter()
        requests = [engine.submit(ids, max_new_tokens=new, min_new_tokens=new) for ids, new in load]
        found = [request.result() for request in requests]
        whole = time.perf_counter() - begin
    return whole, [one.usage.seconds for one in found], [one.token_ids for one in found]


def waiting(model: PreTrainedModel, rows: int, load: Asked) -> Timed:
    with patch("jackfield.engine.layouts._join", return_value=False):
        return of_engine(model, rows, load)


def generate(model: PreTrainedModel, rows: int, load: Asked) -> Timed:
    begin, took, found = time.perf_counter(), [], []
    for at in range(0, len(load), rows):
        part = load[at : at + rows]
        longest = max(len(ids) for ids, _ in part)
        ids = torch.tensor([[*own, *[0] * (longest - len(own))] for own, _ in part])
        mask = torch.tensor([[1] * len(own) + [0] * (longest - len(own)) for own, _ in part])
        new = max(count for _, count in part)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        took += [time.perf_counter() - begin] * len(part)
        found += [row[1 : 1 + count].tolist() for row, (_, count) in zip(out, part, strict=True)]
    return time.perf_counter() - begin, took, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=CONFIGS, nargs="?", default="t5")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[given.model]).eval()
    load = asked(given.requests)
    tokens = sum(new for _, new in load)
    runs: dict[str, Callable[[PreTrainedModel, int, Asked], Timed]] = {
        "joining": of_engine, "waiting": waiting, "generate": generate,
    }  # fmt: skip
    times: dict[str, list[Timed]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            times[name].append(run(model, given.rows, load))
    own = times["joining"][0][2]
    for name, found in times.items():
        rate = statistics.median(tokens / whole for whole, *_ in found)
        mean = statistics.median(statistics.mean(took) for _, took, _ in found)
        same = sum(a == b for a, b in zip(own, found[0][2], strict=True))
        print(f"| {given.model} | {name} | {rate:.0f} | {mean:.2f} | {same} of {len(load)} |")


if __name__ == "__main__":
    main()
