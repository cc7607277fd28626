"""The process groups of Chakra files: from their metadata, from the group file beside them, or from who uses a name.

A group file is what ASTRA-sim takes as `--comm-group-configuration`: JSON, `{"1": [0, 1], "2": [2, 3]}`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from lumos.chakra.file_format import ChakraFile, NodeType
from lumos.errors import InputError
from lumos.files import read_file
from lumos.read.execution_trace import described_groups

_MOST_BYTES = 1 << 26
_MOST_FILES = 64  # of a folder that are looked into


_Ranks = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]]


class ProcessGroups:
    """The ranks of process groups: `ProcessGroups(files).ranks(0, "1")`."""

    def __init__(self, files: Sequence[ChakraFile]) -> None:
        self.files = files

    def ranks(self, rank: int, name: str) -> tuple[int, ...]:
        """The ranks of the group that a rank calls by a name."""
        if not name:
            return tuple(range(self.world))
        stated = self._described.get((rank, name)) or self._beside.get(name, ())
        return stated or tuple(self._users.get(name, ()))

    def is_stated(self, rank: int, name: str) -> bool:
        """Whether a file says which ranks a group has."""
        return (rank, name) in self._described or name in self._beside

    @cached_property
    def world(self) -> int:
        """How many ranks the job has, as far as its files and groups tell."""
        named = [*self._described.values(), *self._beside.values()]
        return 1 + max([*(file.rank for file in self.files), *(rank for ranks in named for rank in ranks)])

    @cached_property
    def _described(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """By rank and name, as nodes of metadata describe them."""
        found: dict[tuple[int, str], tuple[int, ...]] = {}
        for file in self.files:
            for node in file.nodes:
                if node.type == NodeType.METADATA and node.inputs[:2] == "['":
                    groups = described_groups(node.inputs[2:-2])
                    found |= {(file.rank, name): ranks for name, ranks in groups.items()}
        return found

    @cached_property
    def _beside(self) -> dict[str, tuple[int, ...]]:
        """By name, as the group file beside the traces has them: the one that is named alike, else the first."""
        path = self.files[0].path
        stem = path.name.partition(".")[0]
        near = islice(sorted(path.parent.glob("*.json")), _MOST_FILES)
        for candidate in sorted(near, key=lambda other: (other.name.partition(".")[0] != stem, other.name)):
            found = _group_file(candidate)
            if found:
                return found
        return {}

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        """The ranks whose files have collectives of a group, by its name."""
        found: dict[str, dict[int, None]] = defaultdict(dict)
        for file in self.files:
            for node in file.nodes:
                if node.type == NodeType.COMM_COLL:
                    found[node.group][file.rank] = None
        return {name: sorted(ranks) for name, ranks in found.items()}


def _group_file(path: Path) -> dict[str, tuple[int, ...]]:
    """The groups of a file; none if it is something else."""
    with suppress(InputError, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            groups = msgspec.json.decode(read_file(path, _MOST_BYTES, ""), type=dict[str, _Ranks])
            return {name: tuple(dict.fromkeys(ranks)) for name, ranks in groups.items()}
    return {}
