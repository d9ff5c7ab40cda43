"""Reads and writes files at URLs, such as `s3://bucket/rows.jsonl`, with the package fsspec.

Does not know what files contain. Guarantees: an upload is compared with the local file before it
counts; every failure of a store is an error that names the URL.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UnusableFile
from .disk import Disk, digest_chunks, digest_file, replace_file
from .optional_packages import require

_PIECE_BYTES = 2**20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
_EXTRA = "remote"
_STATE_KEYS = (
    "size", "ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified",
    "updated", "created",
)  # fmt: skip
"""The facts by which stores tell versions of a file apart; times of reading are not among them."""


@dataclass(frozen=True)
class Url:
    """The URL of a file, as the user typed it."""

    text: str

    @property
    def name(self) -> str:
        """The last part of the URL, which names the file; without the query of a web address."""
        is_web = self.text.lower().startswith(("http://", "https://"))
        path = re.split("[?#]", self.text, maxsplit=1)[0] if is_web else self.text
        return path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The URL without the name of the file."""
        return self.text.rpartition("/")[0]

    def beside(self, name: str) -> "Url":
        """The URL of another file in the same folder."""
        return Url(f"{self.folder}/{name}")

    def __str__(self) -> str:
        return self.text


def is_url(text: str) -> bool:
    """Whether a text is a URL, as the user typed it; as a path, a URL loses one of two slashes."""
    return _URL.fullmatch(text) is not None


def path_or_url(text: str) -> Path | Url:
    """The value of an option that takes both; `file:` URLs are URLs, too."""
    return Url(text) if is_url(text) else Path(text)


class RemoteFile:
    """A file at a URL, which need not exist.

    Raises:
        UnusableFile: The URL has no file name, or the package for its kind is missing.
    """

    def __init__(self, url: Url):
        self.url = url
        if not url.name:
            raise UnusableFile(f"{url}: expected the URL of a file, got one that ends in a slash.")
        core = require("fsspec.core", _EXTRA, UnusableFile)
        try:
            self._store, self._path = core.url_to_fs(url.text)
        except ImportError as missing:
            raise UnusableFile(
                f"{url}: expected the package for such URLs, got none ({missing}). Install it; "
                f"pip install 'noria[{_EXTRA}]' has the one for s3://."
            ) from missing
        except (ValueError, TypeError, AttributeError, OSError) as error:
            # a store raises these errors if its kind of URL needs more than a text, or if it does
            # not answer
            raise UnusableFile(f"{url}: expected a URL that fsspec opens, got {error}.") from error

    @property
    def local_path(self) -> Path | None:
        """The path of the file, if its URL is one of this machine, such as `file:///rows.jsonl`."""
        local = require("fsspec.implementations.local", _EXTRA, UnusableFile)
        return Path(self._path) if isinstance(self._store, local.LocalFileSystem) else None

    def exists(self) -> bool:
        """Whether the file is there."""
        return self._info() is not None

    def pieces(self) -> Iterator[bytes]:
        """The content of the file."""
        with self._failing("be read"), self._store.open(self._path, "rb") as file:
            yield from iter(lambda: file.read(_PIECE_BYTES), b"")

    def fetch(self, path: Path, disk: Disk) -> None:
        """Copy the file to a path on this machine."""
        replace_file(disk, path, self.pieces())

    def publish(self, path: Path) -> bool:
        """Copy a file of this machine to the URL, unless the URL has its content already.

        Returns:
            Whether the file was uploaded.

        Raises:
            UnusableFile: The store refused the file, or has another content afterwards.
        """
        if self.holds(path):
            return False
        with self._failing("be written"):
            self._store.put_file(str(path), self._path)
        if not self.holds(path):
            raise UnusableFile(
                f"{self.url}: expected the {path.stat().st_size} bytes of {path} after the upload, "
                "got another content. Run the same command again."
            )
        return True

    def state(self) -> dict[str, str] | None:
        """Facts that differ after the file was written again; None if it is not there."""
        if (info := self._info()) is None:
            return None
        return {key: str(info[key]) for key in _STATE_KEYS if key in info}

    def holds(self, path: Path) -> bool:
        """Whether the URL has the content of a file, by its size and its digest."""
        if (info := self._info()) is None or info.get("size") != path.stat().st_size:
            return False
        # stores of S3's kind name an object by its MD5, unless it came in parts or is encrypted
        with path.open("rb") as file:
            md5 = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
        if str(info.get("ETag", "")).strip('"') == md5:
            return True
        return digest_chunks(self.pieces()) == digest_file(path)

    def _info(self) -> dict[str, Any] | None:
        with self._failing("be read"), suppress(FileNotFoundError):
            self._store.invalidate_cache()
            return self._store.info(self._path)
        return None

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """Name the URL in an error of its store; stores raise errors of many libraries."""
        try:
            yield
        except (UnusableFile, MemoryError):
            raise
        except Exception as error:
            is_absent = isinstance(error, FileNotFoundError)
            reason = "no such file" if is_absent else f"{type(error).__name__}: {error}"
            raise UnusableFile(
                f"{self.url}: cannot {action} ({reason}). Check the URL, its credentials and the "
                "network."
            ) from error
