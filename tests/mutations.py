"""Mutations: good input made bad, by a source of randomness that repeats it.

Of events (`MUTATIONS`), of bytes (`DAMAGES`), of JSON values, of lines of text, of packed arrays and of tables; `KEYS`,
`VALUES`, `FACTORS`, `PATTERNS` and `GLOBS` are what strangers type into options, `INJECTIONS` what would run somewhere.
"""

from __future__ import annotations

import io
import json
import random
import sqlite3
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import polars

from support import LAYOUTS as LAYOUTS
from support import Event

Mutation = Callable[[random.Random, list[Event]], list[Event]]
Damage = Callable[[random.Random, bytes], bytes]
HOSTILE_TEXT = (
    "", "x" * 5000, "[/x]", "[bold]b", "\x1b[31mred", "\x1b]0;title\x07", "=1+1", "<script>x</script>", "\u202e",
    "\ud800", "nan", "-1", "9" * 4301, "1e400", "../../etc", "%s%n", "{0}", "\x00", "ProfilerStep#1.5",
    "ProfilerStep#" + "9" * 4301,
)  # fmt: skip
ODD_NUMBERS = (0, -1, 1, -1e6, 1e6, 1e12, 1e15, -1e15, 9e15, 1e300, 2**53, 2**64, 10**40, 0.0001)
ODD_VALUES: tuple[Any, ...] = (*ODD_NUMBERS, *HOSTILE_TEXT, "7", "soon", "", None, True, [], [1, 2], {}, {"a": 1})


EXTREMES = (
    0, -1, 1, 2**31, 2**63, 2**64, 10**40, 1e-300, 1e300, -1e300, 5e-324, 0.1, 1e18, float(2**53), True, False, None,
)  # fmt: skip
KEYS = (
    "model.layers", "model.hidden", "model.ffn", "model.heads", "model.kv_heads", "model.vocab", "train.seq",
    "model.experts", "model.top_k", "train.global_batch", "train.micro_batch", "train.precision", "train.recompute",
    "train.framework", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.dp", "parallel.zero",
    "parallel.vpp", "parallel.schedule", "cluster.gpus", "cluster.gpu", "cluster.host", "cluster.inter_gb_s",
    "cluster.gpus_per_node",
    "cluster.clock", "cluster.fabric", "no.such", "model", "",
)  # fmt: skip
VALUES = (
    "0", "1", "2", "3", "4", "8", "64", "1024", "-1", "0.5", "1e-300", "1e300", "5e-324", "nan", "inf", "-inf", "true",
    "x", "", "[]", "[1, 2]", "{}", "9" * 25, "9" * 4301, "99999999", "1_0", "0x10", "1e400", "'h200'", "h200", "a100",
    "fp8", "full", "1f1b", "pytorch", "megatron-core", "[" * 2000, '"' + "x" * 300 + '"', "1979-05-27", "0.000001",
    "1000000",
)  # fmt: skip
NUMBERS = (
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "12", "16", "32", "64", "96", "100", "128", "256", "1000", "1024",
    "4096", "8192", "65536", "1000000", "10000000", "1e-9", "1e-6", "0.001", "0.1", "0.5", "0.9", "1.5", "10.5", "1e6",
    "1e9", "1e12",
)  # fmt: skip
"""What is nearly right, so that there is an answer more often."""
INJECTIONS = (
    "<script>planted()</script>", "</script><script>planted()</script>", "</title></style></textarea><planted>",
    '"><planted onclick=planted()>', "'><planted>", "<img src=x onerror=planted()>", "<!--<script>planted",
    "--><planted>", '" onmouseover="planted()', "' autofocus onfocus='planted()", "javascript:planted()",
    "&lt;planted&gt;&#60;planted>", '<a href="javascript:planted()">x</a>', "{{planted()}}", "${planted()}",
    "]]><planted>", "<svg/onload=planted()>", "$(>planted)", "`>planted`", "'; >planted; '", '"; >planted; "',
    "\n>planted\n", "\\';>planted;'", '""" + __import__("os").system(">planted") + """', "{planted}", "%(planted)s",
    "'+__import__('os').system('>planted')+'", "=cmd|' /C planted'!A1", "@planted", "\u2028planted\u2029",
    "\x1b]0;planted\x07", "[link=planted]", "\r\nplanted: 1",
)  # fmt: skip
"""Markup, scripts, formulas and shell that leave a mark where they are run rather than shown."""
PATTERNS = (
    "", "[", "(", ")", "*", "(a+)+b", "(?:a|aa)+b", "(.*a){30}b", "(a*)*$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(?=a)",
    r"(a)\1", "a{99999999999}", "a{1000}{1000}", "(?P<n>x)", "(?i)GEMM", r"\d+", r"(\d+)", r"rank(\d)", r"(rank)",
    "x" * 5000, "(" * 300 + ")" * 300, "(" * 5000 + ")" * 5000, "[a-z", "[z-a]", "\x00", "\ud800", r"\p{L}+", r"\Z",
    "(?#", "(?>a)", "a++", "()", "|", "a|", ".", ".*", "((((a{0,100}){0,100}){0,100}){0,100})", r"\8", "(?s).", "\n",
    "gemm|nccl", "(?x) g e m m",
)  # fmt: skip
GLOBS = (
    "", "*", "?", "[", "]", "[!", "[]", "[!]]", "*a" * 30 + "b", "*" * 5000, "?" * 300, "[a-", "[z-a]", "rank?.json",
    "rank[01]*", "**/*", "../*", "/etc/*", "\x00", "\ud800", "\\", "{a,b}", "x" * 5000, "*.json*", "(a+)+", "-",
    "$(>planted)", "--json",
)  # fmt: skip
FACTORS = ("0", "0.5", "1", "2", "1e6", "1e7", "-1", "nan", "inf", "1e-300", "x", "")


