"""Time a newcomer's path: docs/start.md as it stands, from the clone or a wheel to two epochs.

Usage: python scripts/newcomer.py FOLDER [--wheel FILE] [--json FILE]

FOLDER has photographs, a sub-folder a class. The blocks of the page run in a new folder, one after
the other, with a wheel, or with a clone of this repository's last commit; nothing is done that the
page does not say. The clone's way asks the system for packages, so that it wants to be root.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^## (\d\. \w[^\n]*)$|^```(shell clone|shell wheel|bash|python)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def steps(wheel: str | None) -> list[tuple[str, str, str]]:
    """(section, kind, text) of each block of the page that is on this way."""
    section = ""
    found = []
    other = "shell clone" if wheel else "shell wheel"
    for heading, kind, text in BLOCK.findall((ROOT / "docs" / "start.md").read_text()):
        section = heading or section
        if kind and kind != other:
            filled = text.replace("URL", str(ROOT)).replace("WHEEL", str(wheel))
            found.append((section, kind, filled))
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
    parser = argparse.ArgumentParser(description="Run docs/start.md as it stands, and time it.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--wheel", type=os.path.abspath)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    photos = args.folder.resolve()
    images = sum(1 for path in photos.rglob("*") if path.is_file())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "photos").symlink_to(photos)
        for section, kind, text in steps(args.wheel):
            seconds = run(kind, text, folder)
            rows.append({"step": section, "seconds": round(seconds, 1)})
            print(f"{seconds:7.1f} s  {section}", flush=True)
    total = sum(row["seconds"] for row in rows)
    print(f"{total:7.1f} s  in all, {images} photographs")
    if args.json:
        report = {"photographs": images, "seconds": round(total, 1), "steps": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
