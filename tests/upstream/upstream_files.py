"""Which of torch's test files run on asyncdist, and where they come from: a checkout, or torch's repository."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

URL = "https://github.com/pytorch/pytorch"
FOLDER = "test/distributed"

FILES = (
    "test_c10d_pybackend.py", "test_c10d_fault_tolerance.py", "test_c10d_collectives.py", "test_c10d_p2p.py",
    "test_c10d_process_group.py", "test_c10d_nan_check.py", "test_c10d_object_collectives.py", "test_collective_utils.py",
    "algorithms/test_join.py", "_composable/test_replicate.py", "tensor/test_init.py",
)  # fmt: skip
"""The files to run, in torch's folder of tests."""


class SourceError(Exception):
    """A test file of torch could not be had. The message says what to do."""


def git(*arguments: str | Path) -> str:
    """Return what a command of git prints."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SourceError(done.stderr.partition("\n")[0])
    return done.stdout.strip()


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
    return git("hash-object", "--no-filters", path)


@dataclass(frozen=True)
class UpstreamFiles:
    """The test files of one state of torch's sources.

    Attributes:
        ref: Tag or commit of torch's repository.
        cache: Folder for fetched states. What is in it is not fetched again.
        source: A checkout of torch's repository; None to fetch.
        url: Address of the repository.
    """

    ref: str
    cache: Path
    source: Path | None = None
    url: str = URL

    def obtain(self, name: str) -> Path | None:
        """Return the path of the file; None if this state of torch does not have it.

        Raises:
            SourceError: The checkout has no folder of tests, or the files could not be fetched.
        """
        folder = (self._fetched() if self.source is None else self.source) / FOLDER
        if not folder.is_dir():
            raise SourceError(f"{self.source} has no folder {FOLDER}: pass a checkout of pytorch at {self.ref}")
        return folder / name if (folder / name).is_file() else None

    def _fetched(self) -> Path:
        """Return a checkout of the folder of tests alone. One that was interrupted is repeated."""
        checkout = self.cache / self.ref
        if not (checkout / FOLDER).exists():
            try:
                git("init", "--quiet", checkout)
                git("-C", checkout, "sparse-checkout", "set", FOLDER)
                git("-C", checkout, "config", "remote.origin.url", self.url)
                git("-C", checkout, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", self.ref)
                git("-C", checkout, "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD")
            except SourceError as error:
                raise SourceError(
                    f"{self.url} could not be fetched: {error}. Check the network, or pass --source DIR with a checkout of "
                    f"pytorch at {self.ref}."
                ) from error
        return checkout
