"""How much of a train script is the package: its own lines, those that use the package, and what importing it reads.

    python tests/package_use.py           # of this checkout

A line uses the package if it has a name that was imported from `workshop` or from a module beside the script, or an
attribute of the `run` that the package gives it; import lines count too. What is read on import are all modules of the
package, and modules beside the script, that are imported at module level, directly or by each other.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def nodes_at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those inside functions, which are only run when the function is called."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, FUNCTIONS):
            yield from nodes_at_module_level(child)


def modules_imported(file: Path, roots: tuple[Path, ...], nodes: Iterator[ast.AST]) -> set[Path]:
    """Return the files below ``roots`` that these nodes of ``file`` import, packages included."""
    found: set[Path] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import, which this does not follow"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            for root in roots:
                for length in range(1, len(parts) + 1):
                    path = root.joinpath(*parts[:length])
                    found |= {one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()}
    return found


def modules_read(script: Path) -> set[Path]:
    """Return all modules of this repository that are read when ``script`` is imported."""
    roots = (REPOSITORY, script.parent)
    found: set[Path] = set()
    waiting = [script]
    while waiting:
        file = waiting.pop()
        nodes = nodes_at_module_level(ast.parse(file.read_text()))
        new = modules_imported(file, roots, nodes) - found - {script}
        found |= new
        waiting += new
    return found


def lines_using_package(script: Path) -> set[int]:
    """Return the numbers of the lines that use a name of the package, see the module's docstring."""
    tree = ast.parse(script.read_text())
    names, lines = {"run"}, set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and modules_imported(script, (REPOSITORY, script.parent), iter([node])):
            names |= {alias.asname or alias.name for alias in node.names}
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for node in ast.walk(tree):
        if (isinstance(node, ast.Name) and node.id in names - {"run"}) or (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "run"
        ):
            lines.add(node.lineno)
    return lines


def lines_of(file: Path) -> int:
    """Return how many lines a file has."""
    return len(file.read_text().splitlines())


def main() -> None:
    """Print a row per lesson."""
    print(
        f"{'script':28} {'lines':>6} {'not blank':>10} {'use the package':>16} {'modules read':>13} {'lines read':>11}"
    )
    for script in sorted(REPOSITORY.glob("0*/train.py")):
        modules = modules_read(script)
        filled = sum(bool(line.strip()) for line in script.read_text().splitlines())
        print(
            f"{script.parent.name + '/train.py':28} {lines_of(script):6} {filled:10} "
            f"{len(lines_using_package(script)):16} {len(modules):13} {sum(map(lines_of, modules)):11,}"
        )


if __name__ == "__main__":
    main()
