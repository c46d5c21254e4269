"""Words, figures and tables, the same in logs, reports and pages."""

import math
import os
import re
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

DATE = "%Y-%m-%d %H:%M:%S"
"""Format of dates in logs and reports, for `time.strftime`."""
USEFUL_EPOCHS = 4
_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?%?")
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 100
_BRIEF.maxlong = 30
_BRIEF.maxlist = 8
_BRIEF.maxdict = 4
_BRIEF.maxlevel = 3


def brief(value: object) -> str:
    """`repr(value)` for a message: long text, numbers and containers are cut."""
    return cut(_BRIEF.repr(value), 300)


def cut(text: str, limit: int) -> str:
    """`text`, without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    end = limit // 4
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def printable(text: str) -> str:
    """`text` on one line, without characters that could control a terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control a terminal, end lines for some readers or turn their direction; not tab
and newline.
"""


def escaped(text: str) -> str:
    """`text` with control characters escaped as in JSON and TOML, `\\u001b`."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def path_text(path: str | os.PathLike[str]) -> str:
    """A path as text for a page; bytes that aren't UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")


def listed(values: Iterable[object], limit: int = 16) -> str:
    """The values separated by commas; of more than `limit` values, the first ones and the last."""
    words = [str(value) for value in values]
    return ", ".join(words if len(words) <= limit else [*words[: limit - 2], "...", words[-1]])


def plural(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `10,000 batches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


# ---- figures


def show_tokens(count: float) -> str:
    """`512`, `65.5K`, `1.20B`, `15.0T`: three significant digits."""
    if abs(count) < 999.5:
        return f"{count:.0f}"
    for unit in "KMBT":
        count /= 1000
        if abs(count) < 999.5 or unit == "T":
            break
    digits = 0
    if abs(count) < 9.995:
        digits = 2
    elif abs(count) < 99.95:
        digits = 1
    return f"{count:,.{digits}f}{unit}"


def show_epochs(planned: float, tokens: float) -> str:
    """How often a training of `planned` tokens reads a text of `tokens` tokens."""
    epochs = planned / tokens
    digits = 1 if epochs < 10 else 0
    text = f"{show_tokens(planned)} tokens read the text about {epochs:,.{digits}f} times"
    if epochs > USEFUL_EPOCHS:
        text += f"; beyond {USEFUL_EPOCHS}, repeated text teaches less and less (arXiv:2305.16264)"
    return text


def show_loss(loss: float) -> str:
    """`2.3457`."""
    return f"{loss:.4f}"


def show_recent(losses: Sequence[float], unit: str) -> str | None:
    """The mean of the last tenth of the losses, at least five: one of few rows is mostly noise.
    None without any.
    """
    recent = losses[-max(5, len(losses) // 10) :]
    if not recent:
        return None
    return f"{show_loss(fmean(recent))} (mean of the last {plural(len(recent), unit)})"


def validation_title(name: str) -> str:
    """The loss of a validation set; the name is '' if there is one set."""
    return f"validation loss of {name}" if name else "validation loss"


def show_percent(percent: float) -> str:
    """`41.2%`, of 41.23; also MFU and goodput."""
    return f"{percent:.1f}%"


def show_gib(gib: float) -> str:
    """`71.2 GiB`; two decimals below 1."""
    return f"{gib:,.{1 if abs(gib) >= 0.995 else 2}f} GiB"


def show_size(size: float) -> str:
    """`512 bytes`, `4.5 MB`, `12.3 GB`: a number of bytes in the unit that fits."""
    if size < 1000:
        return f"{size:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:,.1f} TB"


def show_rate(per_second: float) -> str:
    """`7,822`, for example tokens per second; one decimal below 100."""
    return f"{per_second:,.{0 if abs(per_second) >= 99.95 else 1}f}"


def show_duration(seconds: float) -> str:
    """`0.25 s`, `5.2 s`, `42 s`, `2 min 05 s`, `1 h 02 min`, `3 d 07 h`; or `unknown`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{show_duration(-seconds)}"
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2g} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 3599.5:
        minutes, remainder = divmod(round(seconds), 60)
        return f"{minutes} min {remainder:02d} s"
    if seconds < 24 * 3600 - 30:
        hours, remainder = divmod(round(seconds / 60), 60)
        return f"{hours} h {remainder:02d} min"
    days, remainder = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {remainder:02d} h"


def show_date(at: float) -> str:
    """`2026-11-23 04:05:06`, in local time.

    Args:
        at: seconds since the epoch.
    """
    return time.strftime(DATE, time.localtime(at))


# ---- tables


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted key. Empty tables are left out."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A borderless table of `printable` cells, which are never cut; numbers are right-aligned.

    Args:
        rows: the first holds the headings.
    """
    from rich.cells import cell_len  # imported late, because it is slow

    columns = []
    for column in zip(*rows, strict=True):
        cells = [printable(cell) for cell in column]
        body = cells[1:] or cells
        numeric = any(body) and all(_NUMBER.fullmatch(cell) for cell in body if cell)
        widths = [cell_len(cell) for cell in cells]
        pads = [" " * (max(widths) - width) for width in widths]
        columns.append(
            [pad + cell if numeric else cell + pad for cell, pad in zip(cells, pads, strict=True)]
        )
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
