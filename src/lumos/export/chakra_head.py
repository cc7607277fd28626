"""The head of a Chakra file: the events that its nodes are pieces of, as columns, and what ties them together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lumos.export.chakra_numbers import Numbers
from lumos.trace.read.chakra_schema import OWN_VERSION, Own, add_value, schema
from lumos.trace.trace import Trace

_SCHEMA_VERSION = "0.0.4"


def head(numbers: Numbers, rank: int) -> Any:
    """The GlobalMetadata of a rank's file."""
    trace = numbers.execution.trace
    header = next(h for h in trace.headers if h.rank == rank)
    rows = np.flatnonzero(trace.rank == rank)
    message = schema().metadata(version=_SCHEMA_VERSION)
    values: list[tuple[str, str, Any]] = [
        ("schema", "string_val", f"lumos-chakra.{_SCHEMA_VERSION}"),
        (Own.VERSION, "int64_val", OWN_VERSION),
        (Own.RANK, "int64_val", rank),
        (Own.HEADER, "string_val", _json(header._replace(path=Path(header.path).name))),
        (Own.WARNINGS, "string_list", numbers.execution.warnings),
        (Own.ORIGIN, "int64_val", numbers.execution.origin),
        (Own.LANES, "string_list", [_json(lane) for lane in trace.lanes if lane.rank == rank]),
        (Own.MEETINGS, "string_list", _meetings(numbers, rank)),
        *_events(numbers, rows),
        *_syncs(trace, rank),
    ]
    for name, kind, value in values:
        add_value(message.attr, name, kind, value)
    return message


def _events(numbers: Numbers, rows: np.ndarray) -> Iterator[tuple[str, str, Any]]:
    """The events of a rank, a column each; names and messages stand in tables of their own."""
    trace, draft, origin = numbers.execution.trace, numbers.execution.nodes, numbers.execution.origin
    names, name = np.unique(trace.name[rows], return_inverse=True)
    told, message = np.unique(trace.message[rows], return_inverse=True)
    yield Own.NAMES, "string_list", [trace.names[n] for n in names]
    yield Own.MESSAGES, "string_list", [_json(trace.messages[m]) if m >= 0 else "" for m in told]
    columns = {
        Own.EVENT_NAME: name,
        Own.EVENT_CATEGORY: trace.category[rows],
        Own.EVENT_LANE: numbers.place_of_lane[trace.lane[rows]],
        Own.EVENT_START: trace.start[rows] - origin,
        Own.EVENT_DURATION: trace.duration[rows],
        Own.EVENT_CORRELATION: trace.correlation[rows],
        Own.EVENT_MESSAGE: message,
        Own.EVENT_FIRST: _or_none(draft.first_node[rows], numbers.ids),
        Own.EVENT_LAST: _or_none(draft.last_node[rows], numbers.ids),
        Own.EVENT_PARENT: _or_none(draft.parent[rows], numbers.place_of_row),
    }
    for label, column in columns.items():
        yield label, "sint64_list", column.tolist()


def _syncs(trace: Trace, rank: int) -> Iterator[tuple[str, str, Any]]:
    """What synchronising calls waited for."""
    syncs = trace.syncs
    mine = trace.lane_rank[syncs.lane] == rank if len(syncs.lane) else np.zeros(0, bool)
    columns = (syncs.correlation, syncs.stream, syncs.wait_stream, syncs.record, syncs.event)
    for label, column in zip(Own.SYNCS, columns, strict=True):
        yield label, "sint64_list", column[mine].tolist()


def _or_none(index: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The numbers of what is pointed at; -1 where nothing is."""
    return np.where(index >= 0, numbers[np.maximum(index, 0)], -1) if len(numbers) else index


def _meetings(numbers: Numbers, rank: int) -> list[str]:
    """Where the events of a rank meet those of others: meeting, place in it, event, and what is known of it."""
    trace = numbers.execution.trace
    return [
        _json([number, place, int(numbers.place_of_row[row]), m.collective, m.ranks, m.complete, m.message])
        for number, m in enumerate(numbers.execution.rendezvous)
        for place, row in enumerate(m.rows.tolist())
        if int(trace.rank[row]) == rank
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
