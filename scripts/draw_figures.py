"""Draw docs/images/shard.svg, prefix.svg and architecture.svg.

Usage: python scripts/draw_figures.py [FOLDER]

The figures follow what is written elsewhere: sizes come from README.md, the architecture from the
table of imports in CONTRIBUTING.md, which a test compares with the code. SVG is written as text, so
that a change can be reviewed, and so that a test can compare.
"""

import html
import itertools
import pathlib
import random
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INK = "#1f2933"
LINE = "#7b8794"
COLUMNS = 6  # of the rooms
SEARCHES = 12
COLOURS = ("#dbeafe", "#bfdbfe", "#93c5fd", "#60a5fa", "#fde68a", "#bbf7d0", "#fecaca")


class Drawing:
    """Shapes of an SVG picture."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
            f' width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"',
            f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>',
            "</defs>",
        ]

    def box(self, x, y, width, height, colour, text="", size=14, bold=False):
        """A box with lines of text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{colour}" stroke="{LINE}"/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - (len(lines) - 1) * size * 0.6 + size * 0.35
        for number, line in enumerate(lines):
            heavy = bold and number == 0
            self.text(x + width / 2, top + number * size * 1.2, line, size, "middle", heavy)

    def text(self, x, y, text, size=14, anchor="start", bold=False):
        """One line of text; y is its base line."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{INK}"{weight}>{html.escape(text)}</text>'
        )

    def arrow(self, x1, y1, x2, y2):
        """A straight arrow."""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{LINE}" fill="none" '
            'stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def bracket(self, x1, x2, y, text):
        """What a reader of [x1, x2) gets, below a bar."""
        self.parts.append(
            f'<path d="M{x1:g} {y:g}v8H{x2:g}v-8" stroke="{INK}" fill="none" stroke-width="1.5"/>'
        )
        self.text(x1 + 6, y + 24, text, 13)

    def __str__(self):
        return "\n".join([*self.parts, "</svg>", ""])


def sizes() -> dict[str, float]:
    """kB of a photograph by scan, from the table in README.md."""
    text = (ROOT / "README.md").read_text()
    head = re.search(r"^\| read up to \| (.+) \|$", text, re.MULTILINE)[1].split(" | ")
    row = re.search(r"^\| bytes a photograph \| (.+) \|$", text, re.MULTILINE)[1].split(" | ")
    names = [name.removeprefix("scan ").partition(",")[0] for name in head]
    return dict(zip(names, (float(each.split()[0]) for each in row), strict=True))


def shard() -> Drawing:
    """A shard from its first byte to its last, to scale."""
    kilobytes = sizes()
    full = kilobytes["full"]
    drawing = Drawing(900, 352, "A shard: index, scan groups one after the other, metadata")
    drawing.text(20, 32, "One shard, data-000007.tar: 1,024 photographs", 16, bold=True)
    left, scale = 80, 790 / full
    drawing.box(20, 56, 60, 64, COLOURS[4], "index\nlabels", 12)
    names = list(kilobytes)[:-1]
    start = 0.0
    before = 0
    for colour, name in zip(COLOURS, names, strict=False):
        stop = kilobytes[name]
        width = (stop - start) * scale
        label = name if int(name) == before + 1 else f"{before + 1} to {name}"
        text = f"{'scan' if label == name else 'scans'} {label}" if width > 90 else label
        drawing.box(left + start * scale, 56, width, 64, colour, text)
        start, before = stop, int(name)
    drawing.box(left + start * scale, 56, max((full - start) * scale, 8), 64, COLOURS[5])
    for row, name in enumerate(names[1:-1]):
        text = f"scan={name} reads {kilobytes[name]:g} kB a photograph"
        drawing.bracket(20, left + kilobytes[name] * scale, 130 + 32 * row, text)
    last = 130 + 32 * len(names[1:-1])
    drawing.bracket(20, left + full * scale, last, f'scan="full" reads {full:g} kB: every byte')
    y = last + 72
    drawing.text(20, y, "A scan group:", 14, bold=True)
    drawing.box(150, y - 22, 90, 34, COLOURS[4], "sizes, CRCs", 12)
    for number in range(4):
        text = f"photograph {number + 1}" if number < 3 else "..."
        drawing.box(240 + 110 * number, y - 22, 110, 34, COLOURS[1], text, 12)
    note = "Widths to scale for ImageNet photographs, but for the index; green: metadata."
    drawing.text(20, y + 36, note, 12)
    return drawing


STEPS = (
    ("store", "S3, HTTP, Hub,\ndisk", 0),
    ("one request", "bytes 0 to\nprefix_stop(k)", 1),
    ("prefix cache", "on local disk,\nif you want", 4),
    ("prefix", "pieces joined,\nCRC compared", 2),
    ("decode", "crop, resize,\nonly these scans", 3),
    ("batch", "uint8 tensors,\nlabels", 5),
)


def prefix() -> Drawing:
    """A prefix from the store to a batch, and how it grows."""
    drawing = Drawing(900, 250, "The life of a prefix, from the store to a batch")
    drawing.text(20, 32, "The life of a prefix", 16, bold=True)
    for number, (name, text, colour) in enumerate(STEPS):
        x = 20 + number * 147
        drawing.box(x, 56, 120, 84, COLOURS[colour], f"{name}\n{text}", 13, bold=True)
        if number:
            drawing.arrow(x - 26, 98, x - 2, 98)
    drawing.box(20, 176, 560, 44, "#ffffff")
    drawing.text(
        32, 203, "Later at scan 5: only bytes prefix_stop(2) to prefix_stop(5) are fetched."
    )
    drawing.arrow(374, 174, 374, 144)
    drawing.text(600, 196, "The next shards are fetched", 13)
    drawing.text(600, 214, "while this one is used.", 13)
    return drawing


def imports() -> dict[str, set[str]]:
    """The rooms that each room may import, from the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", text, re.MULTILINE))
    del rows["cli"]
    return {
        room: {name.partition(".")[0] for name in row.split(", ")} - {"nothing"}
        for room, row in rows.items()
        if room != "room"
    }


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports that no other import brings along: the arrows that a reader needs."""

    def reach(room: str) -> set[str]:
        return graph[room].union(*map(reach, graph[room]))

    return {
        room: {
            name
            for name in names
            if not any(name in reach(other) for other in names if other != name)
        }
        for room, names in graph.items()
    }


Places = dict[str, tuple[int, int]]  # the column and the level of each room


def crossing(column: int, row: int, places: Places, arrow: tuple[str, str]) -> bool:
    """Whether an arrow goes through the box at a place, or nearly so."""
    (start, top), (stop, bottom) = places[arrow[0]], places[arrow[1]]
    if not bottom < row < top:
        return False
    # Boxes are half as high as a level, so that an arrow is to keep clear of more than a point.
    edges = ((row + share - bottom) / (top - bottom) for share in (-0.3, 0.3))
    at = [stop + (start - stop) * edge for edge in edges]
    return min(at) - 0.55 < column < max(at) + 0.55


def ugliness(places: Places, arrows: list[tuple[str, str]]) -> float:
    """Arrows behind boxes first, then arrows that cross, then their length."""
    hidden = sum(
        crossing(*place, places, arrow)
        for place in places.values()
        for arrow in arrows
        if places[arrow[0]][1] - places[arrow[1]][1] > 1
    )
    meeting = sum(
        (places[a][0] - places[c][0]) * (places[b][0] - places[d][0]) < 0
        for (a, b), (c, d) in itertools.combinations(arrows, 2)
        if places[a][1] == places[c][1] and places[b][1] == places[d][1]
    )
    length = sum(abs(places[a][0] - places[b][0]) for a, b in arrows)
    return 100 * hidden + 5 * meeting + length


def improved(places: Places, arrows: list[tuple[str, str]]) -> Places:
    """Places in which no room wants to go to another column of its level."""
    least = ugliness(places, arrows)
    searching = True
    while searching:
        searching = False
        for room, column in itertools.product(list(places), range(COLUMNS)):
            moved = exchanged(places, room, column)
            found = ugliness(moved, arrows)
            if found < least:
                places = moved
                least = found
                searching = True
    return places


def exchanged(places: Places, room: str, column: int) -> Places:
    """The room in another column; who was there comes where it was."""
    here, level = places[room]
    back = {other: (here, level) for other, place in places.items() if place == (column, level)}
    return {**places, **back, room: (column, level)}


def placed(levels: dict[int, list[str]], arrows: list[tuple[str, str]]) -> Places:
    """The best of some searches; the same in each run."""
    chance = random.Random(1)
    found = []
    for _ in range(SEARCHES):
        places = {
            room: (column, level)
            for level, rooms in levels.items()
            for room, column in zip(rooms, chance.sample(range(COLUMNS), len(rooms)), strict=True)
        }
        found.append(improved(places, arrows))
    return min(found, key=lambda places: ugliness(places, arrows))


def architecture() -> Drawing:
    """Rooms above those that they import."""
    graph = imports()

    def height(room: str) -> int:
        return 1 + max(map(height, graph[room]), default=-1)

    levels: dict[int, list[str]] = {}
    for room in graph:
        levels.setdefault(height(room), []).append(room)
    top = max(levels)
    drawing = Drawing(900, 140 + 92 * (top + 1), "Which room knows which")
    drawing.box(30, 20, 840, 44, COLOURS[4], "cli: knows every room", 15)
    arrows = [(room, name) for room, names in direct(graph).items() for name in sorted(names)]
    places = placed(levels, arrows)
    at = {room: (20 + 147 * c, 100 + 92 * (top - level)) for room, (c, level) in places.items()}
    for room, name in arrows:
        (x, y), (x2, y2) = at[room], at[name]
        drawing.arrow(x + 62, y + 44, x2 + 62 + (x - x2) * 0.08, y2 - 2)
    for room, (x, y) in at.items():
        drawing.box(x, y, 124, 44, COLOURS[1], room, 15)
    bottom = 100 + 92 * (top + 1)
    drawing.text(30, bottom, "An arrow is an import; those that another one brings along are", 13)
    drawing.text(30, bottom + 17, "left out. errors, redaction, memory, checksum, zstd: free.", 13)
    return drawing


FIGURES = {
    "shard": shard,
    "prefix": prefix,
    "architecture": architecture,
}


def main() -> None:
    """Write all figures."""
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main()
