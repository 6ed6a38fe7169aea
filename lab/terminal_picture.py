"""Make a picture of what a command prints on a terminal, with its colors: an SVG for the pages.

python -m lab.terminal_picture results/drawings/doctor_report.svg rankdoctor tools/rankdoctor/docs/example.py
"""

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 148
"""columns"""


def printed(command: list[str]) -> str:
    """Return what a command prints on a terminal, with escape sequences."""
    chunks: list[bytes] = []

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        chunks.append(data)
        return b"."  # shows that it runs

    pty.spawn(command, read)
    text = b"".join(chunks).decode(errors="replace").replace("\r\n", "\n")
    # A progress line is written again and again after a carriage return: its last state counts.
    return "\n".join(line.rpartition("\r")[2].rpartition("\x1b[K")[2] for line in text.split("\n"))


def main() -> None:
    """Run the command; write the picture."""
    out, *command = sys.argv[1:]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    shown = " ".join(word if index else Path(word).name for index, word in enumerate(command))
    console.print(Text(f"$ {shown}", style="bold"))
    console.print(Text.from_ansi(printed(command)))
    svg = console.export_svg(title="", theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of another site: the reader's own will do
    Path(out).write_text(svg)
    print(f"\n{out}")


if __name__ == "__main__":
    main()
