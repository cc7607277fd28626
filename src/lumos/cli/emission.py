"""`--emit`: configurations as what is launched, for the commands that choose or predict one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from lumos.errors import OptionError
from lumos.export.launch_files import LaunchFiles, check_folder, launch_files, suited_to, tool_named, values_it_has
from lumos.prediction.prediction import Prediction
from lumos.search.search import SearchResult
from lumos.setup.setup import Setup

Emit = Annotated[
    str,
    typer.Option(
        "--emit", metavar="TOOL[=FOLDER]",
        help="Also as what is launched with megatron, torchtitan or deepspeed; with a folder, as files in it.",
    ),
]  # fmt: skip


class Emission(NamedTuple):
    """The tool that configurations are written for, and where to."""

    tool: str
    folder: Path | None

    def suited(self, setup: Setup) -> tuple[Setup, tuple[str, ...]]:
        """A setup in the tool's own framework, unless it states another; with a note where that was chosen."""
        suited = suited_to(setup, self.tool)
        if suited.train.framework == setup.train.framework:
            return setup, ()
        return suited, (f"train.framework is not given: {suited.train.framework}, for --emit {self.tool}",)

    def narrowed(self, setup: Setup, choices: dict[str, list[Any]]) -> tuple[str, ...]:
        """Fix the searched keys that the tool's files cannot say, unless they were asked for; a note says so."""
        fixed = {key: values for key, values in values_it_has(setup, self.tool).items() if key not in choices}
        choices.update(fixed)
        named = ", ".join(f"{key} = {str(values[0]).lower()}" for key, values in fixed.items())
        return (f"searched with {named} alone: the files of {self.tool} cannot say others",) if fixed else ()

    def of_prediction(self, found: Prediction) -> tuple[Prediction, LaunchFiles]:
        """The files of the predicted run, and its prediction with notes on what they leave out."""
        if found.setup is None:
            raise OptionError("--emit needs the setup of a run: name a setup file, or what is to change with --set")
        launch = launch_files(found.setup, self.tool)
        return replace(found, notes=(*found.notes, *self._notes(launch))), launch

    def of_search(self, found: SearchResult, answer: dict[str, Any]) -> LaunchFiles | None:
        """The files of the best configuration; the answer gets those of every family, and notes."""
        space = found.search.task.space
        launches = []
        for family in answer["families"]:
            launches.append(launch_files(space.setup_of(space.candidate(family["number"])), self.tool))
            family["launch"] = launches[-1].as_dict()
        if not launches:
            return None
        answer["warnings"] = [*answer["warnings"], *self._notes(launches[0])]
        return launches[0]

    def write(self, launch: LaunchFiles | None) -> None:
        """Write the files, if a folder was named; an answer is shown before, since it may have taken long."""
        if self.folder is not None and launch is not None:
            launch.write(self.folder)

    def _notes(self, launch: LaunchFiles) -> list[str]:
        return [f"--emit {self.tool} leaves out {text}" for text in launch.left_out] + list(launch.remarks)


def read_emission(text: str) -> Emission | None:
    """What `--emit TOOL` or `--emit TOOL=FOLDER` asks for; None where it is not given."""
    if not text:
        return None
    tool, equals, folder = text.partition("=")
    tool = tool_named(tool.strip())
    if equals and not folder:
        raise OptionError(f"--emit {text[:100]}: the folder is missing: write {tool}=FOLDER")
    if folder:
        check_folder(Path(folder))
    return Emission(tool, Path(folder) if folder else None)
