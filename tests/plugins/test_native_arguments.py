"""Whatever hands addresses to native code looks at its tensors first: mutants of every argument.

`pytest -s tests/plugins/test_native_arguments.py` prints the counts.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import extras
import pytest
from native_mutants import ENTRIES

from jackfield_plugins.native import NativeKernel

if TYPE_CHECKING:
    from forking import Forks

ROOT = Path(__file__).parents[2]

#: Whose code takes an address or has ctypes at hand -> the entries that try it, or why none does.
READERS = {
    "plugins/jackfield_plugins/attention/cpu_decode/call.py": ("padded", "packed"),
    "plugins/jackfield_plugins/attention/cpu_decode/prompts.py": ("prompts",),
    "plugins/jackfield_plugins/kernel/cpu_rms_norm/call.py": ("rms norm",),
    "plugins/jackfield_plugins/cache/paged/storing/__init__.py": "by test_native_writes.py",
    "plugins/jackfield_plugins/compiler/native/calls.py": "hands over memory of its own",
    "plugins/jackfield_plugins/compiler/holding.py": "compares addresses",
    "plugins/jackfield_plugins/compiler/native/memory.py": "aligns memory of its own",
    "plugins/jackfield_plugins/native/pages.py": "aligns memory of its own",
    "plugins/jackfield_plugins/compiler/native/linears.py": "of tensors held to their graph",
    "plugins/jackfield_plugins/compiler/native/operators.py": "of tensors held to their graph",
    "plugins/jackfield_plugins/compiler/native/selecting.py": "of tensors held to their graph",
    "plugins/jackfield_plugins/compiler/native/laying.py": "of tensors held to their graph",
    "plugins/jackfield_plugins/compiler/native/program.py": "holds tensors to their graph",
    "plugins/jackfield_plugins/compiler/native/siblings.py": "hands over memory of its own",
    "plugins/jackfield_plugins/quantizer/groupwise/native.py": ("int4", "int8"),
    "plugins/jackfield_plugins/quantizer/gguf/native.py": ("gguf",),
    "plugins/jackfield_plugins/native/arguments.py": "says what is wrong",
    "plugins/jackfield_plugins/native/__init__.py": "loads libraries",
    "plugins/jackfield_plugins/native/compiling.py": "loads libraries",
    "plugins/jackfield_plugins/compiler/cuda_graph/compilation.py": "compares addresses",
    "plugins/jackfield_plugins/compiler/cuda_graph/stretches.py": "compares addresses",
    "plugins/jackfield_plugins/compiler/cuda_graph/whole.py": "compares addresses",
    "plugins/jackfield_plugins/attention/triton/launch.py": "runs on a GPU, by its own tests",
    "plugins/jackfield_plugins/launching.py": "runs on a GPU, by the tests of kernels",
    "plugins/jackfield_plugins/quantizer/groupwise/files.py": "unmaps memory of files",
    "core/jackfield/registry/loading.py": "raises in a thread",
    "core/jackfield/bridge/native_calls.py": "runs the calls that others made",
    "core/jackfield/bridge/native_offers.py": "compares addresses",
    "core/jackfield/registry/contained.py": "writes out what C code has printed",
    "core/jackfield/estimates/measuring.py": "gives memory back",
    "core/jackfield/bridge/footprint.py": "compares addresses",
    "core/jackfield/engine/threads.py": "hands over a number",
    "core/jackfield/engine/checked_packed.py": "compares addresses",
    "core/jackfield/sampling/structured.py": "hands over a tensor that it has just made",
}


def takes_addresses(source: Path) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("data_ptr", "__array_interface__"))
        or (isinstance(node, ast.Import) and any(n.name in ("ctypes", "cffi") for n in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module in ("ctypes", "cffi"))
        for node in ast.walk(ast.parse(source.read_text("utf-8")))
    )


def test_nobody_who_hands_over_addresses_is_left_out() -> None:
    sources = [*ROOT.glob("plugins/**/*.py"), *ROOT.glob("core/**/*.py")]
    kit = ROOT / "core/jackfield/testing"  # which compares addresses, and hands none to anybody
    found = {
        str(path.relative_to(ROOT))
        for path in sources
        if takes_addresses(path)
        and (kit not in path.parents or "ctypes" in path.read_text("utf-8"))
    }
    assert found == set(READERS)
    kinds = [kind for kinds in READERS.values() if isinstance(kinds, tuple) for kind in kinds]
    assert all(any(kind in title for title in ENTRIES) for kind in kinds)
    assert all(any(kind in title for kind in kinds) for title in ENTRIES)


@extras.marked("gguf")
@pytest.mark.skipif(
    bool(NativeKernel("", ROOT, "").cannot_build()), reason="needs a C++ compiler, on Linux"
)
def test_a_tensor_is_read_rightly_or_refused(forks: Forks) -> None:
    program = ROOT / "tests/conformance/native_mutants.py"
    done = forks.python(program)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended at {lines[-2:]}: {done.stderr[-2000:]}"
    tried = [(*lines[at], lines[at + 1]) for at in range(0, len(lines), 2)]
    assert not [mutant for mutant in tried if mutant[-1].startswith("wrong")]
    counts = Counter((title, found.partition(":")[0]) for title, *_, found in tried)
    for (title, found), count in sorted(counts.items()):
        sys.stdout.write(f"{title}: {count} {found}\n")
    for title in ENTRIES:
        assert counts[title, "right"] >= 5, title  # what can be read is read
        assert counts[title, "refused by name"] >= 20, title
    same = [found for *_, what, found in tried if what in ("as it is", "within another")]
    assert set(same) == {"right"}
