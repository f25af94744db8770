"""Charts for the pages this package writes: inline SVG that needs no script to be read, and a script that zooms.

section = step(events, memory, limit_bytes)      # timeline and memory curve on one time axis
html = document("title", section)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

Event = tuple[str, str, float, float]  # stream, name, start and end in seconds

_WIDTH, _LANE, _HEIGHT = 1000.0, 22, 150  # of a chart, in its own units
_FINEST = 1 / 3000  # of the step: shorter neighbours are drawn as one
_STREAMS = ("compute", "gather", "reduce", "all_to_all")
_SLOTS = 8  # colours

STYLE = """
  :root { color-scheme: light dark; --line: #8886; --add: #2a9d4433; --del: #d0453033; --soft: #8882;
    --c0: #3b7dd8; --c1: #e08a1e; --c2: #3aa36b; --c3: #b652c9; --c4: #d04a4a; --c5: #7a8794; --c6: #1ba3b3;
    --c7: #a3860f; }
  body { font: 14px/1.45 system-ui, sans-serif; margin: 1rem 1.5rem; }
  h1 { font-size: 1.2rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
  figure { margin: .4rem 0; } figcaption { font-size: 12px; opacity: .75; }
  svg { display: block; width: 100%; background: var(--soft); }
  .lanes { display: grid; grid-template-columns: 7rem minmax(0, 1fr); font-size: 12px; }
  .lanes .names div { height: 22px; line-height: 22px; overflow: hidden; }
  .ticks { position: relative; height: 1.4em; font-size: 11px; margin-left: 7rem; overflow: hidden; }
  .ticks span { position: absolute; border-left: 1px solid var(--line); padding-left: 3px; white-space: nowrap; }
  .bars { display: grid; grid-template-columns: max-content minmax(4rem, 1fr) max-content; gap: 2px .6rem; }
  .bars i { display: block; height: 1em; margin-top: .2em; background: var(--c0); }
  .bars b { font-weight: normal; text-align: right; font-variant-numeric: tabular-nums; }
  table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
  th, td { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: right; white-space: nowrap; }
  th { cursor: pointer; } td.word, th.word { text-align: left; }
  tr.tie { background: var(--add); } tr.over { opacity: .55; }
  .scroll { overflow: auto; max-height: 32rem; }
  .dot { fill: var(--c0); fill-opacity: .35; } .dot.over { fill: var(--c5); }
  .dot.front { fill: var(--c1); fill-opacity: 1; }
  .dot.best { fill: var(--c4); fill-opacity: 1; }
""" + "".join(f"  .f{slot} {{ fill: var(--c{slot}); }}\n" for slot in range(_SLOTS))

SCRIPT = """
  for (const figure of document.querySelectorAll("[data-span]")) {
    const span = Number(figure.dataset.span), charts = figure.querySelectorAll("svg.zoom");
    const ticks = figure.querySelectorAll(".ticks");
    let from = 0, to = 1, held = null;
    const spelled = (s) => s >= 1 ? s.toFixed(3) + " s"
      : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " us";
    function draw() {
      for (const chart of charts)
        chart.setAttribute("viewBox", `${from * 1000} 0 ${(to - from) * 1000} ${chart.dataset.height}`);
      for (const row of ticks)
        row.innerHTML = [0, 1, 2, 3, 4].map((i) =>
          `<span style="left:${i * 20}%">${spelled((from + (to - from) * i / 5) * span)}</span>`).join("");
    }
    function show(a, b) {
      const width = Math.min(1, Math.max(1e-5, b - a));
      from = Math.min(Math.max(0, a), 1 - width); to = from + width; draw();
    }
    for (const chart of charts) {
      chart.addEventListener("wheel", (event) => {
        event.preventDefault();
        const box = chart.getBoundingClientRect(), at = from + (to - from) * (event.clientX - box.left) / box.width;
        const by = event.deltaY > 0 ? 1.25 : 0.8;
        show(at - (at - from) * by, at + (to - at) * by);
      }, { passive: false });
      chart.addEventListener("pointerdown", (event) => {
        held = event.clientX; chart.setPointerCapture(event.pointerId);
      });
      chart.addEventListener("pointerup", () => { held = null; });
      chart.addEventListener("pointermove", (event) => {
        if (held === null) return;
        const by = (held - event.clientX) / chart.getBoundingClientRect().width * (to - from);
        held = event.clientX; show(from + by, to + by);
      });
      chart.addEventListener("dblclick", () => show(0, 1));
    }
  }
  for (const head of document.querySelectorAll("table.sortable th"))
    head.addEventListener("click", () => {
      const body = head.closest("table").tBodies[0], column = head.cellIndex;
      const up = head.dataset.up !== "1";
      for (const other of head.parentNode.cells) delete other.dataset.up;
      head.dataset.up = up ? "1" : "0";
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].sort((a, b) => {
        const x = value(a), y = value(b), p = Number(x), q = Number(y);
        return Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
      });
      body.append(...(up ? rows : rows.reverse()));
    });
"""


def document(title: str, *sections: str) -> str:
    """A whole page in one piece: nothing is fetched."""
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<h1>{escape(title)}</h1>",
            *sections,
            f"<script>{SCRIPT}</script>\n</html>\n",
        )
    )


def part(*sections: str) -> str:
    """Charts for a page of somebody else's, with what they need."""
    return "\n".join((f"<style>{STYLE}</style>", *sections, f"<script>{SCRIPT}</script>"))


def step(events: Sequence[Event], memory: Sequence[tuple[float, float]], limit_bytes: float) -> str:
    """A step by stream over time, and under it the bytes in use on the same time axis."""
    end = max([*(event[3] for event in events), *(at for at, _ in memory), 1e-12])
    return (
        f'<div data-span="{end!r}">\n{_timeline(events, end)}\n{_curve(memory, end, limit_bytes)}\n'
        "<figcaption>Scroll to zoom, drag to move, double-click for the whole step; point at a bar for its name."
        "</figcaption></div>"
    )


def bars(terms: Mapping[str, float], unit: str, scale: float = 1.0) -> str:
    """A bar a term, the largest first; `scale` turns the values into `unit`."""
    most = max((abs(value) for value in terms.values()), default=0.0) or 1.0
    rows = "".join(
        f"<span>{escape(name)}</span><i style='width:{100 * max(value, 0) / most:.2f}%'></i>"
        f"<b>{value * scale:,.3f} {escape(unit)}</b>"
        for name, value in sorted(terms.items(), key=lambda item: (-item[1], item[0]))
    )
    return f'<div class="bars">{rows}</div>'


def scatter(points: Iterable[tuple[float, float, str, str]], across: str, up: str, limit: float | None = None) -> str:
    """A dot a plan, at (x, y) from 0 on logarithmic y; each with a class (`front`, `over`, `best` or "") and a name.

    `limit` is drawn as an upright line.
    """
    dots = list(points)
    if not dots:
        return "<p>no plan to show</p>"
    height = 320
    widest = max(max(x for x, *_ in dots), limit or 0.0) * 1.03 or 1.0
    low, high = min(y for _, y, *_ in dots), max(y for _, y, *_ in dots)
    span = math.log(high / low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return 40 + 950 * x / widest, height - 30 - (height - 50) * math.log(y / low) / span

    shapes = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = share * widest, low * math.exp(span * share)
        shapes.append(f'<text x="{place(x, low)[0]:.0f}" y="{height - 8}" class="mark">{x:.3g}</text>')
        shapes.append(f'<text x="2" y="{place(0, y)[1] + 4:.0f}" class="mark">{y:.3g}</text>')
    if limit is not None:
        at = place(limit, low)[0]
        shapes.append(f'<path d="M{at:.1f} 0V{height - 24}" stroke="var(--c4)" stroke-dasharray="4 3"/>')
    order = {"over": 0, "": 1, "front": 2, "best": 3}
    for x, y, kind, name in sorted(dots, key=lambda dot: (order[dot[2]], dot[:2])):
        left, top = place(x, y)
        shapes.append(
            f'<circle class="dot {kind}" cx="{left:.1f}" cy="{top:.1f}" r="{3 if kind in ("", "over") else 5}">'
            f"<title>{escape(name)}</title></circle>"
        )
    return (
        f'<figure><svg viewBox="0 0 1000 {height}" style="font-size:11px" fill="currentColor">'
        f"{''.join(shapes)}</svg><figcaption>across: {escape(across)}; up: {escape(up)}</figcaption></figure>"
    )


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[tuple[str, object]]]]) -> str:
    """A sortable table; a row is its class and cells of (text, value to sort by)."""
    titles = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = []
    for kind, cells in rows:
        row = "".join(
            f'<td class="{_kind(value)}" data-value="{escape(str(value))}">{escape(text)}</td>' for text, value in cells
        )
        lines.append(f'<tr class="{escape(kind)}">{row}</tr>')
    body = f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="sortable">{body}</table></div>'


