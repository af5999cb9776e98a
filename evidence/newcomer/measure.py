"""A newcomer's path: docs/start.md as it stands, from the clone or a wheel to two epochs, timed.

The blocks of the page run in a new folder, one after the other, with a clone of this repository's
last commit, or with the wheel that PCRSHARD_WHEEL names; nothing is done that the page does not
say. The clone's way asks the system for packages, so that it wants to be root.
"""

import os
import pathlib
import re
import subprocess
import tempfile
import time

from .. import ROOT

BLOCK = re.compile(
    r"^## (\d\. \w[^\n]*)$|^```(shell clone|shell wheel|bash|python)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def steps(page, wheel):
    """(section, kind, text) of each block of the page that is on this way."""
    section = ""
    found = []
    other = "shell clone" if wheel else "shell wheel"
    for heading, kind, text in BLOCK.findall(page):
        section = heading or section
        if kind and kind != other:
            filled = text.replace("URL", ROOT).replace("WHEEL", str(wheel))
            found.append((section, kind, filled))
    return found


def run(kind, text, folder):
    """Seconds that a block takes."""
    path = f"{folder}/environment/bin:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    environment.pop("PYTHONPATH", None)
    command = ["python", "-c", text] if kind == "python" else ["bash", "-euc", text]
    begun = time.monotonic()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


def _way(lab, wheel):
    """Seconds of each step, with the hand signs as photographs."""
    photos = pathlib.Path(lab.classify(lab.task(1).name), "train").resolve()
    page = pathlib.Path(ROOT, "docs", "start.md").read_text()
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "photos").symlink_to(photos)
        for section, kind, text in steps(page, wheel):
            seconds[section] = seconds.get(section, 0) + run(kind, text, folder)
            print(section, f"{seconds[section]:.1f} s", flush=True)
    images = sum(1 for path in photos.rglob("*") if path.is_file())
    rows = [{"step": section, "seconds": round(each, 1)} for section, each in seconds.items()]
    return {"photographs": images, "steps": rows}


def measure(lab, parts=()):
    """Both ways, or one; the wheel's only where there is one."""
    wheel = os.environ.get("PCRSHARD_WHEEL")
    for part in parts or (("clone", "wheel") if wheel else ("clone",)):
        if part == "wheel" and not wheel:
            raise SystemExit("expected PCRSHARD_WHEEL to name a wheel (scripts/wheels)")
        lab.measured(part, lambda part=part: _way(lab, wheel if part == "wheel" else None))
