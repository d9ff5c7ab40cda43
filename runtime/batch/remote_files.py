"""Local copies of files at URLs: a command works on these, and publishes its finished outputs.

The copy of an output has the name of the output, in a folder of the work folder that is named after
the output's folder. The journal and the lock are beside it, so the same command finds them again.

Does not know how rows run. Guarantees: an output that is at its URL already is seen before a row
runs; outputs are published only if they are complete, the manifest last; a file at a URL that
another program wrote since the job began is never replaced; the local copies are removed only after
every URL has their content.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import (
    EXIT_RESUMABLE,
    ConfigError,
    JobError,
    MergeError,
    OutputIsLocked,
    UnusableFile,
)
from ..files.disk import Disk, replace_file
from ..files.file_checks import check_files
from ..files.manifest import manifest_path, output_differences, read_manifest
from ..files.remote import RemoteFile, Url
from .job_files import OutputFiles, stages_folder
from .pipes import PIPE

Place = Path | Url
States = dict[str, dict[str, str] | None]
"""The state of each URL, as `RemoteFile.state` returns it, or `_UPLOADING`."""
_UPLOADING = {"upload": "begun"}
"""The state of a URL that may hold a part of its output: whatever is there may be replaced."""


@dataclass(frozen=True)
class Outputs(OutputFiles):
    """The outputs of a job or a merge on this machine, and the URLs of those that have one."""

    urls: dict[Path, Url] = field(default_factory=dict)
    """The URLs by local path; the manifest is last."""
    _fetched: list[Path] = field(default_factory=list)

    @classmethod
    def at(cls, output: Place, error_file: Place | None, work_folder: Path) -> "Outputs":
        """The outputs at paths and URLs.

        Raises:
            ConfigError: A URL is given twice, or an output is a pipe.
        """
        for option, place in (("-o", output), ("--error-file", error_file)):
            if place == PIPE:
                raise ConfigError(
                    f"{option}: expected a file or a URL, as only the output of noria batch may be "
                    f"standard output, got {PIPE}. Name a file."
                )
        local, urls = _local(output, work_folder), {}
        local_errors = None if error_file is None else _local(error_file, work_folder)
        if output == error_file and isinstance(output, Url):
            raise ConfigError(f"{output}: the output is the error file too. Give two URLs.")
        if isinstance(error_file, Url) and local_errors is not None:
            urls[local_errors] = error_file
        if isinstance(output, Url):
            urls[local] = output
            manifest = manifest_path(local)
            urls[manifest] = output.beside(manifest.name)
        return cls(local, local_errors, urls)

    def check(self, read: Sequence[tuple[str, Path]]) -> None:
        """Check URLs of this machine as other outputs are checked.

        Args:
            read: Description and path of every file or whole folder that is read.

        Raises:
            UnusableFile: A URL is that of a file that is read, or cannot be written.
        """
        paths = {str(url): RemoteFile(url).local_path for url in self.urls.values()}
        check_files({name: path for name, path in paths.items() if path is not None}, read)

    @contextmanager
    def mirrored(
        self, disk: Disk, note: Callable[[str], None], *, restarts: bool = False
    ) -> Iterator[None]:
        """Fetch outputs that are at their URLs already, and publish them when they are complete.

        Args:
            disk: Disk operations.
            note: Shows a message.
            restarts: Whether outputs that are at the URLs are ignored and later replaced.

        Raises:
            UnusableFile: A URL cannot be read, or has changed since the job began.
            JobError: A URL cannot be written, or has changed; the finished outputs are kept.
        """
        if not self.urls:
            yield
            return
        remote = {path: RemoteFile(url) for path, url in self.urls.items()}
        is_begun = self._is_begun()
        states = self._states_at_beginning(remote, disk, restarts=restarts)
        for path, file in remote.items():
            self._check_unchanged(path, file, states)
        try:
            for path, file in remote.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                if not (restarts or path.exists() or is_begun) and file.exists():
                    self._fetched.append(path)
                    file.fetch(path, disk)
            yield
        except OutputIsLocked:
            raise
        except (UnusableFile, MergeError) as error:
            if self._fetched and not self.journal.exists():
                # the job has not begun; with these states, a kept folder of stages would say it has
                disk.remove(self._states_path)
            self._leave(remote, states, disk, note)
            message = str(error)
            for path in self._fetched:  # which are removed
                message = message.replace(str(path), str(self.urls[path]))
            raise type(error)(message) from error
        except BaseException:
            self._leave(remote, states, disk, note)
            raise
        self._leave(remote, states, disk, note)

    def _states_at_beginning(
        self, remote: dict[Path, RemoteFile], disk: Disk, *, restarts: bool
    ) -> States:
        """The states of the URLs when the job began, which are kept beside the outputs."""
        path = self._states_path
        is_new = restarts or not (self._is_begun() or any(path.exists() for path in remote))
        if path.exists() and not is_new:
            return json.loads(path.read_bytes())
        path.parent.mkdir(parents=True, exist_ok=True)
        # if outputs are here without their states, it is unknown which files they would replace
        states = {str(file.url): file.state() for file in remote.values()} if is_new else {}
        self._keep(states, disk)
        return states

    def _keep(self, states: States, disk: Disk) -> None:
        replace_file(disk, self._states_path, [json.dumps(states).encode()])

    @property
    def _states_path(self) -> Path:
        return self.output.with_name(f"{self.output.name}.urls.json")

    def _check_unchanged(self, path: Path, file: RemoteFile, states: States) -> None:
        """Refuse to replace a file that another program wrote since the job began."""
        at_beginning = states.get(str(file.url))
        if at_beginning == _UPLOADING or file.state() in (None, at_beginning):
            return
        if path.exists() and file.holds(path):
            return
        raise UnusableFile(
            f"{file.url}: expected the file that was there when the job began, or none, got "
            f"another one, which is kept. Move it away to go on with the outputs in {path.parent}, "
            "or choose another output."
        )

    def _leave(
        self,
        remote: dict[Path, RemoteFile],
        states: States,
        disk: Disk,
        note: Callable[[str], None],
    ) -> None:
        """Publish outputs that are complete, and remove the files that nothing needs any more."""
        if self._is_begun():
            return
        if not self._is_complete():
            self._remove([*self._fetched, self._states_path], disk)
            return
        for path, file in remote.items():
            try:
                self._check_unchanged(path, file, states)
                states[str(file.url)] = _UPLOADING
                self._keep(states, disk)
                if file.publish(path):
                    note(f"{file.url}: {path.stat().st_size} bytes, uploaded and compared")
            except UnusableFile as error:
                raise JobError(
                    f"{error} The finished outputs are kept in {path.parent}; the same command "
                    "uploads them again.",
                    EXIT_RESUMABLE,
                ) from error
        # the manifest is removed after the output: without an output, it has no effect
        self._remove([*remote, self._states_path], disk)

    def _is_begun(self) -> bool:
        if self.journal.exists():
            return True
        # the journals of stages are in their folder, which may stay when the job is complete
        has_stages = self._states_path.exists() and stages_folder(self.output).exists()
        return has_stages and not self._is_complete()

    def _is_complete(self) -> bool:
        manifest = read_manifest(self.output)
        return manifest is not None and not output_differences(manifest, self.outputs)

    def _remove(self, paths: Sequence[Path], disk: Disk) -> None:
        for path in paths:
            disk.remove(path)
        for folder in {path.parent for path in self.urls}:
            with suppress(OSError):  # another job may have files there
                folder.rmdir()


def input_copy_path(url: Url, output: Path) -> Path:
    """The path of the copy of an input, beside an output."""
    # the suffixes say how a file holds its rows
    return output.with_name(f"{output.name}.input{''.join(Path(url.name).suffixes)}")


@contextmanager
def input_copied(place: Place, path: Path, disk: Disk) -> Iterator[None]:
    """Fetch an input at a URL to a path, and remove it at the end; other inputs need no copy.

    Raises:
        UnusableFile: The URL cannot be read.
    """
    if isinstance(place, Path):
        yield
        return
    RemoteFile(place).fetch(path, disk)
    try:
        yield
    except OutputIsLocked:  # the job that runs reads the copy
        raise
    except BaseException:
        disk.remove(path)
        raise
    disk.remove(path)


@contextmanager
def files_copied(places: Sequence[Place], *, with_manifests: bool) -> Iterator[list[Path]]:
    """Files as paths; those at URLs are fetched to a temporary folder, each to one of its own.

    Args:
        places: The files.
        with_manifests: Whether to fetch the manifests beside the files, too.

    Raises:
        UnusableFile: A URL cannot be read.
    """
    with ExitStack() as opened:
        paths = []
        for place in places:
            if isinstance(place, Url):
                folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="noria-")))
                path = folder / place.name
                RemoteFile(place).fetch(path, Disk())
                manifest = RemoteFile(place.beside(manifest_path(path).name))
                if with_manifests and manifest.exists():
                    manifest.fetch(manifest_path(path), Disk())
                place = path
            paths.append(place)
        yield paths


def _local(place: Place, work_folder: Path) -> Path:
    if isinstance(place, Path):
        return place
    name = hashlib.sha256(place.folder.encode()).hexdigest()[:12]
    return work_folder / f"noria-{name}" / place.name
