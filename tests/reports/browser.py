"""Pages in headless Chromium: what they measure at a width, what they complain of, a screenshot.

A window cannot be narrower than 500 px, so each page stands in a frame of the asked width.
"""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
PROBE = """
const look = frame => {
  const d = frame.contentDocument, root = d.documentElement;
  const visible = e => e.getClientRects().length > 0;
  const all = selector => [...d.querySelectorAll(selector)].filter(visible);
  const boxed = e => e.closest('svg') || e.closest('.scroll');
  const wide = all('body *').filter(
    e => !boxed(e) && e.getBoundingClientRect().right > root.clientWidth + 1);
  return {
    width: root.clientWidth, scroll_width: root.scrollWidth, height: root.scrollHeight,
    wide: wide.map(e => e.tagName),
    charts: all('figure svg, .headline svg').map(e => {
      const box = e.getBoundingClientRect();
      return [box.width, box.height, e.querySelectorAll('path,rect,polyline,circle').length];
    }),
    smallest: Math.min(...all('svg text').map(e => {
      const m = e.getScreenCTM(), size = frame.contentWindow.getComputedStyle(e).fontSize;
      return parseFloat(size) * Math.hypot(m.a, m.b);  // also of turned text
    })),
    overlapping: all('svg').flatMap(svg => {
      const texts = [...svg.querySelectorAll('text')];
      const boxes = texts.map(e => e.getBoundingClientRect());
      const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
      return texts.filter((e, i) => boxes.some((b, k) => k < i && meet(boxes[i], b)))
        .map(e => e.textContent);
    }),
    covered: all('tr.why summary').filter(
      e => e.getBoundingClientRect().top + 1
        < e.closest('tr').previousElementSibling.querySelector('a').getBoundingClientRect().bottom
    ).length,
    paper: frame.contentWindow.getComputedStyle(d.body).backgroundColor,
    requests: frame.contentWindow.performance.getEntriesByType('resource').map(e => e.name),
  };
};
addEventListener('load', () => setTimeout(() => {
  const found = [...document.querySelectorAll('iframe')].map(look);
  document.getElementById('found').textContent = JSON.stringify(found);
}, 50));
"""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the browser found in each frame, and the console messages of all of them."""

    frames: list[dict[str, Any]]
    console: list[str]


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    path = next((p for name in NAMES if (p := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    return path


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--no-first-run", f"--user-data-dir={folder / 'profile'}", *options],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def show(
    pages: list[tuple[str, int]],
    folder: Path,
    *,
    dark: bool = False,
    height: int = 1200,
    shot: Path | None = None,
) -> Shown:
    """Load each page (HTML) in a frame of its width in px; `shot` gets a picture of them all."""
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:{height}px" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        for page, width in pages
    )
    outer = folder / "frames.html"
    outer.write_text(
        f"<!doctype html><meta charset=utf-8><body style='margin:0;white-space:nowrap'>{frames}"
        f"<pre id=found hidden></pre><script>{PROBE}</script>"
    )
    options = [f"--window-size={sum(width for _, width in pages)},{height}"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    options += [f"--screenshot={shot}"] if shot else []
    options += ["--virtual-time-budget=2000", "--enable-logging=stderr"]
    done = run(folder, *options, "--dump-dom", outer.as_uri())
    said = re.search(r"<pre id=\"found\"[^>]*>(.*?)</pre>", done.stdout, re.DOTALL)
    assert said is not None, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Shown(frames=json.loads(html.unescape(said[1])), console=console)
