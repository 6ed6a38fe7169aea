"""Build a searchable web site of the workshop's pages, the same Markdown that stands beside the scripts.

    python lab/site.py --out build/site

The pages are copied to build/site/pages, with all files that they link to, and Zensical (https://zensical.org) makes
HTML of them in build/site/html. Text is never changed, only its form: what makes tables and figures (cog) is left out,
and parts that are folded on the repository's pages are folded here too. A link or an anchor that leads nowhere ends the
build with an error. Hints and solutions of the exercises are left out.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()([^)\s]+)|(?<=src=\")([^\"]+)")
COG = re.compile(r"^<!-- \[\[\[cog.*?\]\]\] -->\n|^<!-- \[\[\[end\]\]\] -->\n", re.DOTALL | re.MULTILINE)
SPOILERS = ("hints.md", "why.md")
TEXT = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".slurm": "bash", ".sh": "bash", ".toml": "toml", "": "make"}
"""files that are shown as pages, by how their names end, and the language in which they are coloured"""

SETTINGS = "zensical.toml"
"""the file of Zensical's settings; a folder that has it was made here"""
CONFIG = """\
[project]
site_name = "Multi-GPU training workshop"
site_description = "A PyTorch training script, from one device to many GPUs on many nodes: run, measure, change."
docs_dir = "pages"
site_dir = "html"
use_directory_urls = false
nav = [
%(nav)s
]

[project.validation]
invalid_links = true
invalid_link_anchors = true

[project.theme]
features = [
    "content.code.copy", "navigation.footer", "navigation.sections", "navigation.top", "search.highlight", "toc.follow",
]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Use dark colours"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Use light colours"

[project.markdown_extensions.attr_list]
[project.markdown_extensions.footnotes]
[project.markdown_extensions.md_in_html]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
slugify.object = "pymdownx.slugs.slugify"
slugify.kwds.case = "lower"
[project.markdown_extensions.pymdownx.arithmatex]
generic = true
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.inlinehilite]
[project.markdown_extensions.pymdownx.magiclink]
[project.markdown_extensions.pymdownx.tilde]
[project.markdown_extensions.pymdownx.superfences]
custom_fences = [
    { name = "mermaid", class = "mermaid", format = "pymdownx.superfences.fence_code_format" },
]
"""


def tracked_pages() -> list[Path]:
    """Return the Markdown files of the repository, relative to it, apart from hints and solutions."""
    words = ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True)
    return [
        Path(line)
        for line in sorted(listed.stdout.splitlines())
        if not line.startswith((".", "tests/")) and Path(line).name not in SPOILERS and (REPOSITORY / line).exists()
    ]


def title_of(page: Path) -> str:
    """Return the heading of a page, without its formatting."""
    heading = next(line for line in (REPOSITORY / page).read_text().splitlines() if line.startswith("# "))
    return re.sub(r"[`*\"]|\]\(.*?\)|\[", "", heading.removeprefix("# "))


def as_site_page(text: str) -> str:
    """Return the Markdown of a page in the dialect that the site understands.

    It differs from that of code forges in three ways: Markdown inside of HTML has to be asked for, a list begins only
    after an empty line, and nested lines of a list are indented by four spaces.
    """
    text = COG.sub("", text)
    text = re.sub(r"<(details|summary|div|figure)(?=[ >])", r'<\1 markdown="1"', text)
    text = text.replace('<summary markdown="1"', "<summary")
    text = re.sub(r"(<details[^>]*>)\s*(<summary>.*?</summary>)\s*", r"\1\n\2\n\n", text, flags=re.DOTALL)
    lines: list[str] = []
    in_code, margin = False, ""
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        fence = line.lstrip().startswith("```")
        if fence:
            in_code = not in_code
            if in_code:
                indent = len(line) - len(line.lstrip())
                margin = " " * (4 - indent) if 2 <= indent <= 3 and _in_list(lines) else ""
        item = re.match(r"([-*]|\d+\.) ", line)
        if not in_code and item and before.strip() and not re.match(r"\s*([-*]|\d+\.) | {2,}", before):
            lines.append("")
        if in_code or fence:
            line = margin + line if line.strip() else line
        elif re.match(r" {2,3}\S", line) and _in_list(lines):
            line = "    " + line.lstrip()
        lines.append(line)
    return "\n".join(lines) + "\n"


def _in_list(lines: list[str]) -> bool:
    """Return whether the next line, if it is indented, belongs to an item of a list."""
    for line in reversed(lines):
        if re.match(r"([-*]|\d+\.) ", line):
            return True
        if line.strip() and not line.startswith(" "):
            return False
    return False


