"""LumosError: a mistake that the user can mend.

LumosError
├── InputError     a file or folder that cannot be read as what it should be
├── OptionError    an option or value that does not make sense here
└── CycleError     a graph whose dependencies go in a circle
"""


def printable(text: str) -> str:
    """A text from a file as it may go to a terminal: line ends stay, other control characters become spaces."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


class LumosError(Exception):
    """One line for the user: the value, the place and the way out. Exit code 2, no traceback."""


class InputError(LumosError):
    """A file or folder that cannot be read as what it should be."""


class OptionError(LumosError):
    """An option or value that does not make sense here."""


class CycleError(LumosError):
    """A graph whose dependencies go in a circle, and so can never run."""


def check_seed(seed: int) -> None:
    """Refuse a seed that generators of random numbers do not take."""
    if not 0 <= seed < 1 << 63:
        raise OptionError(f"--seed {seed}: give a number from 0 to {(1 << 63) - 1:,}")
