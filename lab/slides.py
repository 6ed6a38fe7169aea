"""Make slides from the pages of the lessons: `make slides`, then open build/slides/01_single_gpu.html in a browser.

    python -m lab.slides --out build/slides

There is no second copy of any text: a slide is a part of the page. ``<!-- slide -->`` above a paragraph, a list, a
table, a figure or a block of code of a page puts it on a slide, below the heading of its section. Marked blocks that
follow each other share a slide. If they do not fit on it, mark less.

Marp (https://marp.app) makes HTML of the slides, one file for each lesson, with its figures in it. Where a lesson has a
Mermaid diagram, the script that draws it is in the file too. So nothing needs a network.
"""

import argparse
import base64
import html
import json
import re
import subprocess
import sys
from pathlib import Path

from lab.site import REPOSITORY, without_comments

TOOLS = REPOSITORY / ".slides" / "node_modules"
MARK = "@slide"
THEME = """\
/* @theme workshop */
@import "default";
section { font-size: 26px; padding: 48px 60px 70px; justify-content: flex-start; display: flex; flex-direction: column }
section > * { flex-shrink: 0 }
h1, h2, h3 { color: #1b4f72; margin: 0 0 0.4em }
section > p:has(img) { flex: 1 1 0; min-height: 0 } /* a figure gets the height that the text leaves */
p > img { display: block; margin: 0 auto; max-width: 100%; height: 100%; object-fit: contain }
table { font-size: 0.85em } pre { font-size: 0.8em }
.mermaid { flex: 1 1 0; min-height: 0; text-align: center } .mermaid svg { max-width: 100%; height: 100% }
footer { font-size: 16px }
"""
DRAW = """\
<script>%s</script>
<script>
mermaid.initialize({ startOnLoad: false, theme: "neutral", htmlLabels: false, flowchart: { htmlLabels: false } });
mermaid.run({ querySelector: ".mermaid" });
</script>
"""


def blocks_of(text: str) -> list[str]:
    """Return the blocks of a page: headings, marks, code, and what stands between two empty lines."""
    text = without_comments(re.sub(r"^<!-- slide -->$", MARK, text, flags=re.MULTILINE))
    single = rf"#+ |{MARK}|</?(?:details|summary)"
    block = rf"^```.*?^```$|^(?:{single})[^\n]*$|(?:^(?!```|{single})[^\n]*\S[^\n]*\n?)+"
    return [found.strip("\n") for found in re.findall(block, text, re.DOTALL | re.MULTILINE)]


def shown(block: str, page: Path) -> str:
    """Return a block as a slide shows it: with its figures in it, and without links into the repository."""

    def embedded(found: re.Match) -> str:
        data = base64.b64encode((page.parent / found[2]).read_bytes()).decode()
        return f"![{found[1]}](data:image/png;base64,{data})"

    if block.startswith("```mermaid"):
        return f'<div class="mermaid">\n{html.escape(block.strip("`").removeprefix("mermaid").strip())}\n</div>'
    if block.startswith("```"):
        return block
    block = re.sub(r"!\[([^\]]*)\]\((\S+\.png)\)", embedded, block)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", block)


def deck(page: Path) -> str:
    """Return the slides of a page as one Markdown file for Marp."""
    slides: list[list[str]] = []
    heading, marked, joins = "", False, False
    for block in blocks_of(page.read_text()):
        if re.match("#+ ", block):
            heading, joins = block, block.startswith("# ")  # the title of the page is on a slide in any case
            if joins:
                slides.append([heading])
        elif block == MARK:
            marked = True
        elif marked:
            if not joins:
                slides.append([heading])
            slides[-1].append(shown(block, page))
            marked, joins = False, True
        else:
            joins = False
    head = (
        f'---\nmarp: true\ntheme: workshop\npaginate: true\nlang: en\nfooter: "{page.relative_to(REPOSITORY)}"\n---\n\n'
    )
    return head + "\n\n---\n\n".join("\n\n".join(slide) for slide in slides) + "\n"


def main() -> None:
    """Write the slides of all lessons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "slides", help="folder of the slides")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "theme.css").write_text(THEME)
    settings = {"html": True, "theme": "theme.css", "options": {"markdown": {"breaks": False}}}
    (out / ".marprc").write_text(json.dumps(settings))  # Marp reads it in the folder in which it is started
    decks = []
    for page in sorted(REPOSITORY.glob("0*/README.md")):
        decks.append(out / f"{page.parent.name}.md")
        decks[-1].write_text(deck(page))
    if not (TOOLS / ".bin" / "marp").exists():
        sys.exit(f"error: the Markdown is in {out}, but {TOOLS} has no Marp; `make slides` installs it")
    marp = [str(TOOLS / ".bin" / "marp"), *(file.name for file in decks)]
    subprocess.run(marp, cwd=out, stdin=subprocess.DEVNULL, check=True)
    mermaid = (TOOLS / "mermaid" / "dist" / "mermaid.min.js").read_text().replace("</script", "<\\/script")
    for file in decks:
        made = file.with_suffix(".html")
        before, end, after = made.read_text().rpartition("</body>")
        if 'class="mermaid"' in before:
            made.write_text(before + DRAW.replace("%s", mermaid) + end + after)
        print(made)


if __name__ == "__main__":
    main()
