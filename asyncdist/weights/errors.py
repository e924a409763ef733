"""The errors of published weights. `asyncdist.weights` exports them; the other errors are in `asyncdist.errors`.

AsyncdistError (RuntimeError)
└── WeightsError                    published weights could not be read
    ├── DigestError                 the bytes of a parameter are not those that were published
    └── PublisherReplacedError      a later publisher of the same weights has taken over
"""

from __future__ import annotations

from asyncdist.errors import AsyncdistError


class WeightsError(AsyncdistError):
    """Published weights could not be read or used. The message says which version, and what was tried."""


class DigestError(WeightsError):
    """The bytes of a parameter that a source has sent do not have the digest that the publisher computed.

    Attributes:
        parameter: The name of the parameter.
        source: The process that has sent it.
        version: The version, as text.
    """

    def __init__(self, parameter: str, source: str, version: str) -> None:
        super().__init__(parameter, source, version)
        self.parameter, self.source, self.version = parameter, source, version

    def _text(self) -> str:
        return (
            f"{self.parameter} of {self.version} as sent by {self.source} does not have the digest that the publisher "
            "computed, and was dropped; a reader tries the other sources: if it happens again, check the memory and the "
            "network of that host"
        )


class PublisherReplacedError(WeightsError):
    """A later publisher of the same weights has taken over, so this one can publish no more.

    ``incarnation`` and ``later`` are the numbers of the two.
    """

    def __init__(self, incarnation: int, later: int) -> None:
        super().__init__(incarnation, later)
        self.incarnation, self.later = incarnation, later

    def _text(self) -> str:
        return (
            f"publisher {self.incarnation} of these weights was replaced by publisher {self.later}, which entered later: "
            "end this process if it was restarted elsewhere, or give the two different name= arguments"
        )
