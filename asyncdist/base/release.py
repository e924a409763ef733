"""What a release sets: its version, and where users find its documentation."""

import re

VERSION = "0.1.0"
"""The version of the package. Ranks of one world must have the same version."""
PUBLISHED = ""
"""The address of the documentation, with a slash at the end; empty as long as it is not published."""
REFERENCE = re.compile(r"\nsee `asyncdist explain \w+`(?:, or [^\s#]+#\w+)?")
"""The last line of a message."""


def reference_to(error: str) -> str:
    """Return the last line of the messages of a class of errors: where the section about the class is."""
    address = f", or {PUBLISHED}errors/#{error.lower()}" if PUBLISHED else ""
    return f"\nsee `asyncdist explain {error}`{address}"
