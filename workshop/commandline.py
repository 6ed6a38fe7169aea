"""From YAML files and flags to one frozen configuration; a user's mistake gives one line."""

import argparse
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import jsonargparse
import yaml

from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError, first_on_node, nearest
from workshop.paths import REPOSITORY

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

C = TypeVar("C")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
    """Shows a script's docstring with its line breaks."""


class StrictLoader(yaml.SafeLoader):
    """Refuses what YAML would not read as people do: the same key twice, 010 (which is 8) and 1:30 (which is 90)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:  # noqa: D102
        keys = [key.value for key, _ in node.value]
        for twice in (key for key in keys if keys.count(key) > 1):
            raise yaml.MarkedYAMLError(None, None, f"key '{twice}' appears twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:  # noqa: ANN401, D102
        is_number = isinstance(node, yaml.ScalarNode) and re.fullmatch(r".*:(int|float)", node.tag)
        if is_number and re.match(r"[-+]?0[\d_]|.*:", node.value):
            raise yaml.MarkedYAMLError(
                None, None, f"write {node.value} as a plain number, or in quotes", node.start_mark
            )
        return super().construct_scalar(node)


def load_config(config_class: type[C], arguments: list[str], description: str | None = None) -> C:
    """Build the configuration from ``[--config FILE ...] [--KEY VALUE ...]``.

    Later files win over earlier ones, and flags win over files wherever they stand on the line. ``--trace`` alone means
    ``--trace true``. ``--help`` shows the ``description``.

    Raises UserError: an unknown key or flag, a value of the wrong type or range, or a file that cannot be read.
    """
    files_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files_parser.add_argument("--config", action="append", default=[])
    try:
        found, flags = files_parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(_explain(str(error), {})) from None
    fields = dataclasses.fields(cast(Any, config_class))  # C is a dataclass
    known = {f.name: f for f in fields}
    keys_of = {file: _keys(file) for file in found.config}
    for file, keys in keys_of.items():
        for key, value in keys.items():
            if key not in known:
                raise UserError(f"{file}: unknown key '{key}'; {_lessons_with(key) or nearest(key, known)}")
            if value == "" or (value is None and known[key].default is not None):
                raise UserError(f"{file}: '{key}' has an empty value: give it one, or take the line out")
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0]
        if flag.startswith("--") and name not in {*known, "help", "print_config"}:
            hint = _lessons_with(name) or nearest(f"--{name}", (f"--{key}" for key in known))
            raise UserError(f"unknown flag --{name}; {hint}")
    for flag, value in [*pairwise(flags), *(flag.split("=", 1) for flag in flags if "=" in flag)]:
        if flag.startswith("--") and not value:
            raise UserError(f"{flag} has an empty value: name one, or leave the flag out")
    switches = {f"--{f.name}" for f in fields if f.type is bool}
    flags = list(_with_true_after(switches, flags))

    parser = jsonargparse.ArgumentParser(exit_on_error=False, description=description, formatter_class=HelpFormatter)
    parser.add_argument("--config", action="config", help="YAML file of flags; may be given more than once")
    _add_groups(parser, config_class)
    files = []
    for file in found.config:  # the parser refuses one that only says null
        values = keys_of[file].values()
        files += ["--config", file] if any(v is not None for v in values) else [f"--{k}=null" for k in keys_of[file]]
    try:
        values = parser.parse_args(files + flags).as_dict()
    except argparse.ArgumentError as error:
        raise UserError(_explain(str(error), keys_of)) from None
    del values["config"]
    return config_class(**values)


def run_with_config(main: Callable[[C], None], config_class: type[C], description: str | None) -> None:
    """Run a script's ``main`` with the configuration of the command line; report a user's mistake in one line."""

    @functools.wraps(main)
    def parse_and_run() -> None:
        try:
            config = load_config(config_class, sys.argv[1:], description)
        except UserError as error:
            error.already_reported = not first_on_node()  # the other ranks of this node have the same flags
            raise
        main(config)

    run_reporting_user_errors(parse_and_run)


def _add_groups(parser: jsonargparse.ArgumentParser, config_class: type) -> None:
    """Add the flags of each group under its own title; a class that defines a flag anew takes it from the group."""
    added: set[str] = set()
    for group in filter(dataclasses.is_dataclass, config_class.__mro__):
        names = {f.name for f in dataclasses.fields(group)}
        own = names & inspect.get_annotations(group).keys() - added
        if own:
            parser.add_class_arguments(group, skip=names - own)
        added |= own


def _with_true_after(switches: set[str], flags: list[str]) -> Iterator[str]:
    for flag, following in pairwise([*flags, "--"]):
        yield flag
        if flag in switches and following.startswith("--"):
            yield "true"


def _lessons_with(flag: str) -> str:
    """Name the lessons whose scripts define ``flag``; an empty text if none does."""
    field = re.compile(rf"^    {re.escape(flag)}: ", re.MULTILINE)
    scripts = sorted(REPOSITORY.glob("0*_*/train.py"))
    lessons = [script.parent.name for script in scripts if field.search(script.read_text().partition("\ndef ")[0])]
    return f"it is a flag of {', '.join(lessons)}, not of this script" if lessons else ""


def _keys(file: str) -> dict[str, object]:
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), StrictLoader) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config file {file}: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold lines of the form 'key: value', found a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _explain(message: str, keys_of: dict[str, dict[str, object]]) -> str:
    """Say in the user's words what the parser found wrong, and in which file if it was in one."""
    wrong = re.search(r'key "(\w+)":\s*Expected an? (.*)\. Got value: (.*)', message, re.DOTALL)
    if not wrong:
        return re.sub(r"argument (--\w+): expected one argument", r"\1 needs a value", message)
    key, expected, value = wrong.groups()
    expected = re.sub(r"<class '(\w+)'>", r"\1", expected)
    expected = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", expected)
    where = "".join(f" (in {file})" for file, keys in keys_of.items() if key in keys)
    return f"--{key} takes {expected}, got '{value}'{where}"