# Mutations of events


def arguments_of(event: Event) -> dict[str, Any]:
    """The arguments of an event, if an earlier mutation has left any."""
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def time_of(event: Event) -> float:
    found = event.get("ts")
    return float(found) if isinstance(found, float | int) and abs(found) < 1e300 else 0.0


def some(random: random.Random, events: list[Event]) -> set[int]:
    """A few events, or many."""
    share = random.choice([0.01, 0.1, 0.5, 1.0])
    return {i for i in range(len(events)) if random.random() < share} or {random.randrange(len(events))}


def changed(random: random.Random, events: list[Event], change: Callable[[Event], Event]) -> list[Event]:
    chosen = some(random, events)
    return [change(event) if i in chosen else event for i, event in enumerate(events)]


def drop_events(random: random.Random, events: list[Event]) -> list[Event]:
    chosen = some(random, events[1:] or events)
    return [event for i, event in enumerate(events) if i - 1 not in chosen]


def duplicate_events(random: random.Random, events: list[Event]) -> list[Event]:
    chosen = some(random, events)
    return [event for i, event in enumerate(events) for _ in range(1 + (i in chosen))]


def shuffle_events(random: random.Random, events: list[Event]) -> list[Event]:
    return random.sample(events, len(events))


def delete_keys(random: random.Random, events: list[Event]) -> list[Event]:
    return changed(random, events, lambda e: {k: v for k, v in e.items() if random.random() < 0.8})


def delete_arguments(random: random.Random, events: list[Event]) -> list[Event]:
    def without(event: Event) -> Event:
        return event | {"args": {k: v for k, v in arguments_of(event).items() if random.random() < 0.5}}

    return changed(random, events, without)


def odd_times(random: random.Random, events: list[Event]) -> list[Event]:
    return changed(random, events, lambda e: e | {random.choice(["ts", "dur"]): random.choice(ODD_VALUES)})


def swap_time_and_duration(random: random.Random, events: list[Event]) -> list[Event]:
    return changed(random, events, lambda e: e | {"ts": e.get("dur", 0), "dur": e.get("ts", 0)})


def jitter_times(random: random.Random, events: list[Event]) -> list[Event]:
    """Small enough to be believed, large enough to contradict every order."""
    return changed(random, events, lambda e: e | {"ts": time_of(e) + random.uniform(-500, 500)})


def one_moment(random: random.Random, events: list[Event]) -> list[Event]:
    return changed(random, events, lambda e: e | {"ts": 5, "dur": random.choice([0, 10])})


