"""Make conversations about Python's standard library: `python make_conversations.py FILE`.

Each asks for a function, and the answer is the first paragraph of its documentation.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

MODULES = (
    *("bisect", "calendar", "collections", "contextlib", "copy", "csv", "datetime", "difflib"),
    *("fractions", "functools", "glob", "heapq", "inspect", "itertools", "json", "math"),
    *("operator", "os", "os.path", "pathlib", "random", "re", "shutil", "socket", "statistics"),
    *("string", "subprocess", "tempfile", "textwrap", "threading", "time", "tokenize", "zipfile"),
)


def main(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for name in MODULES:
            module = importlib.import_module(name)
            for member, value in sorted(vars(module).items()):
                text = inspect.getdoc(value) if callable(value) else None
                if member.startswith("_") or not text:
                    continue
                messages = [
                    {"role": "user", "content": f"What does {name}.{member} do?"},
                    {"role": "assistant", "content": text.partition("\n\n")[0]},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
