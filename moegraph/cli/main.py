"""From the arguments to an exit status; every error becomes a sentence here.

Contract: exit status 0 fine, 1 the run failed, 2 the spec or the call is wrong, 3 a check did not hold, 130 Ctrl-C,
143 SIGTERM. Errors go to stderr without a traceback, unless `--debug` stands among the arguments. With `--json` an
error is also an object on stdout, so that stdout is one JSON document whatever happens. Cleaning up is the business of
the `finally` blocks below: neither signal skips them.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import typer

from moegraph.errors import MoegraphError, UsageError

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
_DEBUG, _JSON = "--debug", "--json"


def main() -> NoReturn:
    """The console script."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    status = run(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from here on there is nothing that has to be cleaned up
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    before = list(arguments)[: list(arguments).index("--")] if "--" in arguments else list(arguments)
    debug, as_json = _DEBUG in before, _JSON in before
    try:
        status = _call([argument for argument in arguments if argument != _DEBUG])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`); what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(error, as_json=as_json, debug=debug)
    if status == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return status


def _call(arguments: list[str]) -> int:
    """Parses and runs. A command returns its exit status, or None for 0."""
    from moegraph.cli.app import app

    command = typer.main.get_command(app)
    return command.main(args=arguments, prog_name="moegraph", standalone_mode=False) or 0


def _report(error: Exception, *, as_json: bool, debug: bool) -> int:
    known = error if isinstance(error, MoegraphError) else _usage_error(error)
    if known is not None:
        text, data, status = f"error: {known}", known.to_json(), known.exit_code
    else:
        what = f"{type(error).__name__}: {error}".strip().removesuffix(":")
        line = what.splitlines()[0][:500]
        hint = "" if debug else " (moegraph did not expect this; --debug shows where it came from)"
        text, status = f"error: {line}{hint}", 1
        data = {"error": type(error).__name__, "code": MoegraphError.code, "exit_code": status, "message": what}
    print(text, file=sys.stderr)
    if as_json:
        print(json.dumps(data, indent=2, ensure_ascii=False))
    return status


def _usage_error(error: Exception) -> UsageError | None:
    """What typer's parser has to say, as an error of ours; None for any other exception."""
    # The base class is click's or, in newer versions of typer, typer's own: both are bases of BadParameter.
    if not isinstance(error, typer.BadParameter.__mro__[2]):
        return None
    parsed: Any = error
    context = getattr(parsed, "ctx", None)
    command = context.command_path if context is not None else "moegraph"
    return UsageError(f"{parsed.format_message()}\n    fix: `{command} --help` lists what there is")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)
