"""LumosError: a mistake that the user can mend.

LumosError
├── InputError     a file or folder that cannot be read as what it should be
├── OptionError    an option or value that does not make sense here
└── CycleError     a graph whose dependencies go in a circle
"""

_LONGEST_WORD, _LONGEST_LINE, _MOST_LINES = 400, 2_000, 30  # of a message; paths are shorter


def printable(text: str) -> str:
    """A text from a file as it may go to a terminal: line ends stay, other control characters become spaces."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def shortened(text: str) -> str:
    """A message as a terminal can show it: long words and lines lose their middle, and only the first lines stay."""
    lines = text.split("\n")
    more = [f"… and {len(lines) - _MOST_LINES:,} more lines"] if len(lines) > _MOST_LINES else []
    words = (" ".join(_cut(word, _LONGEST_WORD) for word in line.split(" ")) for line in lines[:_MOST_LINES])
    return "\n".join([*(_cut(line, _LONGEST_LINE) for line in words), *more])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


class LumosError(Exception):
    """One line for the user: the value, the place and the way out. Exit code 2, no traceback."""

    def __str__(self) -> str:
        return shortened(super().__str__())


class InputError(LumosError):
    """A file or folder that cannot be read as what it should be."""


class OptionError(LumosError):
    """An option or value that does not make sense here."""


def unreadable(error: OSError) -> InputError:
    """What the user is told of a file that may not be opened, or that vanished."""
    return InputError(f"{error.filename}: {error.strerror}; check the path and its permissions")


class CycleError(LumosError):
    """A graph whose dependencies go in a circle, and so can never run."""


def check_seed(seed: int) -> None:
    """Refuse a seed that generators of random numbers do not take."""
    if not 0 <= seed < 1 << 63:
        raise OptionError(f"--seed {seed}: give a number from 0 to {(1 << 63) - 1:,}")
