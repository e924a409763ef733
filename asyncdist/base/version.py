"""The version of the package: read by the package itself, the store's status and the rendezvous, which compares
versions."""

VERSION = "0.1.0"
