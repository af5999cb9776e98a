"""An HTML page with the pictures of the worst findings."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from .. import storage
from ..errors import PCRError
from ..format.scan import Scan
from ..format.shard_index import State
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.other_formats import compress
from ..reading.prefix import Prefix
from ..reading.shard import Shard
from .duplicates import Picture
from .findings import Facts, Finding

_MAX_GROUPS = 24
_MAX_OF_GROUP = 6
_SIDE = 160
_QUALITY = 85
_SCAN = 5
_STYLE = """body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em }
h2 { font-size: 1.1em; margin: 2em 0 0.5em } .wrong { color: #b91c1c }
.group { display: inline-flex; gap: 10px; padding: 8px; margin: 0 10px 10px 0;
  vertical-align: top; background: #f1f1f1; border-radius: 6px }
figure { margin: 0; width: 160px } .box { display: flex; width: 160px; height: 160px;
  align-items: center; justify-content: center; background: #ddd; color: #555 }
figcaption { font-size: 11px; margin-top: 3px; overflow-wrap: anywhere }
"""


def write_sheet(facts: Sequence[Facts], findings: Sequence[Finding], path: str) -> None:
    """Write the page; see :meth:`pcrshard.checking.check.CheckReport.sheet`."""
    # The pictures of a group are often of a few shards.
    load = lru_cache(maxsize=4)(Shard.load)
    title = f"Check of {html.escape(', '.join(each.part.name for each in facts))}"
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{title}</h1>")
    if not findings:
        parts.append("<p>Nothing found.")
    for found in findings:
        name = "wrong" if found.is_wrong else "note"
        parts.append(f"<h2 class={name}>{name}: {html.escape(found.text)}</h2>")
        for group in found.groups[:_MAX_GROUPS]:
            shown = "".join(_figures(facts, group[:_MAX_OF_GROUP], load))
            parts.append(f"<div class=group>{shown}</div>")
        if len(found.groups) > _MAX_GROUPS:
            parts.append(f"<p>... and {len(found.groups) - _MAX_GROUPS} more</p>")
    with storage.atomic_write(path) as file:
        file.write("\n".join(parts).encode())


def _figures(
    facts: Sequence[Facts], group: Sequence[Picture], load: Callable[[Shard, Scan], Prefix]
) -> Iterator[str]:
    for each in group:
        own = facts[each.part]
        name, key, label = map(html.escape, (own.part.name, each.key, own.label_name(each.label)))
        caption = f"<strong>{name}</strong><br>{key}<br>class: {label}"
        picture = _picture(own, each, load)
        source = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
        image = f'<img src="{source}">' if picture else "cannot be decoded"
        yield f"<figure><div class=box>{image}</div><figcaption>{caption}</figcaption></figure>"


def _picture(own: Facts, each: Picture, load: Callable[[Shard, Scan], Prefix]) -> bytes:
    """Return a picture as a small JPEG; empty if it cannot be decoded."""
    try:
        index = own.part.index
        prefix = load(own.part.shards[each.shard], index.at_most(_SCAN))
        if prefix.index.states[each.unit] == State.UNDECODABLE:
            return b""
        sides = prefix.index.upright_dims[each.unit].tolist()
        size = tuple(max(1, round(_SIDE * side / max(sides))) for side in sides)
        decoder = ImageDecoder(size, layout="hwc")
        return compress(decoder(prefix.pieces(each.unit)), _QUALITY)
    except PCRError:
        return b""
