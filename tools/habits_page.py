"""Write the tables of docs/coming-from-transformers.md from `jackfield.requests.habits`."""

from __future__ import annotations

import re
from pathlib import Path

from jackfield.requests import habits

PAGE = Path(__file__).parents[1] / "docs/coming-from-transformers.md"


def keywords() -> str:
    rows = ["| in transformers | here |", "|---|---|"]
    for name, habit in sorted(habits.KEYWORDS.items()):
        said = [f"taken as `{habit.ours}`"] if habit.ours and not habit.answer else []
        said += [f"`{theirs}`: `{habit.ours}={ours!r}`" for theirs, ours in habit.values.items()]
        if habit.inert:
            said.append(f"{', '.join(f'`{value!r}`' for value in habit.inert)}: nothing to do")
        said += [habit.answer] if habit.answer else []
        rows.append(f"| `{name}` | {'; '.join(said)} |")
    return "\n".join(rows)


def decodings() -> str:
    rows = ["| in transformers | here |", "|---|---|"]
    rows += [
        f"| `{name}` | chooses `decoding={ours!r}` |" for name, ours in habits.DECODINGS.items()
    ]
    rows += [
        f"| `{name}` | an option of `{ours}`, beside what chooses it |"
        for name, ours in habits.DECODING_OPTIONS.items()
    ]
    return "\n".join(rows)


def values() -> str:
    rows = ["| in transformers | kind | here |", "|---|---|---|"]
    for table, how in ((habits.VALUES, "taken as"), (habits.NAMES, "write")):
        rows += [
            f"| `{theirs}` | {kind} | {how} `'{ours}'` |"
            for kind, names in table.items()
            for theirs, ours in names.items()
        ]
    return "\n".join(rows)


def main() -> None:
    text = PAGE.read_text()
    for name, table in (("keywords", keywords()), ("decodings", decodings()), ("values", values())):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = re.sub(
            f"{begin}.*?{end}",
            lambda _, t=table, b=begin, e=end: f"{b}\n\n{t}\n\n{e}",
            text,
            flags=re.S,
        )
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
