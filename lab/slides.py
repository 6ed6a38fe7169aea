"""Make slides from the pages of the lessons: `make slides`, then open build/slides/01_single_gpu.html in a browser.

    python -m lab.slides --out build/slides                # Markdown and HTML
    python -m lab.slides --out build/slides --html false   # Markdown only: Marp is not needed
    python -m lab.slides --out build/slides --keep true    # HTML of the Markdown that you have edited

There is no second copy of any text: a slide is a part of the page. What becomes a slide:

- the heading and its "Why"; before the first section, every list and table apart from the table of minutes;
- a command (a ``bash`` block), with the sentence that announces it, and the output that follows it;
- a figure, with its source;
- a question ("Your guess", "Exercise"), and on the next slide what is folded away after it: its figures, tables, lists
  and code, and its first paragraph;
- "Find the fault", with the minutes of the exercise;
- the lists and tables of the section "Key points" or "What you learned".

All other text of the page is in the notes of the presenter, on the slide that it belongs to. ``<!-- slide -->`` above a
block of a page puts that block on a slide all the same, and ``<!-- no slide -->`` leaves it out.

Marp (https://marp.app) makes HTML of the slides, one file for each lesson, with its figures in it. Where a lesson has a
Mermaid diagram, the script that draws it is in the file too. So nothing needs a network any more.
"""

import argparse
import base64
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.site import COG, REPOSITORY, title_of
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError

TOOLS = REPOSITORY / ".slides" / "node_modules"
WIDTH, HEIGHT = 1160, 536
"""pixels of a slide of 1280 x 720 that blocks can fill, below the title and above the footer"""
SIZES = (34, 28, 25, 22)
"""font sizes in pixels, of 720 that a slide is high: the largest with which everything fits"""
TITLE = 36
"""the size of a title, whose first line is not part of HEIGHT"""
CODE = 0.8
"""size of code, relative to that of the text"""
LETTER, MONOSPACE = 0.54, 0.605
"""mean width of a letter, relative to the size of the font; estimated, and rather too wide than too narrow"""
LOWEST_FIGURE, LOWEST_DIAGRAM = 400, 500
QUESTION = re.compile(r"\*\*(Your guess|Exercise \d+)\b")
LAST_SECTIONS = ("Key points", "What you learned")
SOURCE = re.compile(r"^\*(?!\*|Optional)[^*]+\.\*(?=\s|$)", re.MULTILINE)
IMAGE = re.compile(r"!\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")

THEME = """\
/* @theme workshop */
section {
  width: 1280px; height: 720px; padding: 44px 60px 60px; background: #fff; color: #222;
  font: 28px/1.4 "Noto Sans", "Liberation Sans", Arial, Helvetica, sans-serif;
  display: flex; flex-direction: column; align-items: stretch; justify-content: flex-start;
}
section.large { font-size: 34px } section.middle { font-size: 25px } section.small { font-size: 22px }
section.lead { justify-content: center }
section > * { flex-shrink: 0 }
h1 { font-size: 52px; line-height: 1.2; color: #1b4f72; margin: 0 0 0.4em }
h2 { font-size: 36px; line-height: 1.2; color: #1b4f72; margin: 0 0 0.45em }
p, ul, ol, table, pre { margin: 0 0 0.55em } ul, ol { padding-left: 1.3em } li { margin-bottom: 0.2em }
code { font-family: "DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace; font-size: 0.88em;
  background: #f1f3f5; padding: 0 0.15em }
pre { background: #f1f3f5; border-left: 6px solid #2e86c1; padding: 0.5em 0.9em; overflow: hidden;
  font-size: 0.8em; line-height: 1.35 }
pre code { font-size: 1em; padding: 0; white-space: pre-wrap; overflow-wrap: anywhere }
p code, li code { white-space: nowrap }
table { border-collapse: collapse; font-size: 0.88em; line-height: 1.3; display: table; width: auto }
th, td { border: 1px solid #ccc; padding: 0.18em 0.5em; vertical-align: top; background: #fff }
th { background: #eaf2f8; text-align: left }
small { display: block; font-size: 16px; line-height: 1.3; color: #555; font-style: italic }
footer { position: absolute; left: 60px; bottom: 20px; font-size: 16px; line-height: 1.2; color: #666 }
section::after { position: absolute; padding: 0; right: 60px; bottom: 20px; font-size: 16px; line-height: 1.2;
  color: #666 }
img { display: block; margin: 0 auto } .mermaid { text-align: center } .mermaid svg { max-width: 100%; height: 100% }
.hljs-comment { color: #5f6b76 } .hljs-string { color: #1e6b3a } .hljs-keyword, .hljs-built_in { color: #8e2a6b }
.hljs-addition { color: #14532d; background: #e3f4e6 } .hljs-deletion { color: #7f1d1d; background: #fbe7e7 }
"""
DRAW = """\
<style>@media print { .mermaidTooltip { display: none } }</style>
<script>%s</script>
<script>
mermaid.initialize({
  startOnLoad: false, theme: "neutral", htmlLabels: false,
  flowchart: { htmlLabels: false, wrappingWidth: 150, nodeSpacing: 25, rankSpacing: 30, diagramPadding: 2 },
  fontFamily: "Arial, sans-serif", themeVariables: { fontSize: "18px", fontFamily: "Arial, sans-serif" },
});
mermaid.run({ querySelector: ".mermaid" });
</script>
"""


