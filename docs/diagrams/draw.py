"""Draws the Mermaid diagrams of the pages: `make diagrams`. It needs npm, which fetches Mermaid, and Chromium.

The site contains the drawings, because a page that draws them itself would load Mermaid from another host. Each drawing
is named by the hash of its source. The colours are those of the page around it.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "site"))

from hooks import DIAGRAM, ROOT, diagram_path

MERMAID = "mermaid@11"
COLOURS = {
    "#010101": "var(--md-default-fg-color)",
    "#020202": "var(--md-code-bg-color)",
    "#030303": "var(--md-default-bg-color)",
    "#040404": "var(--md-default-fg-color--light)",
}
INK, FILL, PAPER, LINE = COLOURS
THEME = {
    "background": PAPER, "mainBkg": FILL, "primaryColor": FILL, "secondaryColor": FILL, "tertiaryColor": PAPER,
    "primaryTextColor": INK, "textColor": INK, "nodeTextColor": INK, "titleColor": INK, "lineColor": LINE,
    "nodeBorder": LINE, "clusterBkg": PAPER, "clusterBorder": LINE, "edgeLabelBackground": PAPER,
}  # fmt: skip
PAGE = """<!doctype html><meta charset="utf-8"><body>{blocks}
<script src="{script}"></script>
<script>
mermaid.initialize({{startOnLoad: false, theme: "base", htmlLabels: false, fontFamily: "sans-serif",
  flowchart: {{htmlLabels: false, useMaxWidth: true}}, themeVariables: {theme}}});
mermaid.run({{querySelector: "pre"}}).then(() => document.body.setAttribute("data-drawn", "yes"));
</script>"""


def draw(sources: list[str]) -> list[str]:
    """Return the drawings of diagrams."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "xzf", *(path.name for path in Path(folder).glob("*.tgz"))], cwd=folder, check=True)
        blocks = "".join(f"<pre>{html.escape(source)}</pre>" for source in sources)
        script = f"{folder}/package/dist/mermaid.min.js"
        page = Path(folder, "page.html")
        page.write_text(PAGE.format(blocks=blocks, script=script, theme=json.dumps(THEME)), encoding="utf-8")
        chromium = "chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        command = [*chromium.split(), f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", "--dump-dom"]
        dumped = subprocess.run([*command, page.as_uri()], check=True, capture_output=True, text=True).stdout
    drawings = re.findall(r"<svg.*?</svg>", dumped, re.DOTALL)
    assert 'data-drawn="yes"' in dumped, "Chromium did not finish the drawings"
    assert len(drawings) == len(sources)
    return drawings


def coloured(drawing: str) -> str:
    """Return a drawing whose colours are variables of the page."""
    for placeholder, colour in COLOURS.items():
        drawing = drawing.replace(placeholder, colour)
    return drawing


def main() -> None:
    """Draw each diagram that has changed, and remove drawings of diagrams that are gone."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    paths = {diagram_path(source): source for page in pages for source in DIAGRAM.findall(page)}
    for path in set((ROOT / "docs" / "diagrams").glob("*.svg")).difference(paths):
        path.unlink()
    missing = [path for path in paths if not path.exists()]
    if missing:
        for path, drawing in zip(missing, draw([paths[each] for each in missing]), strict=True):
            # The identifiers within a drawing must differ between the drawings of a page.
            name = re.search(r'<svg[^>]* id="([^"]+)"', drawing)
            assert name is not None
            path.write_text(coloured(drawing.replace(name[1], f"diagram-{path.stem}")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