def _kind(value: object) -> str:
    return "word" if isinstance(value, str) else ""


def data(name: str, value: object) -> str:
    """`value` as JSON for whoever reads the page by program."""
    text = json.dumps(value).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


def _timeline(events: Sequence[Event], end: float) -> str:
    streams = sorted(
        {event[0] for event in events}, key=lambda name: (_STREAMS.index(name) if name in _STREAMS else 9, name)
    )
    height = _LANE * max(len(streams), 1)
    shapes = []
    for lane, stream in enumerate(streams):
        own = sorted((event for event in events if event[0] == stream), key=lambda event: event[2:])
        for name, count, start, stop in _merged(own, end * _FINEST):
            left, width = _WIDTH * start / end, max(_WIDTH * (stop - start) / end, 1e-3)
            title = f"{name}\n{_seconds(stop - start)}, from {_seconds(start)}"
            title += f"\n{count} drawn as one" if count > 1 else ""
            shapes.append(
                f'<rect class="f{_slot(stream, name)}" x="{left:.4f}" y="{lane * _LANE + 2}" width="{width:.4f}" '
                f'height="{_LANE - 4}"><title>{escape(title)}</title></rect>'
            )
    names = "".join(f"<div>{escape(stream)}</div>" for stream in streams)
    svg = (
        f'<svg class="zoom" data-height="{height}" viewBox="0 0 1000 {height}" height="{height}" '
        f'preserveAspectRatio="none">{"".join(shapes)}</svg>'
    )
    return f'<div class="lanes"><div class="names">{names}</div>{svg}</div>\n{_ticks(end)}'


