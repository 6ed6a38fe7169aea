"""Build a searchable web site of the workshop's pages, the same Markdown that stands beside the scripts.

    python lab/site.py --out build/site

The pages are copied to build/site/pages, with all files that they link to, and Zensical (https://zensical.org) makes
HTML of them in build/site/html. Text is never changed: only comments are left out. A link or an anchor that leads
nowhere ends the build with an error. Hints and solutions of the exercises are left out.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SPOILERS = ("hints.md", "why.md")
CODE = r"(?P<code>^ *```.*?^ *```$|`[^`\n]+`)"
COMMENT = r"(?P<comment>^<!--(?:(?!-->).)*-->\n|<!--.*?-->)"
"""a whole line, or a part of one"""
LINK = r"(?<=\]\()(?P<target>[^)\s#:]+)(?=[)#])"
PART = re.compile(f"{CODE}|{COMMENT}|{LINK}", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".slurm": "bash", ".sh": "bash", ".toml": "toml", "": ""}
"""linked files that are shown as pages, by how their names end, and the language in which they are colored"""

SETTINGS = """\
[project]
site_name = "Multi-GPU training workshop"
docs_dir = "pages"
site_dir = "html"
use_directory_urls = false
nav = [
%s
]

[project.validation]
invalid_links = true
invalid_link_anchors = true

[project.theme]
features = ["content.code.copy", "navigation.footer", "navigation.sections", "search.highlight", "toc.follow"]

[project.markdown_extensions.attr_list]
[project.markdown_extensions.footnotes]
[project.markdown_extensions.md_in_html]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
slugify.object = "pymdownx.slugs.slugify"
slugify.kwds.case = "lower"
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.magiclink]
[project.markdown_extensions.pymdownx.superfences]
custom_fences = [
    { name = "mermaid", class = "mermaid", format = "pymdownx.superfences.fence_code_format" },
]
"""


def pages() -> list[Path]:
    """Return the Markdown files of the repository, relative to it, apart from hints and solutions."""
    words = ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return [
        Path(line)
        for line in sorted(listed)
        if not line.startswith((".", "tests/")) and Path(line).name not in SPOILERS and (REPOSITORY / line).exists()
    ]


def title_of(page: Path) -> str:
    """Return the heading of a page, without its formatting."""
    heading = re.search(r"^# (.*)", (REPOSITORY / page).read_text(), re.MULTILINE)
    return re.sub(r"[`*]", "", heading[1] if heading else page.name)


def without_comments(text: str) -> str:
    """Return Markdown without its HTML comments; examples of comments in code stay."""
    return PART.sub(lambda part: "" if part["comment"] else part[0], text)


def place_on_site(file: Path) -> Path:
    """Return where the site shows a file or folder of the repository, from the root of both."""
    if file.is_dir():
        return (file / "README.md" if (file / "README.md").exists() else file / "files.md").relative_to(REPOSITORY)
    place = file.relative_to(REPOSITORY)
    return place.with_name(f"{place.name}.md") if file.suffix in LANGUAGES else place


def write_file(file: Path, out: Path) -> None:
    """Write a file or folder that a page links to: source code and lists of files as pages, all others as they are."""
    out.parent.mkdir(parents=True, exist_ok=True)
    name = file.relative_to(REPOSITORY)
    if file.is_dir():
        out.write_text(f"# {name}\n\n" + "\n".join(f"- `{path.name}`" for path in sorted(file.iterdir())) + "\n")
    elif file.suffix in LANGUAGES:
        out.write_text(f"# {name}\n\n``````{LANGUAGES[file.suffix]}\n{file.read_text()}``````\n")
    else:
        shutil.copy(file, out)


def write_page(page: Path, out: Path) -> None:
    """Write a page in the form that the site needs, and the files that it links to."""

    def part(found: re.Match) -> str:
        if not found["target"]:
            return "" if found["comment"] else found[0]
        file = (REPOSITORY / page.parent / found["target"]).resolve()
        if not file.is_relative_to(REPOSITORY) or not file.exists():
            return found[0]  # Zensical says that it leads nowhere
        place = place_on_site(file)
        if not (out / place).exists() and file.suffix != ".md" and place.name != "README.md":
            write_file(file, out / place)
        return "../" * len(page.parent.parts) + place.as_posix()

    text = PART.sub(part, (REPOSITORY / page).read_text())
    # Markdown inside of HTML has to be asked for, and the summary stands in a line of its own.
    text = re.sub(r"^<details>\s*(<summary>.*</summary>)$", r'<details markdown="1">\n\1\n', text, flags=re.MULTILINE)
    (out / page).parent.mkdir(parents=True, exist_ok=True)
    (out / page).write_text(text)


def navigation(every: list[Path]) -> str:
    """Return the table of contents in TOML: the front page, a section for each folder, and what is in none."""
    lines = ['    "README.md",']
    for folder in sorted({page.parts[0] for page in every if len(page.parts) > 1}):
        inside = [page for page in every if page.parts[0] == folder]
        inside.sort(key=lambda page: (len(page.parts), page.name != "README.md", page))  # its README first
        title = json.dumps(title_of(inside[0]) if inside[0].name == "README.md" else folder.capitalize())
        lines.append(f"    {{ {title} = {json.dumps([page.as_posix() for page in inside])} }},")
    others = [page.as_posix() for page in every if len(page.parts) == 1 and page.name != "README.md"]
    return "\n".join([*lines, f'    {{ "More" = {json.dumps(others)} }},'])


def main() -> None:
    """Write the pages, then build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "site", help="folder of pages and HTML")
    out = parser.parse_args().out
    shutil.rmtree(out / "pages", ignore_errors=True)
    every = pages()
    for page in every:
        write_page(page, out / "pages")
    (out / "zensical.toml").write_text(SETTINGS % navigation(every))
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    sys.exit(subprocess.run(build, cwd=out).returncode)


if __name__ == "__main__":
    main()
