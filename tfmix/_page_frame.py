"""The pages that reports write: one look, and nothing beside the one file."""

import datetime
import html
import os
import pathlib
import sys

import keras

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .3rem .6rem;
         border-bottom: 1px solid #ddd; vertical-align: top; }
th { background: #f6f6f6; }
code, .advised td:last-child { font-family: monospace; font-size: 13px;
                               overflow-wrap: anywhere; }
.overflow, .not_finite { background: #fbe3e4; }
.underflow, .inaccurate { background: #fdf3d8; }
.note { background: #fdf3d8; padding: .4rem .6rem; }
img { max-width: 100%; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
.advised td:is(:nth-child(5), :nth-child(6)) { white-space: nowrap; }
.wide { overflow-x: auto; }
@media (max-width: 44rem) {
  .wide img { max-width: none; width: 44rem; }
  thead { display: none; }
  tr { display: block; padding: .4rem 0; border-bottom: 1px solid #ddd; }
  td { display: inline-block; border: 0; padding: 0 .5rem; }
  td:first-child { font-weight: 600; }
  td:first-child { overflow-wrap: anywhere; }
  .advised td:last-child { display: block; }
  td:not(:first-child):not(:empty)::before {
    content: attr(data-label) " "; color: #666; font-size: 11px;
    font-family: system-ui, sans-serif; }
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
        f"{body}</body></html>\n",
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
