"""A report as one HTML page that needs no other file."""

import base64
import html
import io
from typing import Any

from tfmix import plotting
from tfmix.doctor import rows as table_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .3rem .6rem;
         border-bottom: 1px solid #ddd; vertical-align: top; }
th { background: #f6f6f6; }
code { font-size: 13px; overflow-wrap: anywhere; }
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


def document(report: Any) -> str:
    """Returns the page.

    Args:
        report: A `NumericsReport`.

    Returns:
        HTML with its styles and, where matplotlib is installed, its picture
        inside.
    """
    state = "healthy" if report.healthy else "not healthy"
    title = f"{report.policy.name} against float32: {state}"
    heads = "".join(
        f"<th>{html.escape(column)}</th>" for column in table_rows.COLUMNS
    )
    notes = "".join(
        f'<p class="note">{html.escape(note)}</p>\n' for note in report.notes
    )
    first = report.faults[0] if report.faults else None
    summary = first and (
        f"<p><b>First: {html.escape(first.layer)}</b>, {first.phase}, "
        f"{first.verdict}: <code>{html.escape(first.advice)}</code></p>\n"
    )
    rows = "\n".join(map(_row, report.rows))
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n"
        f"<p>Gradients were judged under a loss scale of "
        f"{report.loss_scale:g}. Each layer was judged by itself, on the "
        f"inputs it has in float32.</p>\n"
        f"{summary or ''}{notes}{_picture(report)}"
        f"<table><thead><tr>{heads}</tr></thead>"
        f"\n<tbody>{rows}</tbody></table></body></html>\n"
    )


def _row(row: table_rows.Row) -> str:
    *cells, advice = table_rows.cells_of(row)
    shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    code = f"<code>{html.escape(advice)}</code>" if advice else ""
    return f'<tr class="{row.verdict}">{shown}<td>{code}</td></tr>'


def _picture(report: Any) -> str:
    try:
        figure = plotting.headroom(report)
    except ImportError:
        # The table says all that the picture shows.
        return ""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    data = base64.b64encode(written.getvalue()).decode("ascii")
    source = f"data:image/png;base64,{data}"
    image = f'<img alt="Headroom of each layer" src="{source}">'
    return f'<p class="wide">{image}</p>\n'
