"""Download a file from the first of several addresses that delivers it completely."""

import http.client
import os
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from tqdm import tqdm

from workshop.errors import UserError
from writing import synced

TIMEOUT_SECONDS = 20  # without a byte from a server
SLOWEST = 1000  # bytes per second, on the mean over each of these periods
PERIOD_SECONDS = 60


class DownloadError(UserError):
    """No address delivered the file."""


def download_file(urls: Sequence[str], path: Path, md5: str | None) -> None:
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


def _open(url: str) -> http.client.HTTPResponse:
    """Return the answer of a server, whose headers may not take longer than `PERIOD_SECONDS`."""
    answer = Future()

    def ask() -> None:  # in a thread, because the timeout of urlopen is for each byte, not for the whole answer
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(PERIOD_SECONDS)
    except TimeoutError:
        raise OSError(f"too slow, no answer in {PERIOD_SECONDS} s") from None


def _fetch(url: str, path: Path) -> None:
    with _open(url) as response, synced(path) as file:
        size = response.length  # what Content-Length says, if that is a number
        begun, received = time.monotonic(), 0
        with tqdm(total=size or None, desc=path.stem, unit="B", unit_scale=True, disable=None, leave=False) as progress:
            while chunk := response.read1(1 << 16):
                file.write(chunk)
                progress.update(len(chunk))
                received += len(chunk)
                if (seconds := time.monotonic() - begun) > PERIOD_SECONDS:
                    if received < SLOWEST * seconds:
                        raise OSError(f"too slow, {received} bytes in {seconds:.0f} s")
                    begun, received = time.monotonic(), 0
    if size is not None and path.stat().st_size != size:
        raise OSError(f"cut short, {path.stat().st_size} of {size} bytes")
