"""`lumos demo`: the main job on the example in the package."""

from __future__ import annotations

from lumos.cli.options import AsJson, Output
from lumos.cli.replay_command import replay_command


def demo_command(as_json: AsJson = False, output: Output = None) -> None:
    """Replay the example in the package: four ranks that trained on one H200, one of them slow."""
    from lumos.trace.read.example import example_path

    with example_path() as path:
        replay_command(path, as_json=as_json, output=output)
