"""Check that pictures can be drawn. Used by all that draw with matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path

from asyncdist.errors import UsageError


def require_matplotlib(path: Path | None = None) -> None:
    """Raise UsageError if matplotlib is not installed, or cannot write a file with this name."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UsageError("plotting needs matplotlib: pip install matplotlib") from None
    if path is not None and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UsageError(f"{path} cannot be drawn: its name must end in png, svg or pdf")
