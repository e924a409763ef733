"""The version of the package. Ranks of one world must have the same version."""

VERSION = "0.1.0"
