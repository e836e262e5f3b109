"""The pages that reports write: one look, and nothing beside the one file."""

import datetime
import html
import os
import pathlib
import sys

import keras

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd;
        --head: #f6f6f6; --label: #666; --bad: #fbe3e4; --warn: #fdf3d8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --page: #1b1b1d; --line: #3a3a3d; --head: #28282b;
          --label: #a0a0a0; --bad: #5a2528; --warn: #4d4118; }
  /* Drawn on white: dark, in the same hues. */
  img { filter: invert(.88) hue-rotate(180deg); }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 72rem; padding: 0 1rem; color: var(--text);
       background: var(--page); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .3rem .6rem;
         border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--head); cursor: pointer; }
th[aria-sort=ascending]::after { content: " \\25b4"; }
th[aria-sort=descending]::after { content: " \\25be"; }
code, .advised td:last-child { font-family: monospace; font-size: 13px;
                               overflow-wrap: anywhere; }
.overflow, .not_finite { background: var(--bad); }
.underflow, .inaccurate { background: var(--warn); }
.note { background: var(--warn); padding: .4rem .6rem; }
.filter { font: inherit; margin: .4rem 0; padding: .2rem .4rem; }
img { max-width: 100%; background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
.advised td:is(:nth-child(5), :nth-child(6)) { white-space: nowrap; }
.wide { overflow-x: auto; }
@media (max-width: 44rem) {
  .wide img { max-width: none; width: 44rem; }
  thead { display: none; }
  tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  td { display: inline-block; border: 0; padding: 0 .5rem; }
  td:first-child { font-weight: 600; }
  td:first-child { overflow-wrap: anywhere; }
  .advised td:last-child { display: block; }
  td:not(:first-child):not(:empty)::before {
    content: attr(data-label) " "; color: var(--label); font-size: 11px;
    font-family: system-ui, sans-serif; }
}
"""
# A click on a head sorts a table by that column, once more the other way
# round; a long table has a field whose words its rows have to hold.
_SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, n) => row.cells[n].textContent;
  heads.forEach((head, n) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const compared = new Intl.Collator(undefined, {numeric: true}).compare;
    const sign = (a, b) => {
      const [x, y] = [parseFloat(value(a, n)), parseFloat(value(b, n))];
      const numbers = !isNaN(x) && !isNaN(y);
      return numbers ? x - y : compared(value(a, n), value(b, n));
    };
    const rows = [...body.rows].sort((a, b) => sign(a, b) * (up ? 1 : -1));
    body.append(...rows);
  }));
  if (body.rows.length < 12) continue;
  const field = document.createElement("input");
  field.className = "filter";
  field.type = "search";
  field.placeholder = "filter rows";
  field.setAttribute("aria-label", "filter rows");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.before(field);
}
"""


def write(
    path: str | os.PathLike[str], title: str, model_name: str, body: str
) -> None:
    """Writes a page that begins with what was made, when, and by what.

    Args:
        path: The file.
        title: The heading, as text.
        model_name: The name of the model that it is about.
        body: HTML, of what stands below the head.
    """
    title = html.escape(title)
    pathlib.Path(path).write_text(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n"
        f"<p>Model <b>{html.escape(model_name)}</b>, {_made_with()}.</p>\n"
        f"{body}<script>{_SCRIPT}</script></body></html>\n",
        encoding="utf-8",
    )


def _made_with() -> str:
    """Says when, and by which versions, something is made."""
    now = datetime.datetime.now().astimezone()
    tfmix = vars(sys.modules["tfmix"])["__version__"]
    backend = keras.backend.backend()
    version = vars(sys.modules[backend])["__version__"]
    return (
        f"{now:%Y-%m-%d %H:%M %Z}, tfmix {tfmix}, Keras {keras.__version__} "
        f"on {backend} {version}"
    )
