"""The command line of the small experiments: plain argparse that tells a mistake in one line."""

import argparse
import re
import tempfile
from pathlib import Path
from typing import NoReturn

from workshop.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises `UserError` in place of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """Tell what is wrong with the command line."""
        raise UserError(f"{re.sub(r'^argument ', '', message)} (see --help)")


def true_or_false(text: str) -> bool:
    """Read the value of a flag such as ``--quick true``.

    Raises:
        argparse.ArgumentTypeError: anything but true or false.
    """
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"takes true or false, got '{text}'")
    return text.lower() == "true"


def make_output_folder(folder: Path) -> None:
    """Make the folder of the results before anything is measured, and see that files can be written there.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder with --out") from None
