"""The command line: which commands there are. A mistake of the user ends in one line and exit code 2.

The module of a command is imported when the command is run, so that `lumos --help` does not wait for numpy.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from lumos.cli.options import with_options_apart
from lumos.errors import LumosError, printable, shortened, unreadable


class _Command(NamedTuple):
    """Where a command is, and the first line of its docstring."""

    module: str
    help: str
    context: dict[str, Any] | None = None

    def load(self, name: str) -> Any:
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        function = getattr(import_module(f"lumos.cli.{self.module}"), f"{name}_command")
        one.command(name, context_settings=self.context)(with_options_apart(function))
        return typer.main.get_command(one)


_UsageError: Any = typer.BadParameter.__base__  # of click, which typer brings along under changing names
_CANNOT_WRITE = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EBADF)
_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # options after COMMAND are its own
_SEARCH = "Which TP, PP, CP, EP, DP, ZeRO, micro-batch, recomputation and schedule are best, and do they fit?"
_MERGE = "Merge the shards of a search or a score into the answer that one run without --shard would have given."
_CAPTURE = "Record a training script, or dry-run it on a machine without a GPU."
_SYNTHESISE = "Generate traces that behave like those of a run and contain none of them."
_SAMPLE = "Measure this machine's GPUs or its CPU (needs torch), as input for lumos fit."
_ABOUT = "Which GPUs, models and frameworks are known, how old are the shipped costs, and how far off were they?"
COMMANDS = {
    "replay": _Command("replay_command", "Is the graph right, and where does the time go?"),
    "predict": _Command("predict_command", "What would this run do: from its description, or from a trace?"),
    "stragglers": _Command("stragglers_command", "Who slows the job down, why, and what would mending it give?"),
    "compare": _Command("compare_command", "Why does one run take longer than another?"),
    "convert": _Command("convert_command", "Write a run in another format: Chakra, Kineto or Perfetto."),
    "synthesise": _Command("synthesise_command", _SYNTHESISE),
    "search": _Command("search_command", _SEARCH),
    "merge": _Command("merge_command", _MERGE),
    "score": _Command("score_command", "How accurate are the predictions for measured runs?"),
    "cost": _Command("cost_command", "How long do single operators take, isolated and from a cold cache?"),
    "sample": _Command("sample_command", _SAMPLE),
    "fit": _Command("fit_command", "Fit a model of a machine to its samples (needs the extra [fit])."),
    "capture": _Command("capture_command", _CAPTURE, _PASS_ON),
    "check": _Command("check_command", "What does a trace lack, for which answers, and how is it recorded?"),
    "about": _Command("about_command", _ABOUT),
    "demo": _Command("replay_command", "Replay the example in the package: four ranks, one of them slow."),
}


class _Commands(TyperGroup):
    """Commands that are loaded when they are named."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return COMMANDS[cmd_name].load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


app = typer.Typer(
    cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Predicts what an LLM training run will do before you pay for it.",
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lumos {version('lumos-sim')}")
        raise typer.Exit


@app.callback()
def _all(
    shown: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")]
    = False,
) -> None:  # fmt: skip
    """Predicts what an LLM training run will do before you pay for it."""


def main() -> None:
    """The entry point of `lumos`."""
    _prepare_streams()
    signal.signal(signal.SIGTERM, _terminated)
    code, message = _run()
    if message:
        with suppress(OSError):  # nobody reads it, or its disk is full: the exit code remains
            sys.stderr.write(f"lumos: {printable(message)}\n")
    sys.exit(code)


def _run() -> tuple[int, str]:
    """Run the command; (exit code, what went wrong)."""
    try:
        try:
            code = app(standalone_mode=False)
        finally:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0, ""
    except _UsageError as error:
        return _misused(error)
    except typer.Abort:
        return 130, "interrupted"
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):  # click and rich make an exit code of 1 of it
            _drop_output()
            return 0, ""
        return done.code if isinstance(done.code, int) else 0, ""
    except LumosError as error:
        return 2, str(error)
    except MemoryError:
        return 2, "out of memory; read fewer ranks with --match, or record fewer steps"
    except KeyboardInterrupt:
        return 130, "interrupted"
    except BrokenPipeError:
        _drop_output()
        return 0, ""
    except OSError as error:
        if error.filename is not None:  # a path that may not be read, or that vanished
            return 2, str(unreadable(error))
        if error.errno not in _CANNOT_WRITE:
            raise
        _drop_output()
        return 2, f"the answer cannot be printed ({error.strerror}); make room, or write it elsewhere with -o"


def _terminated(number: int, frame: FrameType | None) -> None:
    """End as an interrupted command does: worker processes end too, and no half-written file stays."""
    raise SystemExit(128 + number)


def _misused(error: Any) -> tuple[int, str]:
    """A wrong option or argument in one line; without any arguments, the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return error.exit_code, ""
    text = shortened(error.format_message().rstrip("."))
    command = error.ctx.command_path if error.ctx is not None else "lumos"
    return error.exit_code, f"{text[:1].lower()}{text[1:]}; {command} --help lists the options"


def _prepare_streams() -> None:
    """Make printing safe: streams may be closed, and may not know all characters."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed; a file that is opened later must not take its place
            taken = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(taken, True)  # worker processes write there, too
            setattr(sys, name, os.fdopen(taken, "w" if number else "r"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Forget what could not be written, so that Python does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
