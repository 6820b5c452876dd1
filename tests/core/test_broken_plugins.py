"""Every way in which a plugin can be broken: it is reported, and it breaks nothing else.

A case is the source of a module, or what to replace in a good one and by what.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from jackfield.spelling import parse

if TYPE_CHECKING:
    from conftest import Site

HOOK = "from jackfield import hookimpl\n@hookimpl\ndef jackfield_attention():\n    "
OPTIONS = "@dataclass(frozen=True)\n    class options:\n        "

IMPORTS = {
    "error": ("import no_such_lib", "import failed: ModuleNotFoundError: .*no_such_lib"),
    "raises": ("1 / 0", "import failed: ZeroDivisionError: division by zero"),
    "exits": ("import sys; sys.exit(3)", "import failed: SystemExit: 3"),
    "interrupts": ("raise KeyboardInterrupt", "import failed: KeyboardInterrupt"),
    "is no Python": ("def broken(:", r"import failed: SyntaxError: .*line 1"),
    "error that cannot be told": (
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        r"import failed: E: \(its text cannot be made\)$",
    ),
    "nonsense in capabilities": (
        ("AttentionCapabilities()", "AttentionCapabilities(features={'soft_cap'})"),
        "import failed: ValueError: unknown feature soft_cap; known: .*softcap",
    ),
}

HOOKS = {
    "misspelt": (
        ("def jackfield_attention", "def jackfield_atention"),
        "no hook 'jackfield_atention'; did you mean 'jackfield_attention'",
    ),
    "unknown argument": (
        ("jackfield_attention()", "jackfield_attention(config)"),
        "hookimpl definition: .*config",
    ),
    "none": ("x = 1", "outside_bad implements no hook: none of jackfield_attention, "),
    "no marker": (("@hookimpl", ""), "marked with @jackfield.hookimpl"),
    "raises": (f"{HOOK}raise OSError('gone')", "jackfield_attention raised OSError: gone"),
    "exits": (f"{HOOK}raise SystemExit", "jackfield_attention raised SystemExit"),
    "gives nothing": (f"{HOOK}return None", "must return a list of backends, got None"),
    "gives no backend": (f"{HOOK}return []", r"returned no backend; .*available\(\)"),
    "gives one": (("[Backend()]", "Backend()"), "must return a list .*Backend object"),
    "gives a class": (("[Backend()]", "[Backend]"), "instances of Attention, got <class"),
    "gives text": (f"{HOOK}return ['sdpa']", "instances of Attention, got 'sdpa'"),
    "gives another kind": (
        ("def jackfield_attention", "def jackfield_cache"),
        "jackfield_cache must return instances of Cache, got .*Backend",
    ),
}

BACKENDS = {
    "kind overridden": (
        ("# more", "kind = 'cache'"),
        "`kind` is 'attention', not 'cache'",
    ),
    "abstract": (("def bind", "def tie"), "attention raised TypeError: .*abstract.*bind"),
    "no name": (("name = 'x'", ""), "`name` must be .*, not None"),
    "name with a space": (("'x'", "'my kernel'"), "`name` must be .*, not 'my kernel'"),
    "name in capitals": (("'x'", "'Mine'"), "`name` must be .*, not 'Mine'"),
    "name with a slash": (("'x'", "'a/b'"), "`name` must be .*, not 'a/b'"),
    "name of an instance": (
        ("# more", "def __init__(self): self.name = 7"),
        "`name` must be .*, not 7",
    ),
    "options not frozen": (
        ("# more", "@dataclass\n    class options:\n        size: int = 1"),
        "`options` must be a frozen dataclass",
    ),
    "options not a class": (
        ("# more", "options = {'size': 1}"),
        "`options` must be a frozen dataclass, not {'size': 1}",
    ),
    "option of an unreadable type": (
        ("# more", f"{OPTIONS}sizes: list[int] | None = None"),
        r"option 'sizes' is of type list\[int\] \| None; options are int",
    ),
    "option of a type that is not there": (
        ("# more", f"{OPTIONS}size: 'Gone' = 1"),
        "types of `options` cannot be read: NameError: .*Gone",
    ),
    "auto with a required option": (
        ("# more", f"auto_rank = 5\n    {OPTIONS}size: int"),
        "`auto_rank` needs options that all have defaults: .*size",
    ),
    "auto_rank is a text": (("# more", "auto_rank = 'high'"), "`auto_rank` must be an int"),
    "no capabilities": (
        ("capabilities = AttentionCapabilities()", ""),
        "`capabilities` must be an AttentionCapabilities",
    ),
    "capabilities of another kind": (
        ("AttentionCapabilities()", "frozenset({'softcap'})"),
        "`capabilities` must be an AttentionCapabilities",
    ),
    "its own check raises": (
        ("# more", "def flaws(self): 1 / 0"),
        "loading outside_bad failed: ZeroDivisionError",
    ),
}

CASES = {
    f"{where}: {name}": case
    for where, cases in (("import", IMPORTS), ("hook", HOOKS), ("backend", BACKENDS))
    for name, case in cases.items()
}


@pytest.mark.parametrize(("fault", "cause"), CASES.values(), ids=list(CASES))
def test_a_broken_plugin_is_reported_and_breaks_nothing(
    site: Site, fault: str | tuple[str, str], cause: str
) -> None:
    good = site.attention("x")
    if isinstance(fault, tuple):
        assert good.count(fault[0]) == 1, fault
        fault = good.replace(*fault)
    site.add("bad", fault)
    site.add("good", site.attention("good"))
    found = site.look()
    bad = site.record(found, "bad")
    assert (bad.entry_point, bad.version, bad.state) == ("bad-ep", "1.5", "failed")
    assert re.search(cause, bad.cause or ""), bad.cause
    assert bad.backends == ()
    assert found.find("attention", parse("good")).distribution == "good"
    site.assert_built_ins_work(found)
