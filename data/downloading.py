"""Downloading a file from the first of several addresses that delivers it whole."""

import http.client
import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from workshop.datasets.files import synced
from workshop.errors import UserError

TIMEOUT_SECONDS = 20  # without a sign of life from a mirror


class DownloadError(UserError):
    """No address delivered the file."""


def download(urls: Sequence[str], path: Path, md5: str | None) -> None:
    """Download ``path`` from the first of ``urls`` that delivers a file with this MD5 checksum; None: any file.

    Raises:
        DownloadError: none of them did; names each and why.
    """
    from torchvision.datasets.utils import check_integrity  # here: it takes seconds to import

    failures = []
    for url in urls:
        part = path.with_name(path.name + ".part")
        try:
            _fetch(url, part)
            if check_integrity(part, md5):
                os.replace(part, path)
                return
            failures.append(f"{url} (wrong checksum, {part.stat().st_size} bytes)")
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url} ({getattr(error, 'reason', None) or error})")
    raise DownloadError(f"cannot download {path.name}; tried {', '.join(failures)}")


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response, synced(path) as file:
        size = int(response.headers.get("Content-Length") or 0) or None
        with tqdm(total=size, desc=path.stem, unit="B", unit_scale=True, disable=None, leave=False) as progress:
            while chunk := response.read(1 << 16):
                file.write(chunk)
                progress.update(len(chunk))
