"""Render the report of a plan as one HTML page that needs no other file and no network."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .summary import summary

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; }
img { max-width: 100%; display: block; margin: 1rem 0; }
.note { color: #666; }
"""


@dataclass(frozen=True)
class Picture:
    """A PNG with a title and a caption that explains how to read it."""

    title: str
    caption: str
    png: bytes


def render_page(report: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """Render the page: the summary of the report, the pictures and the plan."""
    hardware, costs = report["hardware"], report["evidence"]["costs"]
    body = [
        f"<h1>Plan for {_text(report['workload']['name'])} on {_text(report['target'])}</h1>",
        f'<p class="note">All figures are predictions. Evidence of the seconds: {_text(costs)}. '
        f"Peaks of {_text(hardware['name'])}: {_text(hardware['source'])}.</p>",
        f"<pre>{_text(summary(report))}</pre>",
        *map(_picture, pictures),
        "<h2>The plan</h2>",
        f"<pre>{_text(report['plan'])}</pre>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>noria plan</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<h2>{_text(picture.title)}</h2><p class="note">{_text(picture.caption)}</p>'
        f'<img alt="{_text(picture.title)}" src="data:image/png;base64,{data}">'
    )


def _text(value: object) -> str:
    return html.escape(str(value))
