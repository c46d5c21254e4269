"""Self-contained pages: styles, scripts, the charting library and the data in one HTML file.

Such a file opens without a network, can be mailed, and loads nothing. `page.js` is shared by
pages (numbers, tables, stacked bars, tooltips that the keyboard reaches); `chart.js` has charts
with two axes, drawn by uPlot.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "page.js", "chart.js")


def web_page(
    title: str, data: dict[str, Any], scripts: Sequence[Path], styles: Sequence[Path] = ()
) -> str:
    """A page that runs `scripts` on `data`.

    Args:
        data: value of the variable `data` in the scripts.
        scripts: scripts to run in order in one scope, after the shared ones.
        styles: style sheets, after the shared ones.
    """
    replacements = {
        "TITLE": html.escape(title),
        "STYLE": "\n".join(map(_read, (*(_FOLDER / name for name in _STYLES), *styles))),
        "DATA": json.dumps(data).replace("<", "\\u003c"),  # no data begins or ends a script
        "SCRIPTS": "\n".join(map(_read, (*(_FOLDER / name for name in _SCRIPTS), *scripts))),
    }
    pieces = _read(_FOLDER / "page.html").split("__")
    return "".join(replacements.get(piece, piece) for piece in pieces)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