def odd_arguments(random: random.Random, events: list[Event]) -> list[Event]:
    def odd(event: Event) -> Event:
        args = dict(arguments_of(event) or {"correlation": 1})
        for key in random.sample(sorted(args), min(len(args), 3)):
            args[key] = random.choice(ODD_VALUES)
        return event | {"args": args}

    return changed(random, events, odd)


def odd_fields(random: random.Random, events: list[Event]) -> list[Event]:
    fields = ["ph", "cat", "name", "pid", "tid", "args"]
    return changed(random, events, lambda e: e | {random.choice(fields): random.choice(ODD_VALUES)})


def exchange_fields(random: random.Random, events: list[Event]) -> list[Event]:
    """Categories, names, lanes and arguments of other events: a kernel called cudaDeviceSynchronize, and the like."""
    field = random.choice(["cat", "name", "tid", "args", "ts", "dur"])
    donors = [e[field] for e in events if field in e] or [0]
    return changed(random, events, lambda e: e | {field: random.choice(donors)})


def exchange_correlations(random: random.Random, events: list[Event]) -> list[Event]:
    ids = [arguments_of(e)["correlation"] for e in events if "correlation" in arguments_of(e)] or [1]

    def exchange(event: Event) -> Event:
        return event | {"args": arguments_of(event) | {"correlation": random.choice(ids)}}

    return changed(random, events, exchange)


def merge_with_itself(random: random.Random, events: list[Event]) -> list[Event]:
    later = random.choice([0, 1, 1000, 1e6])
    return events + [e | {"ts": time_of(e) + later} for e in events if isinstance(e.get("ts"), float | int)]


def one_category(random: random.Random, events: list[Event]) -> list[Event]:
    wanted = random.choice(["cpu_op", "cuda_runtime", "kernel", "user_annotation", "cuda_sync", "gpu_memcpy"])
    return [e for e in events if e.get("cat") == wanted]


def hostile_names(random: random.Random, events: list[Event]) -> list[Event]:
    """Names that are markup, formulas, escape sequences or nearly marks of steps."""
    return changed(random, events, lambda e: e | {"name": random.choice(HOSTILE_TEXT)})


def far_times(random: random.Random, events: list[Event]) -> list[Event]:
    """Times that are seconds to years away: damage that is not as absurd as to be seen at once."""
    far = random.choice([1e6, 1e8, 4e9, 1e11, 1e13, 1.7e15])
    return changed(random, events, lambda e: e | {random.choice(["ts", "dur"]): far * random.random()})


MUTATIONS: tuple[Mutation, ...] = (
    hostile_names,
    far_times,
    drop_events,
    duplicate_events,
    shuffle_events,
    delete_keys,
    delete_arguments,
    odd_times,
    swap_time_and_duration,
    jitter_times,
    one_moment,
    odd_arguments,
    odd_fields,
    exchange_fields,
    exchange_correlations,
    merge_with_itself,
    one_category,
)


# Damage to bytes


def cut_end(random: random.Random, text: bytes) -> bytes:
    return text[: random.randrange(1, len(text))]


def cut_middle(random: random.Random, text: bytes) -> bytes:
    begin = random.randrange(len(text))
    return text[:begin] + text[begin + random.choice([1, 10, 1000]) :]


def flip_bytes(random: random.Random, text: bytes) -> bytes:
    damaged = bytearray(text)
    for _ in range(random.choice([1, 10, 200])):
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    return bytes(damaged)


def flip_structure(random: random.Random, text: bytes) -> bytes:
    """Brackets, quotes and commas in wrong places."""
    damaged = bytearray(text)
    for _ in range(random.choice([1, 5, 50])):
        damaged[random.randrange(len(damaged))] = random.choice(b'{}[]",:\\')
    return bytes(damaged)


def repeat_middle(random: random.Random, text: bytes) -> bytes:
    begin = random.randrange(len(text))
    end = begin + random.choice([1, 100, 5000])
    return text[:end] + text[begin:]


DAMAGES: tuple[Damage, ...] = (cut_end, cut_middle, flip_bytes, flip_structure, repeat_middle)


def damaged(random: random.Random, content: bytes) -> bytes:
    """Bytes after one of the damages, or none at all."""
    if not content or random.random() < 0.05:
        return random.choice([b"", b"\x00" * 100, b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000])
    return random.choice(DAMAGES)(random, content)


# JSON