@dataclass(frozen=True)
class Block:
    """A part of a page between two empty lines, or the edge of a folded part."""

    kind: str
    """heading, text, list, table, figure, code, fold, unfold or mark"""
    text: str
    language: str = ""
    """of code"""


@dataclass
class Slide:
    """What is on a slide, and what the presenter reads beside it."""

    title: str
    where: str
    """the page and the section"""
    blocks: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: bool = False
    size: int = SIZES[0]


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the blocks of a page, without what makes its tables and figures."""
    text = COG.sub("", text)
    text = re.sub(r"^(<details>)?\s*<summary>(.*?)</summary>$", r"\n@fold \2\n", text, flags=re.MULTILINE)
    text = re.sub(r"^</details>$", r"\n@unfold\n", text, flags=re.MULTILINE)
    code: str | None = None
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if code is not None:
            if line.strip() == "```":
                yield Block("code", "\n".join(lines), code)
                code, lines = None, []
            else:
                lines.append(line)
            continue
        fence = re.fullmatch(r"```([\w-]*)", line.strip())
        apart = fence or not line.strip() or line.startswith(("#", "@fold ", "@unfold"))
        # A list or a table can follow a paragraph without an empty line.
        begins = re.match(r"([-*]|\d+\.) |\|", line) and lines and _kind(lines[0]) == "text"
        if (apart or begins) and lines:
            yield _block(lines)
            lines = []
        if fence:
            code = fence[1]
        elif line.startswith("#"):
            yield Block("heading", line)
        elif line.startswith("@fold "):
            yield Block("fold", line.removeprefix("@fold "))
        elif line.startswith("@unfold"):
            yield Block("unfold", "")
        elif line.strip():
            lines.append(line)


def _kind(line: str) -> str:
    if re.match(r"([-*]|\d+\.) ", line):
        return "list"
    return {"|": "table", "!": "figure", "<": "mark"}.get(line[0], "text")


def _block(lines: list[str]) -> Block:
    return Block(_kind(lines[0]), "\n".join(lines))


def shown(text: str) -> str:
    """Return Markdown as a slide shows it: links to files of the repository are text, links to elsewhere are links."""
    text = re.sub(r"\s*\(\[exercise\s+page\]\([^)]*\)\)", "", text)
    text = re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:)[^)]*\)", r"\1", text)
    if _kind(text) in ("text", "list"):  # Marp would keep the line breaks of the page
        text = re.sub(r"\n *(?![-*] |\d+\. |\s)", " ", text)
    return text


def exercise_minutes(text: str, lesson: Path) -> str:
    """Return which exercises a text starts, each with its minutes."""
    names = re.findall(r"exercise\.py start (\w+)", text)
    minutes = {
        name: tomllib.loads((lesson / "exercises" / name / "about.toml").read_text())["minutes"]
        for name in names
        if (lesson / "exercises" / name / "about.toml").is_file()
    }
    return ", ".join(f"`{name}`: {number} minutes" for name, number in minutes.items())


class Selection:
    """The slides of a page, in the order of the page."""

    def __init__(self, page: Path) -> None:
        self.page, self.section, self.optional = page, "", False
        self.slides: list[Slide] = []
        self.waiting: list[str] = []  # notes for the next slide of this section
        self.asked = False  # the last question has no answer yet
        self.follows = ""  # what the next block may join: "question", "command" or "figure"
        self.lead = ""  # the paragraph before, if it announces what comes next

    def of(self, blocks: list[Block]) -> list[Slide]:
        """Return the slides."""
        mark = ""
        inside, skipping = False, 0
        for block in blocks:
            if block.kind == "mark":
                mark = {"<!-- slide -->": "show", "<!-- no slide -->": "hide"}.get(block.text, mark)
                continue
            force, mark = mark, ""
            if skipping:
                skipping += {"fold": 1, "unfold": -1}.get(block.kind, 0)
            elif block.kind == "fold":
                inside = (self.asked or force == "show") and force != "hide"
                skipping = 0 if inside else 1
                if inside:
                    self.add(block.text)
                self.asked, self.first_text = False, True
            elif block.kind == "unfold":
                inside, self.follows = False, ""
            elif force == "hide":
                self.note(block)
            elif inside:
                self.answer(block, force)
            else:
                self.visible(block, force)
        return self.slides

    def add(self, title: str = "", *content: Block) -> Slide:
        """Begin a slide, whose title is that of the section unless another is given."""
        place = self.page.relative_to(REPOSITORY).as_posix()
        name = self.section + (" (optional)" if self.optional else "")
        if title and self.section:
            name = f"{name} {title}" if name.endswith("?") else f"{name}: {title[:1].lower() + title[1:]}"
        elif title or not self.section:
            name = title or (self.slides[0].title.partition(":")[0] if self.slides else "")
        slide = Slide(name, f"{place}, {self.section}" if self.section else place, list(content), self.waiting)
        self.waiting, self.lead = [], ""
        self.slides.append(slide)
        return slide

    def note(self, block: Block) -> None:
        """Keep a block for the presenter: with the slide before, if the section has one, else with the next one."""
        text = block.text if block.kind != "code" else ""
        here = self.slides and (not self.section or self.slides[-1].where.endswith(f", {self.section}"))
        if text:
            (self.slides[-1].notes if here else self.waiting).append(text)

    def answer(self, block: Block, force: str) -> None:
        """Take what is folded away after a question."""
        slide = self.slides[-1]
        if block.kind != "text":
            slide.blocks.append(block)
            return
        source = sources(block.text)
        rest = SOURCE.sub("", block.text).strip()
        if rest and (self.first_text or force == "show"):
            self.first_text = False
            slide.blocks.append(Block("text", rest))
        elif rest:
            self.note(block)
            if slide.blocks and slide.blocks[-1].kind in ("text", "source"):
                return  # the source of what is in the notes
        if source:
            slide.blocks.append(Block("source", source))

    def visible(self, block: Block, force: str) -> None:
        """Take what is not folded away."""
        follows, self.follows = self.follows, ""
        if block.kind == "heading":
            self.heading(block.text)
        elif block.kind == "text":
            self.text(block, force, follows)
        elif block.kind == "code" and block.language == "bash":
            if follows in ("fault", "question"):
                self.slides[-1].blocks.append(block)
                if minutes := exercise_minutes(block.text, self.page.parent):
                    self.slides[-1].blocks.append(Block("text", minutes))
            else:
                self.add("", *self.announced(), block)
            self.follows = "command"
        elif self.is_output(block):
            self.slides[-1].blocks.append(block)
        elif block.kind == "figure" or block.language == "mermaid":
            self.add("", *self.announced(), block)
            self.follows = "figure"
        elif block.kind in ("list", "table") and follows == "question":
            self.slides[-1].blocks.append(block)
            self.follows = "figure"  # the source may follow
        elif force == "show" or self.is_selected(block):
            self.add("", *self.announced(), block)
            self.follows = "figure"  # the source may follow
        else:
            self.note(block)

    def is_selected(self, block: Block) -> bool:
        """Return whether a list or a table becomes a slide because of where it stands."""
        if block.kind not in ("list", "table"):
            return False
        if "exercise.py start" in block.text:
            return True
        return self.section in LAST_SECTIONS or not (self.section or block.text.startswith("| section"))

    def is_output(self, block: Block) -> bool:
        """Return whether this is what the command on the slide before prints."""
        if block.language != "text" or "# not tested" in block.text or not self.slides:
            return False
        before = self.slides[-1]
        return before.where.endswith(f", {self.section}") and [b.language for b in before.blocks[-1:]] == ["bash"]

    def announced(self) -> list[Block]:
        """Return the sentence before, if it announces this block."""
        return [Block("text", self.lead)] if self.lead else []

    def heading(self, line: str) -> None:
        """Begin a section, or the page."""
        if line.startswith("# "):
            self.add(re.sub(r"[`*]", "", line.removeprefix("# "))).first = True
            return
        self.section, self.optional, self.asked, self.lead = line.lstrip("# "), False, False, ""
        if self.waiting:  # of a section without slides
            self.slides[-1].notes += self.waiting
            self.waiting = []

    def text(self, block: Block, force: str, follows: str) -> None:
        """Take a paragraph."""
        text = block.text
        self.optional |= bool(re.match(r"\*Optional\b", text))
        if text.startswith("**Why.**"):
            self.slides[0].blocks.append(block)
        elif QUESTION.match(re.sub(r"^\*Optional\.\*\s+", "", text)):
            self.add("", block)
            self.asked, self.follows = True, "question"
        elif text.startswith("**Find the fault") or ("**Find the fault" in text and "exercise.py start" in text):
            minutes = exercise_minutes(text, self.page.parent)
            extra = [Block("text", minutes)] if minutes else []
            self.add("", block, *extra)
            self.follows = "fault"
        elif force == "show":
            self.add("", block)
            self.follows = "question"  # a list after it is part of it
        else:
            self.note(block)
            if follows == "figure" and (source := sources(text)):
                self.slides[-1].blocks.append(Block("source", source))
            if follows == "fault":
                self.follows = "fault"
            last = re.split(r"(?<=[.)?]) (?=[A-Z`*(])", re.sub(r"\s*\n\s*", " ", text))[-1]
            self.lead = last if re.search(r":$|^\*\*[^*]+\*\*$| you can$", last) else ""


def sources(text: str) -> str:
    """Return the sentences of a paragraph that say where figures come from: in italics, at the start of a line."""
    return "\n".join(SOURCE.findall(text))


def free_height(slide: Slide, size: int) -> float:
    """Return how many pixels the blocks of a slide may need with this size of letters."""
    lines = math.ceil(len(slide.title) * TITLE * 0.62 / WIDTH)
    free = HEIGHT - (lines - 1) * 1.2 * TITLE
    if slide.first:
        free -= 80
    return 0.7 * free if size > 28 else free  # large letters only where there is little to read


def height_of(block: Block, size: int) -> float:
    """Estimate how many pixels of a slide a block needs."""
    line, after = 1.4 * size, 0.55 * size
    if block.kind == "source":
        return math.ceil(len(block.text) * 16 * LETTER / WIDTH) * 21
    if block.kind == "figure":
        return LOWEST_FIGURE
    if block.language == "mermaid":
        return LOWEST_DIAGRAM
    if block.kind == "code":
        code = wrapped(block.text, columns_of(size)) if block.language == "bash" else block.text
        rows = sum(max(1, math.ceil(len(row) / columns_of(size))) for row in code.splitlines())
        return rows * 1.35 * CODE * size + 0.8 * size + after
    if block.kind == "table":
        return sum(row_heights(block.text, size)) + after
    if block.kind == "list":
        return sum(_lines(item, WIDTH - 1.4 * size, size) * line + 0.2 * size for item in items_of(block.text)) + after
    return _lines(block.text, WIDTH, size) * line + after


def columns_of(size: int) -> int:
    """Return how many characters of code a line of a slide has."""
    return int((WIDTH - 6 - 1.8 * CODE * size) / (MONOSPACE * CODE * size))


def wrapped(commands: str, columns: int) -> str:
    """Return commands with backslashes at the ends of lines where a slide is not wide enough for them."""
    lines = []
    for line in commands.splitlines():
        while len(line) > columns and (cut := max(line.rfind(" --", 5, columns), line.rfind(" ../", 5, columns), 0)):
            lines.append(line[:cut] + " \\")
            line = "    " + line[cut + 1 :]
        lines.append(line)
    return "\n".join(lines)


def _lines(text: str, width: float, size: float) -> int:
    plain = re.sub(r"\]\([^)]*\)|[*`\[]|<br>", "", shown(text))
    return max(1, math.ceil(len(plain) * LETTER * size / width))


def items_of(text: str) -> list[str]:
    """Return the items of a list."""
    return re.split(r"\n(?=[-*] |\d+\. )", text)


def row_heights(text: str, size: int) -> list[float]:
    """Estimate the heights of the rows of a table, the heading included; a browser chooses similar widths."""
    rows = [[shown(cell).strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in text.splitlines()]
    rows = [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    letter, padding = 0.88 * size * LETTER * 1.05, 0.88 * size + 2
    columns = list(zip(*rows, strict=True))
    widest = [max(len(cell) for cell in column) * letter for column in columns]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) * letter for column in columns]
    free = WIDTH - padding * len(columns)
    if sum(widest) > free:  # each column gets what its longest word needs, and a share of the rest
        share = max(0.0, (free - sum(least)) / (sum(widest) - sum(least)))
        widest = [low + share * (high - low) for low, high in zip(least, widest, strict=True)]
    heights = []
    for row in rows:
        lines = max(math.ceil(len(cell) * letter / (widest[i] + 1)) for i, cell in enumerate(row))
        heights.append(max(lines, 1) * 1.3 * 0.88 * size + 0.36 * 0.88 * size + 2)
    return heights


def split(block: Block, size: int, free: float) -> tuple[Block, Block] | None:
    """Cut a list, a table or code so that the first part has at most ``free`` pixels; None if that cannot be done."""
    if block.kind == "list":
        parts, head, join = items_of(block.text), [], "\n"
    elif block.kind == "table":
        first, rule, *parts = block.text.splitlines()
        head, join = [first, rule], "\n"
    elif block.kind == "code" and block.language != "mermaid":
        parts, head, join = block.text.splitlines(), [], "\n"
    else:
        return None
    for count in range(len(parts) - 1, 0, -1):
        part = replace(block, text=join.join([*head, *parts[:count]]))
        if height_of(part, size) <= free:
            return part, replace(block, text=join.join([*head, *parts[count:]]))
    return None


def fitted(slide: Slide) -> list[Slide]:
    """Return a slide in the largest font with which it fits; in the smallest one, cut into several if it does not."""
    for size in SIZES:
        if sum(height_of(block, size) for block in slide.blocks) <= free_height(slide, size):
            return [replace(slide, size=size)]
    parts: list[list[Block]] = [[]]
    full = free_height(slide, SIZES[-1]) - 20
    rest, size, free = list(slide.blocks), SIZES[-1], full
    while rest:
        block = rest.pop(0)
        needed = height_of(block, size)
        if needed <= free:
            parts[-1].append(block)
            free -= needed
        elif (cut := split(block, size, free)) and (len(parts[-1]) == 0 or free > full / 3):
            parts[-1].append(cut[0])
            rest.insert(0, cut[1])
            free = 0
        elif parts[-1]:
            parts.append([])
            rest.insert(0, block)
            free = full
        else:  # larger than a slide, and nothing to cut
            parts[-1].append(block)
            free = 0
    if len(parts) == 1:
        return [replace(slide, size=size)]
    titles = [slide.title] + [f"{slide.title} ({number})" for number in range(2, len(parts) + 1)]
    cut_slides = [replace(slide, title=t, blocks=part, notes=[]) for t, part in zip(titles, parts, strict=True)]
    cut_slides[0].notes = slide.notes
    return [shorter for part in cut_slides for shorter in fitted(part)]


def png_size(file: Path) -> tuple[int, int]:
    """Return width and height of a PNG file in pixels."""
    return struct.unpack(">II", file.read_bytes()[16:24])


def as_markdown(slide: Slide, page: Path) -> str:
    """Return the Markdown of a slide for Marp."""
    used = sum(height_of(block, slide.size) for block in slide.blocks if not _is_flexible(block))
    flexible = sum(_is_flexible(block) for block in slide.blocks)
    free = max((free_height(slide, SIZES[-1]) - used) / flexible - 12, LOWEST_FIGURE / 2) if flexible else 0
    kinds = ["lead"] if slide.first else []
    kind = " ".join([*kinds, *{34: ["large"], 25: ["middle"], 22: ["small"]}.get(slide.size, [])])
    lines = [f"<!-- _class: {kind} -->"] if kind else []
    lines += [f"<!-- _footer: {json.dumps(slide.where)} -->", "", f"{'#' if slide.first else '##'} {slide.title}", ""]
    for block in slide.blocks:
        lines += [_rendered(block, page, free, slide.size), ""]
    if slide.notes:
        notes = "\n\n".join(shown(note) for note in slide.notes).replace("-->", "->")
        lines += [f"<!--\nThe page says ({slide.where}):\n\n{notes}\n-->", ""]
    return "\n".join(lines)


def _is_flexible(block: Block) -> bool:
    return block.kind == "figure" or block.language == "mermaid"


def _rendered(block: Block, page: Path, free: float, size: int) -> str:
    if block.kind == "figure":
        found = IMAGE.match(block.text)
        assert found, f"{page}: {block.text[:80]}"
        file = (page.parent / found[2]).resolve()
        width, height = png_size(file)
        scale = min(WIDTH / width, free / height)
        return f"![w:{width * scale:.0f} h:{height * scale:.0f} {found[1]}]({file})"
    if block.language == "mermaid":
        source = "\n".join(line for line in block.text.splitlines() if line.strip())
        # A slide is wider than high: a chain goes from left to right, and rows of nodes are below each other.
        before, after = ("LR", "TB") if "subgraph" in source else ("TB", "LR")
        source = source.replace(f"flowchart {before}", f"flowchart {after}")
        source = source.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return f'<div class="mermaid" style="height: {free:.0f}px">\n{source}\n</div>'
    if block.kind == "code":
        language = {"bash-file": "bash"}.get(block.language, block.language)
        code = wrapped(block.text, columns_of(size)) if block.language == "bash" else block.text
        return f"```{language}\n{code}\n```"
    if block.kind == "source":
        return f"<small>{shown(block.text).replace('*', '')}</small>"
    return shown(block.text)


def deck(page: Path) -> str:
    """Return the slides of a page as one Markdown file for Marp."""
    slides = [part for slide in Selection(page).of(list(blocks_of(page.read_text()))) for part in fitted(slide)]
    title = json.dumps(title_of(page.relative_to(REPOSITORY)))
    head = f"---\nmarp: true\ntheme: workshop\npaginate: true\nlang: en\ntitle: {title}\n---\n"
    return head + "\n---\n\n".join("\n" + as_markdown(slide, page) for slide in slides)


def self_contained(html: str) -> str:
    """Return the HTML of a deck with its figures in it, and with what draws diagrams if it has any."""

    def embedded(found: re.Match) -> str:
        return f'src="data:image/png;base64,{base64.b64encode(Path(found[1]).read_bytes()).decode()}"'

    html = re.sub(r'src="(/[^"]+\.png)"', embedded, html)
    if 'class="mermaid"' in html:
        script = (TOOLS / "mermaid" / "dist" / "mermaid.min.js").read_text().replace("</script", "<\\/script")
        before, end, after = html.rpartition("</body>")  # the script of Marp has others in its texts
        html = before + DRAW.replace("%s", script) + end + after
    return html


def main() -> None:
    """Write the slides of all lessons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "slides", help="folder of the slides")
    parser.add_argument("--html", choices=["true", "false"], default="true", help="run Marp (default: true)")
    parser.add_argument("--keep", choices=["true", "false"], default="false", help="keep the Markdown (default: false)")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.keep == "false":
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "theme.css").write_text(THEME)
        for page in sorted(REPOSITORY.glob("0*/README.md")):
            (out / f"{page.parent.name}.md").write_text(deck(page))
    decks = sorted(out.glob("*.md"))
    if not decks:
        raise UserError(f"there is no Markdown in {out}; leave out --keep")
    if arguments.html == "true" and not (TOOLS / ".bin" / "marp").exists():
        raise UserError(f"{TOOLS} has no Marp; `make slides` installs it")
    if arguments.html == "true":
        marp = [
            str(TOOLS / ".bin" / "marp"),
            "--no-config-file",
            "--html",
            "--allow-local-files",
            "--theme",
            "theme.css",
        ]
        status = subprocess.run([*marp, *(file.name for file in decks)], cwd=out, stdin=subprocess.DEVNULL).returncode
        if status:
            sys.exit(status)
        for file in decks:
            html = file.with_suffix(".html")
            html.write_text(self_contained(html.read_text()))
    for file in decks:
        print(file.with_suffix(".html" if arguments.html == "true" else ".md"))


if __name__ == "__main__":
    run_reporting_user_errors(main)
