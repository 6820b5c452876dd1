"""Libraries of quantizers print nothing, and are not imported before they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import extras
import pytest

if TYPE_CHECKING:
    from forking import Forks

OURS = "· 4 tokens, "


def generate(selection: str) -> tuple[str, ...]:
    """The arguments of a Python that generates with this quantizer."""
    asked = ("--quantization", selection, "--max-new-tokens", "4")
    return ("-m", "jackfield", "generate", *asked, "Once upon")


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where no test has imported or silenced anything."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("selection", "library"),
    [
        # What transformers imports whatever is asked for: heard by test_a_whole_process as well.
        pytest.param("none", "torchao", marks=pytest.mark.long),
        ("bnb-4bit", "bitsandbytes"),
        pytest.param("bnb-8bit", "bitsandbytes", marks=pytest.mark.long),
        pytest.param("torchao", "torchao", marks=pytest.mark.long),
        ("torchao?type=int4-weight-only", "torchao"),
    ],
)
def test_only_our_own_line_is_on_the_console(selection: str, library: str, forks: Forks) -> None:
    """What transformers itself imports is heard in the first; a fork has that behind it."""
    extras.needs(library)
    done = (fresh if selection == "none" else forks.python)(*generate(selection))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert OURS in line
    assert done.stdout


@extras.marked("gptqmodel")
@pytest.mark.long
def test_gptq_is_quiet_too(tmp_path: Path, forks: Forks) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox.\n" * 40)
    done = forks.python(*generate(f"gptq?samples=1&calibration={text}"))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert OURS in line


def test_modules_of_quantizers_import_without_torch() -> None:
    code = (
        "import sys\n"
        "from jackfield_plugins.quantizer import bnb_4bit, bnb_8bit, gptq, torchao, transformers\n"
        "heavy = {'torch', 'transformers', 'bitsandbytes', 'gptqmodel', 'optimum', 'accelerate'}\n"
        "found = sorted(heavy & set(sys.modules))\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@extras.marked("bitsandbytes")
def test_bitsandbytes_fetches_no_kernel(forks: Forks) -> None:
    code = (
        "import sys, types\n"
        "assert 'bitsandbytes' not in sys.modules\n"
        "def fetched(*args, **kwargs): sys.exit('a kernel was fetched')\n"
        "trap = types.ModuleType('kernels')\n"
        "trap.get_kernel = fetched\n"
        "sys.modules['kernels'] = trap\n"
        "from jackfield_plugins.quantizer.libraries import import_bitsandbytes\n"
        "import_bitsandbytes()\n"
        "assert 'bitsandbytes' in sys.modules\n"
        "assert sys.modules['kernels'] is trap\n"
    )
    done = forks.python("-c", code)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
