"""The command line: which commands there are. A mistake of the user ends in one line and exit code 2.

The module of a command is imported when the command is run, so that `lumos --help` does not wait for numpy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from lumos.cli.options import with_options_apart
from lumos.errors import LumosError, printable


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


_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # options after COMMAND are its own
_SEARCH = "Which TP, PP, CP, EP, DP, ZeRO, micro-batch, recomputation and schedule are best, and do they fit?"
_MERGE = "Merge the shards of a search or a score into the answer that one run without --shard would have given."
_CAPTURE = "Record a training script, or dry-run it on a machine without a GPU."
_SAMPLE = "Measure operators on this machine's GPU (needs torch), as input for lumos fit."
COMMANDS = {
    "replay": _Command("replay_command", "Is the graph right, and where does the time go?"),
    "predict": _Command("predict_command", "What would this run do: from its description, or from a trace?"),
    "compare": _Command("compare_command", "Why does one run take longer than another?"),
    "convert": _Command("convert_command", "Write a run in another format: Chakra, Kineto or Perfetto."),
    "search": _Command("search_command", _SEARCH),
    "merge": _Command("merge_command", _MERGE),
    "score": _Command("score_command", "How accurate are the predictions for measured runs?"),
    "cost": _Command("cost_command", "How long do single operators take, isolated and from a cold cache?"),
    "sample": _Command("sample_command", _SAMPLE),
    "fit": _Command("fit_command", "Fit a cost model to samples (needs the extra [fit])."),
    "capture": _Command("capture_command", _CAPTURE, _PASS_ON),
    "check": _Command("check_command", "What does a trace lack, for which answers, and how is it recorded?"),
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
    try:
        app()
    except LumosError as error:
        sys.stderr.write(f"lumos: {printable(str(error))}\n")
        sys.exit(2)
    except MemoryError:
        sys.stderr.write("lumos: out of memory; read fewer ranks with --match, or record fewer steps\n")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.stderr.write("lumos: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
