"""A report as one HTML page that needs no other file."""

import base64
import dataclasses
import html
import io
from collections.abc import Sequence
from typing import Any

from tfmix import _tables
from tfmix.doctor import verdicts

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .3rem .6rem;
         border-bottom: 1px solid #ddd; vertical-align: top; }
th { background: #f6f6f6; }
code, td:last-child { font-family: monospace; font-size: 13px;
                      overflow-wrap: anywhere; }
.overflow, .not_finite { background: #fbe3e4; }
.underflow, .inaccurate { background: #fdf3d8; }
.note { background: #fdf3d8; padding: .4rem .6rem; }
img { max-width: 100%; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
td:nth-child(4), td:nth-child(5) { white-space: nowrap; }
.wide { overflow-x: auto; }
@media (max-width: 44rem) {
  .wide img { max-width: none; width: 44rem; }
  thead { display: none; }
  tr { display: block; padding: .4rem 0; border-bottom: 1px solid #ddd; }
  td { display: inline-block; border: 0; padding: 0 .5rem; }
  td:first-child { font-weight: 600; }
  td:last-child { display: block; }
}
"""


def document(
    title: str,
    table: _tables.Table,
    loss_scale: float,
    faults: Sequence[verdicts.LayerVerdict],
    figure: Any,
) -> str:
    """Returns the page; `figure` is a matplotlib figure or None."""
    title = html.escape(title)
    notes = "".join(
        f'<p class="note">{html.escape(note)}</p>\n' for note in table.notes
    )
    summary = ""
    if faults:
        first = faults[0]
        summary = (
            f"<p><b>First: {html.escape(first.layer)}</b>, {first.phase}, "
            f"{first.verdict}: <code>{html.escape(first.advice)}</code></p>\n"
        )
    bare = dataclasses.replace(table, title="", notes=())
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n"
        f"<p>Gradients were judged under a loss scale of {loss_scale:g}. Each "
        f"layer was judged by itself, on the inputs it has in float32.</p>\n"
        f"{summary}{notes}{_picture(figure)}"
        f"{bare.html()}</body></html>\n"
    )


def _picture(figure: Any) -> str:
    if figure is None:
        return ""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    data = base64.b64encode(written.getvalue()).decode("ascii")
    source = f"data:image/png;base64,{data}"
    image = f'<img alt="Headroom of each layer" src="{source}">'
    return f'<p class="wide">{image}</p>\n'