def mutated_json(random: random.Random, content: bytes) -> bytes:
    """JSON with a few of its values, keys or brackets changed."""
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        value = _changed_value(random, value, random.randrange(8))
    text = json.dumps(value)
    if random.random() < 0.1:
        repeated = random.choice(["a", "rank", "shard", "kind"])
        text = text.replace("{", f'{{"{repeated}": 1, "{repeated}": "x", ', 1)
    if random.random() < 0.1:
        text = text.replace("0", random.choice(["1e999", "-0", "9" * 4301, "NaN", "Infinity"]), 1)
    return text.encode(errors="surrogatepass")


def leaves_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON value that hold no other values."""
    if isinstance(value, dict | list) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves_of(part, (*path, key))
    else:
        yield path


def with_leaf(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A JSON value in which one value is another."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_leaf(value[path[0]], path[1:], new)
    return copy


def odd_leaf(random: random.Random, old: Any) -> Any:
    """A value of the same kind as an old one, more often than not, that no program writes in its place."""
    if random.random() < 0.2:
        return odd_value(random)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return random.choice((0, -1, 1, 2, 3, -5, old + 1, -old, 10 * old, old * 1000, 2**31, 2**40, 2**63, 10**20))
    if isinstance(old, str):
        texts = ("", "forward", "all_reduce", "aten.mm.default", "attention.forward", "cudaEventSynchronize", "cpu")
        return random.choice((*texts, *HOSTILE_TEXT))
    return random.choice(([0], [1, 2], [-1], [2**63], ["x"], [[2, 3]]))


def mutated_leaves(random: random.Random, content: bytes) -> bytes:
    """JSON in which one to three single values are others."""
    value = json.loads(content)
    for path in random.sample(list(leaves_of(value)), random.choice((1, 1, 2, 3))):
        old = value
        for key in path:
            old = old[key]
        value = with_leaf(value, path, odd_leaf(random, old))
    return json.dumps(value).encode(errors="surrogatepass")


def injected(random: random.Random, value: Any, keep: Collection[str] = (), share: float = 0.5) -> Any:
    """A JSON value in which many strings go on with something that would run, but not those to keep, or under them."""
    if isinstance(value, dict):
        return {k: v if k in keep else injected(random, v, keep, share) for k, v in value.items()}
    if isinstance(value, list):
        return [injected(random, part, keep, share) for part in value]
    is_chosen = isinstance(value, str) and value not in keep and random.random() < share
    return value + random.choice(INJECTIONS) if is_chosen else value


def hostile_file_name(random: random.Random, suffix: str) -> str:
    """A name that a file may have on Linux, and that would run somewhere."""
    text = random.choice(
        (*INJECTIONS, "-", "--json", "-o", " ", "a\nb", "\udcff", "x" * 150, "a b'c\"d", "\x1b[31m", "~", "%00")
    )
    return text.replace("/", "").replace("\x00", "") + suffix


def odd_value(random: random.Random) -> Any:
    """Anything that a value should not be."""
    match random.randrange(5):
        case 0 | 1:
            return random.choice(EXTREMES)
        case 2:
            return random.choice(HOSTILE_TEXT)
        case 3:
            return random.choice([[], {}, [[]], [None], {"": {}}, [1, "x"], {"a": [1, {"b": None}]}])
    nested: Any = 1
    for _ in range(random.choice([3, 100, 500])):
        nested = [nested] if random.random() < 0.5 else {"a": nested}
    return nested


def _changed_value(random: random.Random, value: Any, depth: int) -> Any:
    """One value somewhere below, at most so deep, replaced, removed, renamed or repeated."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return odd_value(random)
    if isinstance(value, list):
        at, copy = random.randrange(len(value)), list(value)
        match random.randrange(6):
            case 0:
                del copy[at]
            case 1:
                copy += copy[:3]
            case _:
                copy[at] = _changed_value(random, copy[at], depth - 1)
        return copy
    key, fields = random.choice(sorted(value)), dict(value)
    match random.randrange(6):
        case 0:
            del fields[key]
        case 1:
            fields[random.choice(HOSTILE_TEXT)] = fields.pop(key)
        case 2:
            fields[key] = fields[random.choice(sorted(fields))]
        case _:
            fields[key] = _changed_value(random, fields[key], depth - 1)
    return fields


# Text: TOML, shell scripts, CSV


