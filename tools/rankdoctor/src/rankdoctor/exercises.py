"""The exercises of the course that this tool comes from: a finding names one that has the same fault."""

import functools
from importlib.metadata import PackageNotFoundError, metadata

COURSE = "multi-GPU training workshop"
LABEL = "exercises"
"""of the address in the metadata of the installed package: its project.urls"""


@functools.cache
def address() -> str:
    """Return the address of the folder with the pages of the exercises; "" if the package names none."""
    try:
        urls = metadata("rankdoctor").get_all("Project-URL") or []
    except PackageNotFoundError:  # the source is used, without an installation
        return ""
    labeled = dict(url.split(", ", 1) for url in urls)
    return next((url.rstrip("/") for label, url in labeled.items() if label.lower() == LABEL), "")


def link_to(exercise: str) -> str:
    """Return the address of an exercise's page; "" if there is no exercise, or no address is known."""
    return f"{address()}/{exercise}.html" if exercise and address() else ""
