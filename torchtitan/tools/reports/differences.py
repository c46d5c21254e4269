"""How the configurations and surroundings of runs differ."""

import json
from collections.abc import Sequence
from typing import Any

from torchtitan.tools.reports.folder import Folder
from torchtitan.utils.text import cut

_OWN = ("job.dump_folder", "job.save_config_file")
"""Keys that differ between any two runs."""
_LONGEST = 500


def settings(folder: Folder) -> dict[str, Any]:
    """A run's configuration, ranks, layout, devices, commit and versions, by key."""
    found = {key: value for key, value in folder.config.items() if key not in _OWN}
    if folder.starts:
        last = folder.starts[-1]
        layout = " x ".join(f"{axis} {degree}" for axis, degree in last.layout.items())
        devices = ", ".join(f"{count} {name}" for name, count in last.devices.items())
        found |= {
            "ranks": last.ranks,
            "layout": layout or None,
            "devices": devices or None,
        } | last.about
    return found


def differences(folders: Sequence[Folder]) -> list[dict[str, Any]]:
    """The keys whose values are not the same in all runs: `key` and `values`, None where it is
    unset.
    """
    found = [settings(folder) for folder in folders]
    keys = {key: None for one in found for key in one}
    rows = [
        {"key": cut(key, _LONGEST), "values": [_plain(one.get(key)) for one in found]}
        for key in keys
    ]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def _plain(value: Any) -> str | int | float | bool | None:
    """A value that JSON can hold; a list as its text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return cut(value if isinstance(value, str) else json.dumps(value, default=str), _LONGEST)
