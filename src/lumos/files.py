"""Files of the user: read within limits; written as a whole or not at all, in the format of their extension."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lumos.errors import InputError, OptionError, printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a cell begins with that spreadsheets calculate
FORMS = (".html", ".json", ".csv", ".trace.json", ".trace.json.gz")


def open_file(path: Path, advice: str, place: str = "") -> IO[bytes]:
    """A file of the user, opened for reading; InputError for what is none: devices and pipes may never end.

    Messages begin with `place`, the path by default, and end with `advice`.
    """
    place = place or str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make us wait
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISREG(kind):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InputError(f"{place}: cannot be read ({getattr(error, 'strerror', None) or error}); {advice}") from None
    what = "a folder" if stat.S_ISDIR(kind) else "a device or a pipe"
    raise InputError(f"{place}: cannot be read ({what}, not a file); {advice}")


def read_file(path: Path, most: int, advice: str, place: str = "") -> bytes:
    """The bytes of a file of the user, if it is a file and has at most so many; InputError as of `open_file`."""
    place = place or str(path)
    try:
        with open_file(path, advice, place) as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{place}: cannot be read ({error.strerror or error}); {advice}") from None
    if len(content) > most:
        raise InputError(f"{place}: larger than {most >> 20} MiB, too large for such a file; {advice}")
    return content


def stamp_of(path: Path) -> int:
    """When a file was last changed: whether it has to be read again. 0 where reading it will say what is wrong."""
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


def form_of(path: Path, forms: Sequence[str] = FORMS, option: str = "-o") -> str:
    """The format that a file name asks for; `option` is what it was given with."""
    for form in sorted(forms, key=len, reverse=True):
        if path.name.endswith(form):
            return form
    choice = f"one of {', '.join(forms)}" if len(forms) > 1 else forms[0]
    raise OptionError(f"{option} {path}: the extension must name the format; use {choice}")


@contextmanager
def whole_file(path: Path, follow: bool = True) -> Iterator[IO[bytes]]:
    """A file that appears under its name only once everything is written.

    What a link points to is replaced, not the link, unless `follow` is false: for names that the user did not give.
    A file that was there keeps its permissions; a new one gets those of every new file of this user.
    """
    if not path.parent.is_dir():
        raise OptionError(f"-o {path}: the folder {path.parent} does not exist; create it first")
    try:
        target = path.resolve() if follow else path.parent.resolve() / path.name
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "it is read-only")
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise OptionError(f"-o {path}: cannot be written ({getattr(error, 'strerror', error)})") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, _mode_for(target))
        os.replace(temporary, target)
    except OSError as error:
        raise OptionError(f"-o {path}: cannot be written ({error.strerror})") from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def write_files(folder: Path, texts: Mapping[str, str], option: str) -> None:
    """Write all files of a folder, or none of them; the folder is made if it is not there.

    The user named the folder, not the files: a link in it is replaced, and what it points to stays as it was.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".lumos-", dir=folder) as temporary:
            for name, text in texts.items():
                (Path(temporary) / name).write_bytes(text.encode(errors="replace"))
            for name in texts:
                _refuse_to_replace(folder / name)
            for name in texts:
                os.chmod(Path(temporary) / name, _mode_for(folder / name))
                os.replace(Path(temporary) / name, folder / name)
    except OSError as error:
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise OptionError(f"{option} {folder}: cannot be written ({error.strerror}); name another folder") from None


def _refuse_to_replace(path: Path) -> None:
    if path.is_symlink() or not path.exists():
        return
    if not path.is_file():
        raise IsADirectoryError(errno.EISDIR, f"{path.name} is not a file")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, f"{path.name} is read-only")


def _mode_for(path: Path) -> int:
    """The permissions of the file that is to be replaced, or those that a new file gets from the umask."""
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            return stat.S_IMODE(mode)
    except FileNotFoundError:
        pass
    mask = os.umask(0o077)  # it can be read only by setting it
    os.umask(mask)
    return 0o666 & ~mask


def json_of(answer: dict[str, Any]) -> bytes:
    """The answer as indented JSON, whatever its names are: those of files need not be text."""
    import orjson  # here, so that `lumos sample --script` runs where it is not installed

    try:
        return orjson.dumps(answer, option=orjson.OPT_INDENT_2)
    except TypeError:  # half a character, as of a file name with bytes that are no UTF-8
        return json.dumps(answer, indent=2, ensure_ascii=True).encode()


def write_json(path: Path, answer: dict[str, Any]) -> None:
    """The answer as JSON."""
    with whole_file(path) as file:
        file.write(json_of(answer))


def write_csv(path: Path, rows: Iterable[dict[str, Any]], last: Sequence[str] = (), names: Sequence[str] = ()) -> None:
    """Rows of a table as CSV; a column is there if it is named or any row has it, and those of `last` come last."""
    rows = list(rows)
    text = io.StringIO()
    if rows or names:
        names = list(dict.fromkeys((*names, *(name for row in rows for name in row))))
        writer = csv.DictWriter(text, [*(name for name in names if name not in last), *last])
        writer.writerow({name: _cell(name) for name in names})
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    with whole_file(path) as file:
        file.write(text.getvalue().encode(errors="replace"))


def _cell(value: Any) -> Any:
    """A value as a spreadsheet may see it: a name that would be taken for a formula is quoted."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if value.startswith(_FORMULA) else text
    return text


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Rows of a table as Parquet, with these columns if there is no row."""
    import polars

    content = io.BytesIO()
    table = polars.DataFrame(list(rows), infer_schema_length=None) if rows else polars.DataFrame(schema=list(names))
    table.write_parquet(content)
    with whole_file(path) as file:
        file.write(content.getvalue())


def check_output(path: Path | None, source: Path | None, forms: Sequence[str] = FORMS, option: str = "-o") -> None:
    """Refuse an output that cannot be written before any work is done for it."""
    if path is None:
        return
    form_of(path, forms, option)
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: the folder {path.parent} does not exist; create it first")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise OptionError(f"{option} {path}: that is the input itself; give another name")


Writer = Callable[[Path], None]


def write_as(path: Path, writers: dict[str, Writer]) -> None:
    """Write a file with the writer for its format."""
    form = form_of(path, tuple(dict.fromkeys((*FORMS, *writers))))
    if form not in writers:
        raise OptionError(f"-o {path}: this answer cannot be written as {form}; use one of {', '.join(writers)}")
    writers[form](path)
