"""The command line. `main` is the console script, `run` the same with arguments and exit code.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import typer

from jackfield.cli.app import Globals, app
from jackfield.cli.output import logged, say
from jackfield.errors import JackfieldError
from jackfield.quieting import TORCHAO, quieted

__all__ = ["main", "run"]

INTERRUPTED = 130

#: What libraries read when they are imported; a value that the caller has set stays.
QUIET = {
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def main() -> None:
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Errors become one line on standard error."""
    options = Globals()
    with logged(options), quieted(*TORCHAO), warnings.catch_warnings():
        for library in ("huggingface_hub", "tokenizers", "torch", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
        try:
            code = app(list(arguments), prog_name="jackfield", standalone_mode=False, obj=options)
            if sys.stdout is not None:  # as after `>&-`
                sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except BrokenPipeError:
            return _give_up_output()
        except SystemExit as end:  # how typer itself reports a broken pipe
            return _give_up_output() if isinstance(end.__context__, BrokenPipeError) else _code(end)
        except Exception as error:  # noqa: BLE001  the one boundary: no traceback unless asked for
            return _report(error, options.debug)
    return code if isinstance(code, int) else 0


def _report(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, JackfieldError):
        say(f"error: {error}")
        return error.exit_code
    if hasattr(error, "format_message"):  # typer's usage errors, whose base class is not public
        say(f"error: {error.format_message()}{_help_of(error)}")
        return int(getattr(error, "exit_code", 2))
    hint = "" if debug else "; for the traceback run it again as `jackfield --debug …`"
    say(f"error: unexpected {type(error).__name__}: {error}{hint}")
    return 1


def _help_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f" (see `{context.command_path} --help`)" if context else ""


def _code(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _give_up_output() -> int:
    """The reader has gone: let nothing be flushed into the closed pipe when Python exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    os.close(null)
    return 1