def _curve(memory: Sequence[tuple[float, float]], end: float, limit: float) -> str:
    if not memory:
        return ""
    peak = max(held for _, held in memory)
    top = max(peak, limit if limit < 4 * peak else 0.0) * 1.05 or 1.0

    def at(seconds: float, held: float) -> str:
        return f"{_WIDTH * seconds / end:.3f} {_HEIGHT * (1 - held / top):.2f}"

    path = [f"M0 {_HEIGHT}"]
    before = 0.0
    for seconds, held in memory:
        path += [f"L{at(seconds, before)}", f"L{at(seconds, held)}"]
        before = held
    path.append(f"L{at(end, before)}L{_WIDTH:.0f} {_HEIGHT}Z")
    line = ""
    if limit <= top:
        y = _HEIGHT * (1 - limit / top)
        line = (
            f'<path d="M0 {y:.2f}H1000" stroke="var(--c4)" stroke-dasharray="4 3" vector-effect="non-scaling-stroke">'
            f"<title>may be used: {limit / 2**30:.2f} GiB</title></path>"
        )
    marks = f"<div>peak {_gib(peak)}</div><div>of {_gib(limit)} usable</div>"
    svg = (
        f'<svg class="zoom" data-height="{_HEIGHT}" viewBox="0 0 1000 {_HEIGHT}" height="{_HEIGHT}" '
        f'preserveAspectRatio="none"><path class="f0" fill-opacity=".6" d="{"".join(path)}">'
        f"<title>peak {_gib(peak)}</title></path>{line}</svg>"
    )
    return f'<div class="lanes"><div class="names">{marks}</div>{svg}</div>\n{_ticks(end)}'


def _ticks(end: float) -> str:
    marks = "".join(f'<span style="left:{20 * i}%">{_seconds(end * i / 5)}</span>' for i in range(5))
    return f'<div class="ticks">{marks}</div>'


def _merged(events: Iterable[Event], finest: float) -> Iterator[tuple[str, int, float, float]]:
    """(name, count, start, end): runs of events too short to be seen, with less than that between them, as one."""
    run: tuple[str, int, float, float] | None = None
    for _, name, start, end in events:
        if run is not None and end - run[2] < finest:
            run = (run[0] if run[0] == name else f"{run[0].split(' … ')[0]} … {name}", run[1] + 1, run[2], end)
            continue
        if run is not None:
            yield run
        run = (name, 1, start, end)
    if run is not None:
        yield run


def _slot(stream: str, name: str) -> int:
    """The colour of an event: by stream, and on compute by what it does."""
    if stream != "compute":
        return {"gather": 1, "reduce": 2, "all_to_all": 3}.get(stream, 6)
    for word, slot in (("optimizer", 7), ("recompute", 4), ("backward", 6), ("bwd", 6)):
        if word in name:
            return slot
    return 0


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.1f} MiB"
