"""The command line, one command per file."""

from lumos.safe_path import drop_current_folder

drop_current_folder()  # before anything else is imported: `python -m` and PYTHONPATH may have put it on sys.path
