"""How a command line of this project runs and ends: exit codes, and every error in one screen."""

from __future__ import annotations

import io
import os
import sys

import click


def run_command_line(group: click.Group, program: str, arguments: list[str]) -> int:
    """Run one command line of `group` and return its exit code; every error is one screen, a traceback only with --debug.

    Exit codes: 0 done, 1 refused or failed, 2 a wrong call, 130 interrupted, or what the command itself returns.
    """
    _open_streams()
    debug = "--debug" in arguments
    try:
        outcome = group.main(arguments, prog_name=program, standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except click.Abort:
        return _interrupted()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if debug:
            raise
        return _failed(error, program)


def _open_streams() -> None:
    """Give the process the standard streams that it was started without, and let none of them fail at a character that it has not."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed (`>&-`): the next file to be opened would take its place, and get what a library prints
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the end)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _interrupted() -> int:
    click.echo("interrupted; the same command continues", err=True)
    return 130


def _failed(error: Exception, program: str) -> int:
    from converter.display import console, printable, show_refusal
    from mappings.errors import Problem, Refused

    if isinstance(error, Refused):
        show_refusal(error)
    elif isinstance(error, (OSError, MemoryError)):
        place = str(getattr(error, "filename", None) or "")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        show_refusal(Refused("the system said no", [Problem(reason, place, "mend it and run the same command again; it continues")]))
    else:
        console(stderr=True).print(f"[bold red]a defect of {program}:[/] {type(error).__name__}: {printable(str(error))}")
        console(stderr=True).print("  run the same command with --debug and report what it prints")
    return 1