def linked_files(page: Path, text: str) -> set[Path]:
    """Return the files of the repository that a page links to or shows."""
    found = set()
    for match in LINK.finditer(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        target = (match.group(1) or match.group(2)).partition("#")[0]
        if target and "://" not in target and not target.startswith("mailto:"):
            found.add((REPOSITORY / page.parent / target).resolve())
    return found


def site_target(file: Path, pages: set[Path]) -> str | None:
    """Return where a linked file or folder is on the site, from its root; None if the site does not have it."""
    path = file.relative_to(REPOSITORY)
    if path in pages:
        return path.as_posix()
    if file.is_dir():
        return (path / "README.md").as_posix() if path / "README.md" in pages else None
    shown = "/".join(part.replace(".", "dot-", 1) if part.startswith(".") else part for part in path.parts)
    return f"{shown}.md" if path.suffix in TEXT else shown  # the site generator ignores hidden folders


def with_site_links(page: Path, text: str, pages: set[Path]) -> str:
    """Return a page whose links to files lead to where the site has them; a link to what it does not have is text."""

    def there(match: re.Match) -> str:
        shown, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if shown is None:  # code
            return match.group(0)
        if "://" in target or target.startswith("mailto:") or not target:
            return match.group(0)
        file = (REPOSITORY / page.parent / target).resolve()
        where = site_target(file, pages) if file.is_relative_to(REPOSITORY) and file.exists() else target
        if where is None:
            return shown
        if file.suffix in TEXT and not file.is_dir():
            anchor = ""  # a line number
        up = "../" * len(page.parent.parts)
        return f"[{shown}]({up}{where}{anchor})" if where != target else match.group(0)

    code, link = r"^```.*?^```$|`[^`\n]+`", r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)"
    return re.sub(f"{code}|{link}", there, text, flags=re.DOTALL | re.MULTILINE)


def write_pages(folder: Path) -> list[Path]:
    """Write all pages, and what they link to, into a folder; return the pages."""
    pages = tracked_pages()
    linked: set[Path] = set()
    for page in pages:
        text = (REPOSITORY / page).read_text()
        linked |= linked_files(page, text)
        file = folder / page
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(with_site_links(page, as_site_page(text), set(pages)))
    for file in sorted(linked):
        if not file.is_relative_to(REPOSITORY) or not file.is_file() or file.relative_to(REPOSITORY) in pages:
            continue
        path = file.relative_to(REPOSITORY)
        copy = folder / str(site_target(file, set(pages)))
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in TEXT:
            content = file.read_text()
            copy.write_text(f'# {path}\n\n``````{TEXT[path.suffix]} linenums="1"\n{content}``````\n')
        else:
            shutil.copy(file, copy)
    return pages


def place_in_course(page: Path) -> int:
    """Return when an exercise comes in its lesson, from its about.toml."""
    return tomllib.loads((REPOSITORY / page.parent / "about.toml").read_text())["order"]


def place_in_folder(page: Path) -> tuple[int, str]:
    """Return where the README of its folder first links a page, and its name; the README itself comes before all."""
    if page.name == "README.md":
        return -1, page.name
    text = (REPOSITORY / page.parent / "README.md").read_text()
    found = text.find(f"({page.name}")
    return found if found >= 0 else len(text), page.name


def navigation(pages: list[Path]) -> str:
    """Return the table of contents: the front page, the lessons in their order, and what belongs to no lesson."""

    def section(name: str, members: list[tuple[str, Path]]) -> str:
        entries = (f'        {{ "{title}" = "{page.as_posix()}" }},' for title, page in members)
        return "\n".join([f'    {{ "{name}" = [', *entries, "    ] },"])

    lessons = sorted({page.parts[0] for page in pages if re.match(r"\d\d_", page.parts[0])})
    lines = ['    { "Home" = "README.md" },']
    for lesson in lessons:
        own = [page for page in pages if page.parts[0] == lesson and page.parts[1] != "exercises"]
        own.sort(key=lambda page: (len(page.parts), place_in_folder(page)))
        name, _, subject = title_of(own[0]).partition(": ")  # such as "Lesson 01: one process, one device"
        titles = [subject, *(title_of(page).removeprefix(f"{name}: ") for page in own[1:])]
        lines.append(
            section(name, [(title[:1].upper() + title[1:], page) for title, page in zip(titles, own, strict=True)])
        )
    exercises = [page for page in pages if len(page.parts) > 2 and page.parts[1] == "exercises"]
    exercises.sort(key=lambda page: (page.parts[0], place_in_course(page)))
    clinic = [page for page in pages if page.parts[0] == "clinic"]
    lines.append(section("Clinic", [(title_of(page), page) for page in clinic + exercises]))
    teaching = [page for page in pages if page.parts[0] in ("INSTRUCTORS.md", "instructors")]
    lines.append(section("Teaching", [(title_of(page), page) for page in teaching]))
    listed = {page for page in pages if re.match(r"\d\d_|clinic", page.parts[0])} | {Path("README.md"), *teaching}
    lines.append(section("More", [(title_of(page), page) for page in pages if page not in listed]))
    return "\n".join(lines)


def remove_former(out: Path) -> None:
    """Remove the pages and the HTML of an earlier build; whatever else is in the folder stays."""
    if not (out / SETTINGS).exists():
        return  # it is not a folder of ours
    for folder in ("pages", "html"):
        shutil.rmtree(out / folder, ignore_errors=True)


def main() -> None:
    """Write the pages, then build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "site", help="folder of pages and HTML")
    out = parser.parse_args().out
    remove_former(out)
    pages = write_pages(out / "pages")
    (out / SETTINGS).write_text(CONFIG % {"nav": navigation(pages)})
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    sys.exit(subprocess.run(build, cwd=out).returncode)


if __name__ == "__main__":
    main()
