"""The rows of docs/differences.md, in the order of the page: one program each, for two ranks of either side."""

from tests.differences.rows import collectives, stores, training, libraries  # isort: skip
from tests.differences.rows.row import ROWS, Side, run

__all__ = ["ROWS", "Side", "collectives", "libraries", "run", "stores", "training"]
