"""The page of runs: `torchtitan report --html` writes it, `torchtitan watch` serves it.

`formats.js` has numbers as people read them, `curves.js` charts of curves, `timeline.js` what
happened when, `page.js` the sections, and `live.js` keeps the page of a server up to date.
"""

from pathlib import Path
from typing import Any

from torchtitan.telemetry.run_record import KINDS
from torchtitan.tools.web import web_page
from torchtitan.utils.text import listed

_FOLDER = Path(__file__).parent
_SCRIPTS = [
    _FOLDER / name for name in ("formats.js", "curves.js", "timeline.js", "live.js", "page.js")
]
_STYLES = [_FOLDER / "page.css"]


def report_page(report: dict[str, Any]) -> str:
    """A self-contained page that shows `report`, what `collect` returns."""
    title = listed([run["name"] for run in report["runs"]], 4) or "no runs"
    return web_page(title, {"kinds": KINDS, "report": report}, _SCRIPTS, _STYLES)


def live_page(names: list[str]) -> str:
    """The page that fetches its data from the server it came from."""
    return web_page(listed(names, 4), {"kinds": KINDS, "report": None}, _SCRIPTS, _STYLES)
