"""Write the tables of docs/large-deployment.md.

    PYTHONPATH=tools python -m fleet [NAME …]

Takes some minutes. The prose around the tables is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from transformers import LlamaConfig

from fleet import scenarios
from fleet.speed import Speed

PAGE = Path(__file__).parents[2] / "docs" / "large-deployment.md"
TABLES = {
    "load": scenarios.load, "routing": scenarios.routing_cost, "upgrades": scenarios.upgrades,
    "poison": scenarios.poison,
}  # fmt: skip


def model() -> LlamaConfig:
    """A Llama of 70 billion numbers."""
    return LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672, vocab_size=128256, max_position_embeddings=131072,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def main() -> None:
    """Run what is named, or all."""
    speed = Speed.of(model(), device="h200", tp_size=2)
    print(speed)
    for name in sys.argv[1:] or TABLES:
        head, rows = TABLES[name](speed, scenarios.Scale())
        lines = [_line(head), _line(["---"] * len(head))]
        print(*lines, sep="\n")
        for row in rows:
            print(_line(row), flush=True)
            lines.append(_line(row))
        _put(name, "\n".join(lines))


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _put(name: str, table: str) -> None:
    """Between the two comments of the page that name it."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = PAGE.read_text()
    found = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{table}\n\n{end}", text, flags=re.S)
    if begin not in text:
        raise SystemExit(f"{PAGE} has no place for {name}: {begin} … {end}")
    PAGE.write_text(found)


if __name__ == "__main__":
    main()
