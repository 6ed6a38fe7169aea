"""The command line of an experiment: plain argparse that reports a mistake in one line.

def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="trials of each configuration (default: 3)")
    arguments = parser.parse_args()

if __name__ == "__main__":
    run_reporting_user_errors(main)                                  # workshop.errors
"""

import argparse
import re
from typing import NoReturn

from workshop.errors import UserError


class Parser(argparse.ArgumentParser):
    """Shows the script's docstring as help, and raises `UserError` instead of printing the usage."""

    def __init__(self, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with what is wrong with the command line."""
        raise UserError(f"{re.sub(r'^argument ', '', message)} (see --help)")
