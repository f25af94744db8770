"""One static page over a dump: two stages side by side, the difference between any two, and every other text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
  :root {{ color-scheme: light dark; --line: #8886; --add: #2a9d4433; --del: #d0453033; }}
  body {{ font: 14px/1.45 system-ui, sans-serif; margin: 1rem 1.5rem; }}
  h1 {{ font-size: 1.2rem; }}
  pre {{ font: 12px/1.45 ui-monospace, monospace; margin: 0; padding: .6rem; overflow: auto; }}
  pre {{ border: 1px solid var(--line); }}
  .pair {{ display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: .6rem; }}
  .pair > div, details {{ margin: .4rem 0; }}
  select {{ font: inherit; margin-bottom: .4rem; max-width: 100%; }}
  .add {{ background: var(--add); display: block; }}
  .del {{ background: var(--del); display: block; }}
  .same {{ display: block; }}
</style>
<h1>{title}</h1>
{charts}
<div class="pair">
{columns}
</div>
<details open><summary>difference, left to right</summary>
{differences}
</details>
{others}
<script>
  const left = document.getElementById("left"), right = document.getElementById("right");
  function choose() {{
    for (const side of [left, right])
      for (const text of document.querySelectorAll(`pre[data-side="${{side.id}}"]`))
        text.hidden = text.dataset.stage !== side.value;
    for (const text of document.querySelectorAll("pre[data-pair]"))
      text.hidden = text.dataset.pair !== `${{left.value}}-${{right.value}}`;
  }}
  left.onchange = right.onchange = choose;
  choose();
</script>
</html>
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """A program after one step of the compiler: its text, and what the summary says of it."""

    name: str
    title: str
    text: str
    nodes: int
    moves: dict[str, tuple[int, str]]
    seconds: float


def page(title: str, stages: Sequence[Stage], others: Iterable[tuple[str, str]], charts: str = "") -> str:
    """The page, in one piece: nothing is fetched, and without scripts every text is still there.

    `charts` is HTML that goes before the stages.
    """
    last = len(stages) - 1
    columns = [_column("left", stages, max(last - 1, 0)), _column("right", stages, last)]
    pairs = [(a, b) for pair in combinations(range(len(stages)), 2) for a, b in (pair, pair[::-1])]
    return _PAGE.format(
        title=escape(title),
        charts=charts,
        columns="\n".join(columns),
        differences="\n".join(_difference(stages, a, b) for a, b in pairs),
        others="\n".join(_folded(name, text) for name, text in others),
    )


def _column(side: str, stages: Sequence[Stage], chosen: int) -> str:
    options = "".join(
        f'<option value="{index}"{" selected" if index == chosen else ""}>{escape(stage.name)}</option>'
        for index, stage in enumerate(stages)
    )
    texts = "\n".join(
        f'<pre data-side="{side}" data-stage="{index}">{escape(stage.text)}</pre>' for index, stage in enumerate(stages)
    )
    return f'<div><select id="{side}" aria-label="{side} stage">{options}</select>\n{texts}</div>'


def _difference(stages: Sequence[Stage], a: int, b: int) -> str:
    before, after = stages[a], stages[b]
    lines = difflib.unified_diff(
        before.text.splitlines(), after.text.splitlines(), before.name, after.name, n=2, lineterm=""
    )
    body = "".join(f'<span class="{_kind(line)}">{escape(line)}</span>' for line in lines)
    return f'<pre data-pair="{a}-{b}">{body or "no difference"}</pre>'


def _kind(line: str) -> str:
    if line.startswith(("+++", "---")):
        return "same"
    return {"+": "add", "-": "del"}.get(line[:1], "same")


def _folded(name: str, text: str) -> str:
    return f"<details><summary>{escape(name)}</summary>\n<pre>{escape(text)}</pre></details>"
