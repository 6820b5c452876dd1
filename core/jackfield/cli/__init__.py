"""The command line. `main` is the console script, `run` the same with arguments and exit code.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

import typer

from jackfield.cli.answers import instead_of_command, instead_of_flag, with_values
from jackfield.cli.app import Globals, app
from jackfield.cli.flag_words import on_a_command_line, value_beside
from jackfield.cli.output import PLAIN, logged, say
from jackfield.cli.server_flags import as_written, instead_of_flag_of_server
from jackfield.errors import JackfieldError, UsageError, unusable_folder
from jackfield.quieting import TORCHAO, quieted

__all__ = ["main", "run"]

INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

#: What libraries read when they are imported; a value that the caller has set stays.
QUIET = {
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def main() -> None:
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    _keep_streams()
    code = run(sys.argv[1:])
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:  # what it could not take is tried again when Python exits, which says 120
        _give_up(sys.stderr)
    sys.exit(code)


def _keep_streams() -> None:
    """Show what an encoding lacks in its own characters, and let no file take a closed stream."""
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        elif number and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=PLAIN)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Errors become one line on standard error."""
    options = Globals()
    with logged(options), quieted(*TORCHAO), warnings.catch_warnings():
        for library in ("huggingface_hub", "tokenizers", "torch", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
        try:
            words = with_values(arguments)
            code = app(words, prog_name="jackfield", standalone_mode=False, obj=options)
            if sys.stdout is not None:  # as after `>&-`
                sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except BrokenPipeError:
            return _give_up_output()
        except SystemExit as end:  # how typer itself reports a broken pipe
            return _give_up_output() if isinstance(end.__context__, BrokenPipeError) else _code(end)
        except Exception as error:  # noqa: BLE001  the one boundary: no traceback unless asked for
            return _report(error, options.debug, arguments)
    return code if isinstance(code, int) else 0


def _report(error: Exception, debug: bool, arguments: Sequence[str]) -> int:
    if debug:
        traceback.print_exception(error)
    if not isinstance(error, JackfieldError):
        error = unusable_folder(error) or error
    if isinstance(error, JackfieldError):
        say(f"error: {on_a_command_line(str(error))}")
        return error.exit_code
    if hasattr(error, "format_message"):  # typer's usage errors, whose base class is not public
        message = error.format_message()
        flag = getattr(error, "option_name", None)
        if flag:
            whole = as_written(flag, arguments)
            message, flag = message.replace(f": {flag}", f": {whole}", 1), whole
        answer = _instead(error, flag, arguments)
        if answer:
            say(f"error: {message.partition(' (Possible')[0].rstrip('.')}; {answer}")
        else:
            say(f"error: {message}{_help_of(error)}")
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
        say(f"error: the output cannot be written: {error.strerror}")
        return _give_up_output()
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        say("error: no folder for temporary files can be written; set TMPDIR to one that can")
        return UsageError.exit_code
    hint = "" if debug else "; for the traceback run it again as `jackfield --debug …`"
    say(f"error: unexpected {type(error).__name__}: {error}{hint}")
    return 1


def _instead(error: Exception, flag: str | None, arguments: Sequence[str]) -> str | None:
    """What to write instead of a flag or a command of transformers, or a flag of another server."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return None
    if flag:
        known = {name for parameter in context.command.params for name in parameter.opts}
        if flag in known:
            return None
        serves = context.command_path == "jackfield serve"
        value = value_beside(flag, arguments)
        theirs = instead_of_flag_of_server(flag, value) if serves else None
        return theirs or instead_of_flag(flag, known, value)
    command = re.search(r"No such command '([\w-]+)'", str(error))
    return instead_of_command(command[1]) if command else None


def _help_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f" (see `{context.command_path} --help`)" if context else ""


def _code(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _give_up_output() -> int:
    """The reader has gone: let nothing be flushed into the closed pipe when Python exits."""
    _give_up(sys.__stdout__)
    return 1


def _give_up(stream: TextIO | None) -> None:
    """Let what goes to a stream be lost."""
    if stream is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
