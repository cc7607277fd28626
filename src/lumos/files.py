"""Output files: written as a whole or not at all, in the format of their extension."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson

from lumos.errors import OptionError

FORMS = (".html", ".json", ".csv", ".trace.json", ".trace.json.gz")


def form_of(path: Path, forms: Sequence[str] = FORMS) -> str:
    """The format that a file name asks for."""
    for form in sorted(forms, key=len, reverse=True):
        if path.name.endswith(form):
            return form
    choice = f"one of {', '.join(forms)}" if len(forms) > 1 else forms[0]
    raise OptionError(f"-o {path}: the extension must name the format; use {choice}")


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only once everything is written."""
    if not path.parent.is_dir():
        raise OptionError(f"-o {path}: the folder {path.parent} does not exist; create it first")
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OptionError(f"-o {path}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise OptionError(f"-o {path}: cannot be written ({error.strerror})") from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def write_json(path: Path, answer: dict[str, Any]) -> None:
    """The answer as JSON."""
    with whole_file(path) as file:
        file.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2))


def write_csv(
    path: Path, rows: Iterable[dict[str, Any]], last: Sequence[str] = (), names: Sequence[str] = ()
) -> None:
    """Rows of a table as CSV; a column is there if it is named or any row has it, and those of `last` come last."""
    rows = list(rows)
    text = io.StringIO()
    if rows or names:
        names = list(dict.fromkeys((*names, *(name for row in rows for name in row))))
        writer = csv.DictWriter(text, [*(name for name in names if name not in last), *last])
        writer.writeheader()
        writer.writerows(rows)
    with whole_file(path) as file:
        file.write(text.getvalue().encode())


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Rows of a table as Parquet, with these columns if there is no row."""
    import polars

    content = io.BytesIO()
    table = polars.DataFrame(list(rows), infer_schema_length=None) if rows else polars.DataFrame(schema=list(names))
    table.write_parquet(content)
    with whole_file(path) as file:
        file.write(content.getvalue())


def check_output(path: Path | None, source: Path | None, forms: Sequence[str] = FORMS) -> None:
    """Refuse an output that cannot be written before any work is done for it."""
    if path is None:
        return
    form_of(path, forms)
    if not path.parent.is_dir():
        raise OptionError(f"-o {path}: the folder {path.parent} does not exist; create it first")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise OptionError(f"-o {path}: that is the input itself; give another name")


Writer = Callable[[Path], None]


def write_as(path: Path, writers: dict[str, Writer]) -> None:
    """Write a file with the writer for its format."""
    form = form_of(path, tuple(dict.fromkeys((*FORMS, *writers))))
    if form not in writers:
        raise OptionError(f"-o {path}: this answer cannot be written as {form}; use one of {', '.join(writers)}")
    writers[form](path)
