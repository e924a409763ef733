"""Where torch's test files come from: a repository, the cache, or a checkout."""

import pytest

from tests.upstream.upstream_files import FOLDER, SourceError, UpstreamFiles, blob_of, git, ref_of

CONTENT = "# Owner(s): [\"oncall: distributed\"]\nprint('Größe')\n".encode()


@pytest.fixture
def repository(tmp_path):
    """A repository like torch's, with a file of tests in the release v2.15.0."""
    folder = tmp_path / "pytorch"
    for name in (FOLDER, "torch"):
        (folder / name).mkdir(parents=True)
    for path in (folder / FOLDER / "test_present.py", folder / "torch" / "other.py"):
        path.write_bytes(CONTENT + path.name.encode())
    git("init", "--quiet", folder)
    git("-C", folder, "config", "uploadpack.allowFilter", "true")
    git("-C", folder, "add", ".")
    git("-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "tests")
    git("-C", folder, "tag", "v2.15.0")
    return folder


def test_fetched_file_has_the_content_of_the_release_and_is_fetched_once(repository, tmp_path):
    files = UpstreamFiles("v2.15.0", tmp_path / "cache", url=repository.as_uri())
    path = files.obtain("test_present.py")
    assert path is not None
    assert path.read_bytes() == CONTENT + b"test_present.py"
    assert blob_of(path) == git("-C", repository, "rev-parse", f"v2.15.0:{FOLDER}/test_present.py")
    assert not (tmp_path / "cache" / "v2.15.0" / "torch").exists(), "more than the tests was fetched"
    repository.rename(tmp_path / "gone")
    assert files.obtain("test_present.py") == path
    assert files.obtain("test_absent.py") is None


def test_release_that_cannot_be_fetched_is_an_error_that_says_what_to_do(repository, tmp_path):
    for ref, url in (("v2.13.0", repository.as_uri()), ("v2.15.0", (tmp_path / "nothing").as_uri())):
        with pytest.raises(SourceError, match=rf"could not be fetched.*or pass --source DIR with .* at {ref}"):
            UpstreamFiles(ref, tmp_path / "cache", url=url).obtain("test_present.py")
    files = UpstreamFiles("v2.15.0", tmp_path / "cache", url=repository.as_uri())
    assert files.obtain("test_present.py") is not None, "what failed is repeated"


def test_checkout_is_read_instead_of_the_network(repository, tmp_path):
    files = UpstreamFiles("v2.15.0", tmp_path / "cache", source=repository, url="file:///nothing")
    assert files.obtain("test_present.py") == repository / FOLDER / "test_present.py"
    assert files.obtain("test_absent.py") is None
    assert not (tmp_path / "cache").exists()
    with pytest.raises(SourceError, match=f"has no folder {FOLDER}: pass a checkout of pytorch at v2.15.0"):
        UpstreamFiles("v2.15.0", tmp_path, source=tmp_path).obtain("test_own.py")


def test_ref_is_the_tag_of_a_release_and_the_commit_of_another_build():
    assert ref_of("2.13.0+cpu", "cf30153c") == "v2.13.0"
    assert ref_of("2.16.0.dev20261101+cpu", "cf30153c") == "cf30153c"
    assert ref_of("2.16.0a0+gitcf30153", "cf30153c") == "cf30153c"
