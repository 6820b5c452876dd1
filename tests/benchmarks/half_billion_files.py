"""The half-billion model of the tables and requests, as files for `jackfield bench`.

    python tests/benchmarks/half_billion_files.py FOLDER

With random weights: a transformers model in bfloat16 (`bf16`), GGUF files of it by llama.cpp's own
tool, and requests of tokens: `ROWS-rows.jsonl`, prompts of 8 and 64 new ones, and
`prompt-TOKENS.jsonl`, one prompt and 4 new ones.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from llama_cpp_engine import convert, quantize
from workload import half_billion

KINDS = ("Q4_0", "Q4_K_M", "Q8_0")
ROWS, PROMPTS = (1, 2, 4, 8, 16), (128, 2048)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = half_billion()
    model.save_pretrained(folder / "bf16")
    whole = folder / "F32.gguf"
    convert(model, whole)
    for kind in KINDS:
        quantize(whole, folder / f"{kind}.gguf", kind)
    whole.unlink()
    for rows in ROWS:
        requests(folder / f"{rows}-rows.jsonl", model.config.vocab_size, rows, 8, 64)
    for tokens in PROMPTS:
        requests(folder / f"prompt-{tokens}.jsonl", model.config.vocab_size, 1, tokens, 4)


def requests(path: Path, vocab_size: int, count: int, tokens: int, new: int) -> None:
    chance = random.Random(0)
    lines = [
        {"prompt": [chance.randrange(vocab_size) for _ in range(tokens)], "max_new_tokens": new}
        for _ in range(count)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
