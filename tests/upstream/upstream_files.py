"""Which of torch's test files run on asyncdist, and where they come from: a checkout, or the network."""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

URL = "https://raw.githubusercontent.com/pytorch/pytorch"
FOLDER = "test/distributed"
SECONDS = 30

_ALL_BACK_ENDS = ("c10d_backend_common.py",)
FILES: dict[str, tuple[str, ...]] = {
    "test_c10d_pybackend.py": (),
    "test_c10d_fault_tolerance.py": (),
    "test_c10d_collectives.py": _ALL_BACK_ENDS,
    "test_c10d_p2p.py": _ALL_BACK_ENDS,
    "test_c10d_process_group.py": _ALL_BACK_ENDS,
    "test_c10d_nan_check.py": _ALL_BACK_ENDS,
    "test_c10d_object_collectives.py": (),
    "test_collective_utils.py": (),
    "algorithms/test_join.py": (),
    "_composable/test_replicate.py": (),
    "tensor/test_init.py": (),
}
"""The files to run, in torch's folder of tests, each with the files that it imports from there."""


class SourceError(Exception):
    """A test file of torch could not be had. The message says what to do."""


def ref_of(version: str, commit: str) -> str:
    """Return what names the sources of a build of torch: the tag of a release, else the commit.

    Args:
        version: ``torch.__version__``, such as ``2.13.0+cpu``.
        commit: ``torch.version.git_version``.
    """
    release = version.split("+")[0]
    return f"v{release}" if re.fullmatch(r"\d+\.\d+\.\d+", release) else commit


def blob_of(path: Path) -> str:
    """Return git's name for the content of a file, as ``git ls-tree`` prints it."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class UpstreamFiles:
    """The test files of one state of torch's sources.

    Attributes:
        ref: Tag or commit of torch's repository.
        cache: Folder for fetched files. A file in it is not fetched again.
        source: A checkout of torch's repository; None to fetch.
        url: Address of the repository's raw files.
    """

    ref: str
    cache: Path
    source: Path | None = None
    url: str = URL

    def obtain(self, name: str) -> Path | None:
        """Return the path of the file, beside the files that it imports; None if this state of torch does not have it.

        Raises:
            SourceError: The checkout has no folder of tests, or a file could not be fetched.
        """
        paths = [self._obtain(part) for part in (name, *FILES.get(name, ()))]
        return None if None in paths else paths[0]

    def _obtain(self, name: str) -> Path | None:
        if self.source is not None:
            folder = self.source / FOLDER
            if not folder.is_dir():
                raise SourceError(f"{self.source} has no folder {FOLDER}: pass a checkout of pytorch at {self.ref}")
            return folder / name if (folder / name).is_file() else None
        path = self.cache / self.ref / FOLDER / name
        if path.exists():
            return path
        content = self._fetch(f"{self.url}/{self.ref}/{FOLDER}/{name}")
        if content is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that is interrupted here leaves no partial file under the name.
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)
        return path

    def _fetch(self, address: str) -> bytes | None:
        advice = f"Check the network, or pass --source DIR with a checkout of pytorch at {self.ref}."
        try:
            with urllib.request.urlopen(address, timeout=SECONDS) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.NOT_FOUND:
                return None
            raise SourceError(f"{address} was refused with the status {error.code}. {advice}") from error
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"{address} could not be fetched: {error}. {advice}") from error
