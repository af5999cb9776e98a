"""Time a newcomer's path: docs/start.md as it stands, from the clone to the last epoch.

Usage: python scripts/newcomer.py FOLDER [JSON]

FOLDER has photographs, a sub-folder a class. The blocks of the page run in a new folder, one after
the other, with a clone of this repository's last commit; nothing is done that the page does not
say. It asks the system for packages, so that it wants to be root.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^## (\d\. \w[^\n]*)$|^```(shell|bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def steps() -> list[tuple[str, str, str]]:
    """(section, kind, text) of each block of the page."""
    section = ""
    found = []
    for heading, kind, text in BLOCK.findall((ROOT / "docs" / "start.md").read_text()):
        section = heading or section
        if kind:
            found.append((section, kind, text.replace("URL", str(ROOT))))
    return found


def run(kind: str, text: str, folder: str) -> float:
    """Seconds that a block takes."""
    path = f"{folder}/environment/bin:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    environment.pop("PYTHONPATH", None)
    command = ["python", "-c", text] if kind == "python" else ["bash", "-euc", text]
    begun = time.monotonic()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


def main() -> None:
    """Run the page and print what took how long."""
    photos = pathlib.Path(sys.argv[1]).resolve()
    images = sum(1 for path in photos.rglob("*") if path.is_file())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "photos").symlink_to(photos)
        for section, kind, text in steps():
            seconds = run(kind, text, folder)
            rows.append({"step": section, "seconds": round(seconds, 1)})
            print(f"{seconds:7.1f} s  {section}", flush=True)
    total = sum(row["seconds"] for row in rows)
    print(f"{total:7.1f} s  in all, {images} photographs")
    if len(sys.argv) > 2:
        report = {"photographs": images, "seconds": round(total, 1), "steps": rows}
        pathlib.Path(sys.argv[2]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