def mutated_text(random: random.Random, content: bytes) -> bytes:
    """Lines dropped, repeated, exchanged or with other words; sometimes other bytes."""
    if random.random() < 0.2:
        return damaged(random, content)
    lines = content.decode().split("\n")
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(lines))
        match random.randrange(6):
            case 0:
                del lines[at]
                lines = lines or [""]
            case 1:
                lines.insert(at, random.choice(lines))
            case 2:
                lines.insert(at, f"{random.choice(KEYS)} = {random.choice(VALUES)}")
            case _:
                words = lines[at].replace(",", " , ").replace("=", " = ").split(" ")
                words[random.randrange(len(words))] = str(random.choice((*VALUES, *HOSTILE_TEXT)))
                lines[at] = " ".join(words).replace(" , ", ",").replace(" = ", "=")
    return "\n".join(lines).encode(errors="surrogatepass")


# Packed arrays


def damaged_npz(random: random.Random, content: bytes) -> bytes:
    """An .npz whose bytes, or the bytes of one of whose members, are damaged."""
    if random.random() < 0.4:
        return damaged(random, content)
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w") as new:
        names = old.namelist()
        chosen = random.choice(names)
        for name in names:
            part = old.read(name)
            new.writestr(name, damaged(random, part) if name == chosen else part)
    return packed.getvalue()


# Tables


def odd_columns(random: random.Random, frame: polars.DataFrame) -> polars.DataFrame:
    """A table of which some columns are of another type, nested, missing, empty or full of one value."""
    for name in random.sample(frame.columns, min(frame.width, random.choice((1, 1, 2)))):
        column = frame[name]
        match random.randrange(9):
            case 0:
                new = polars.Series(name, [{"a": value} for value in column])
            case 1:
                new = polars.Series(name, [[value] for value in column])
            case 2:
                frame = frame.drop(name)
                continue
            case 3:
                new = polars.Series(name, [None] * len(column))
            case 4:
                new = polars.Series(name, [random.choice(HOSTILE_TEXT[:8])] * len(column))
            case 5:
                new = column.cast(polars.String).cast(polars.Binary)
            case 6:
                new = polars.Series(
                    name, [random.choice((0.0, -1.0, 1e300, float("nan"), float("inf"), 2.0**63))] * len(column)
                )
            case 7:
                new = polars.Series(name, [random.choice((0, -1, 2**31, 2**62, 7))] * len(column))
            case _:
                new = column.reverse().shift(random.choice((0, 1)))
        frame = frame.with_columns(new.alias(name))
    return frame.head(random.choice((0, 1, 2, 5, 1000))) if random.random() < 0.2 else frame


def mutated_sqlite(random: random.Random, path: Path) -> None:
    """A database in which rows, columns or tables are changed; anything may stand in a column."""
    with sqlite3.connect(path) as database:
        database.text_factory = bytes
        tables = [name.decode() for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(random.choice((1, 1, 2, 4))):
            table = random.choice(tables)
            columns = [row[1].decode() for row in database.execute(f"PRAGMA table_info({table})")]
            column = random.choice(columns)
            match random.randrange(7):
                case 0 if len(columns) > 1:
                    database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
                case 1:
                    database.execute(f"DELETE FROM {table} WHERE rowid % 2 = {random.choice((0, 1))}")
                case 2:
                    database.execute(f"INSERT INTO {table} SELECT * FROM {table}")
                case 3:
                    values = (
                        "CAST(x'ff80' AS TEXT)",
                        "x'ff'",
                        "NULL",
                        "1e300",
                        "9223372036854775807",
                        "-1",
                        "'x'",
                        "zeroblob(9)",
                    )
                    database.execute(f"UPDATE {table} SET {column} = {random.choice(values)} WHERE rowid % 2 = 0")
                case 4:
                    database.execute(
                        f"UPDATE {table} SET {column} = {column} + {random.choice((1, -1, 10**6, 10**18))}"
                    )
                case _:
                    odd = (*HOSTILE_TEXT, *INJECTIONS, 0, -1, 2**62, 1e300, None, b"\xff\xfe")
                    value = random.choice([one for one in odd if not isinstance(one, str) or "\ud800" not in one])
                    database.execute(f"UPDATE {table} SET {column} = ?", (value,))
