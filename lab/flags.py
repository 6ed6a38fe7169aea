"""The command line of the small experiments: plain argparse that reports a mistake in one line."""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from workshop.config import require_positive
from workshop.errors import UserError
from workshop.paths import default_runs_dir, lesson_name

__all__ = ["Parser", "default_folder", "make_output_folder", "require_positive", "true_or_false"]


class Parser(argparse.ArgumentParser):
    """Shows the script's docstring as help, and raises `UserError` instead of printing the usage."""

    def __init__(self, description: str) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with what is wrong with the command line."""
        raise UserError(f"{re.sub(r'^argument ', '', message)} (see --help)")

    def add_switch(self, flag: str, text: str, *, default: bool = False) -> None:
        """Add a flag that takes true or false."""
        self.add_argument(flag, type=true_or_false, default=default, metavar="{true,false}", help=text)

    def add_out(self, files: str) -> None:
        """Add ``--out``, the folder for these files."""
        text = f"folder for {files} (default: %(default)s)"
        self.add_argument("--out", type=Path, default=default_folder(), metavar="DIR", help=text)


def default_folder() -> Path:
    """Return where the running script's results go: a folder for lesson and script under that of all runs."""
    return default_runs_dir() / lesson_name() / Path(sys.argv[0]).stem


def true_or_false(text: str) -> bool:
    """Read the value of a flag such as ``--quick true``."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"takes true or false, got '{text}'")
    return text.lower() == "true"


def make_output_folder(folder: Path) -> None:
    """Make the folder of the results, before anything is measured; `UserError` if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder with --out") from None
