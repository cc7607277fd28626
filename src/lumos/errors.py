"""LumosError: a mistake that the user can mend.

LumosError
├── InputError     a file or folder that cannot be read as what it should be
├── OptionError    an option or value that does not make sense here
└── CycleError     a graph whose dependencies go in a circle
"""


class LumosError(Exception):
    """One line for the user: the value, the place and the way out. Exit code 2, no traceback."""


class InputError(LumosError):
    """A file or folder that cannot be read as what it should be."""


class OptionError(LumosError):
    """An option or value that does not make sense here."""


class CycleError(LumosError):
    """A graph whose dependencies go in a circle, and so can never run."""
