"""The pictures of README.md and the documents, made from what the commands print today.

    python -m tests.pictures                # the plan's page alone
    python -m tests.faults.week /tmp/week
    python -m tests.pictures /tmp/week/run  # all, with the report's page of that run

They need Chromium and some minutes.
"""

import html
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.browser import browser
from tests.doc_blocks import BLOCKS, ROOT, workspace

IMAGES = ROOT / "docs/images"
TERMINAL = (
    (
        "torchtitan train debug_model",
        r"results in|Model|Starting|step +(1|5)/100|step +50/100 +validation|  checkpoint ",
    ),
    ("torchtitan train debug_model --training.stpes 3 --optimizer.lr fast", ""),
    ("torchtitan plan llama3_8b --world 8 --hardware h100-sxm", "^(?!note|  it)"),
)
"""Commands and a pattern of the lines to show of each; `...` stands for the others."""
OVERVIEW = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 20px; display: flex; gap: 20px; background: #fff }}
pre {{ margin: 0; width: 800px; box-sizing: border-box; padding: 18px; border-radius: 10px; height: 840px;
  background: #17181d; color: #e4e4e8; font: 11px/16px "DejaVu Sans Mono", monospace }}
b {{ color: #8ad69a }}
div {{ width: 698px; height: 838px; border: 1px solid #ccc; border-radius: 10px; overflow: hidden }}
iframe {{ border: 0; width: 1040px; height: 1250px; transform: scale(.67); transform-origin: 0 0 }}
</style><pre>{terminal}</pre><div><iframe src="{report}"></iframe></div>"""  # noqa: E501


def run(command: str, folder: Path) -> str:
    """What `command` prints."""
    module = command.replace("torchtitan ", f"{sys.executable} -m torchtitan ", 1)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        module,
        shell=True,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ).stdout


def terminal(folder: Path, last: str) -> str:
    """The commands of the overview with their output, as HTML; `last` prints nothing."""
    lines: list[str] = []
    for command, pattern in TERMINAL:
        lines.append(f"<b>$ {command}</b>")
        for line in run(command, folder).splitlines():
            if re.search(pattern, line) or not line:
                wrapped = textwrap.wrap(line, 110, subsequent_indent=" " * 6) or [""]
                lines += map(html.escape, wrapped)
            elif lines[-1] != "...":
                lines.append("...")
        lines.append("")
    return "\n".join([*lines, f"<b>$ {last}</b>"])


def main() -> None:
    with tempfile.TemporaryDirectory() as profile, tempfile.TemporaryDirectory() as name:
        folder = workspace(Path(name))
        (example,) = (b for b in BLOCKS if b.page == "plan.md" and "--html" in b.text)
        run(example.lines[0], folder)
        pages = {"plan": "outputs/70b-32k"}
        if sys.argv[1:]:
            run(f"torchtitan report {Path(sys.argv[1]).resolve()} --html report.html", folder)
            pages["report"] = "report"
        with browser(Path(profile)) as chromium:
            for image, page in pages.items():
                chromium.open((folder / f"{page}.html").as_uri(), 1040, scale=0.7)
                chromium.screenshot(IMAGES / f"{image}-page.png")
            if "report" in pages:
                overview = terminal(folder, "torchtitan report outputs/week --html week.html")
                (folder / "overview.html").write_text(
                    OVERVIEW.format(terminal=overview, report="report.html")
                )
                chromium.open((folder / "overview.html").as_uri(), 1560, height=880)
                chromium.screenshot(IMAGES / "overview.png", full=False)


if __name__ == "__main__":
    main()
