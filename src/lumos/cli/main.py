"""The command line: which commands there are. What is wrong ends in one line and exit code 2."""

from __future__ import annotations

import sys

import typer

from lumos.cli.capture_command import PASS_ON, capture_command
from lumos.cli.check_command import check_command
from lumos.cli.compare_command import compare_command
from lumos.cli.convert_command import convert_command
from lumos.cli.cost_command import cost_command
from lumos.cli.demo_command import demo_command
from lumos.cli.fit_command import fit_command
from lumos.cli.merge_command import merge_command
from lumos.cli.predict_command import predict_command
from lumos.cli.replay_command import replay_command
from lumos.cli.sample_command import sample_command
from lumos.cli.score_command import score_command
from lumos.cli.search_command import search_command
from lumos.errors import LumosError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tells what an LLM training run will do before you pay for it.",
)

app.command("replay")(replay_command)
app.command("predict")(predict_command)
app.command("compare")(compare_command)
app.command("convert")(convert_command)
app.command("search")(search_command)
app.command("merge")(merge_command)
app.command("score")(score_command)
app.command("cost")(cost_command)
app.command("sample")(sample_command)
app.command("fit")(fit_command)
app.command("capture", context_settings=PASS_ON)(capture_command)
app.command("check")(check_command)
app.command("demo")(demo_command)


def main() -> None:
    """The entry point of `lumos`."""
    try:
        app()
    except LumosError as error:
        sys.stderr.write(f"lumos: {error}\n")
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
