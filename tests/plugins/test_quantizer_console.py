"""Libraries of quantizers print nothing, and are not imported before they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import extras
import pytest

OURS = "· 4 tokens, "


def jackfield_generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where no test has imported or silenced anything."""
    command = [sys.executable, "-m", "jackfield", "generate", *arguments, "Once upon"]
    return subprocess.run(
        [*command, "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("selection", "library"),
    [
        ("none", "torchao"),  # transformers imports it whatever is asked for
        ("bnb-4bit", "bitsandbytes"),
        ("bnb-8bit", "bitsandbytes"),
        ("torchao", "torchao"),
        ("torchao?type=int4-weight-only", "torchao"),
    ],
)
def test_only_our_own_line_is_on_the_console(selection: str, library: str) -> None:
    extras.needs(library)
    done = jackfield_generate("--quantization", selection)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert OURS in line
    assert done.stdout


@extras.marked("gptqmodel")
def test_gptq_is_quiet_too(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox.\n" * 40)
    done = jackfield_generate("--quantization", f"gptq?samples=1&calibration={text}")
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
def test_bitsandbytes_fetches_no_kernel() -> None:
    code = (
        "import sys, types\n"
        "def fetched(*args, **kwargs): sys.exit('a kernel was fetched')\n"
        "trap = types.ModuleType('kernels')\n"
        "trap.get_kernel = fetched\n"
        "sys.modules['kernels'] = trap\n"
        "from jackfield_plugins.quantizer.libraries import import_bitsandbytes\n"
        "import_bitsandbytes()\n"
        "assert 'bitsandbytes' in sys.modules\n"
        "assert sys.modules['kernels'] is trap\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
