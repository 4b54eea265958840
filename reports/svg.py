"""Pictures drawn by hand as SVG: text as text, a few kB, light and dark, no links out."""

from html import escape

STYLE = (
    "svg{--paper:#fcfbf8;--ink:#1b1a17;--muted:#68645c;--rule:#e0dcd2;--faint:#958f82;"
    "--kept:#17694a;--rejected:#8f5600;--failed:#a32330;font-family:system-ui,sans-serif;"
    "font-variant-numeric:tabular-nums}"
    "@media (prefers-color-scheme:dark){svg{--paper:#151513;--ink:#ebe8e0;--muted:#a29d92;"
    "--rule:#34322d;--faint:#6b675e;--kept:#6ac497;--rejected:#dfa650;--failed:#f08581}}"
)
MARGIN = 14
CHARACTER = 0.56  # of its size is how wide a character of text is, about


def text_width(words: str, size: float) -> float:
    """About how wide `words` are; browsers differ."""
    return CHARACTER * size * len(words)


def number(value: float) -> str:
    """A coordinate: two decimals are less than a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Canvas:
    """Collects shapes; a colour is a name of `STYLE`: ink, muted, rule, faint, kept, ..."""

    def __init__(self, width: float, title: str) -> None:
        self.width, self.title = width, title
        self.parts: list[str] = []

    def line(
        self, points: list[tuple[float, float]], colour: str, width: float = 1.0, dashes: str = ""
    ) -> None:
        at = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<polyline points="{at}" fill="none" stroke="var(--{colour})" '
            f'stroke-width="{number(width)}"{dashed}/>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}" fill="var(--{colour})"/>'
        )

    def dot(self, x: float, y: float, colour: str, *, radius: float = 3.5, hollow=False) -> None:
        fill = "paper" if hollow else colour
        self.parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" '
            f'fill="var(--{fill})" stroke="var(--{colour})" stroke-width="1.5"/>'
        )

    def cross(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        for flip in (radius, -radius):
            self.line([(x - radius, y - flip), (x + radius, y + flip)], colour, 1.6)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        turned: float = 0.0,
        halo: bool = False,
    ) -> None:
        weight = ' font-weight="650"' if bold else ""
        turn = f' transform="rotate({number(turned)} {number(x)} {number(y)})"' if turned else ""
        behind = ' paint-order="stroke" stroke="var(--paper)" stroke-width="4"' if halo else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" '
            f'fill="var(--{colour})"{where}{weight}{turn}{behind}>{escape(words)}</text>'
        )

    def svg(self, height: float, *, standalone: bool = True) -> str:
        """An <svg> element; standalone it brings its colours and its background."""
        name = f"<title>{escape(self.title)}</title>"
        margin = MARGIN if standalone else 0
        wide, high = number(self.width + 2 * margin), number(height + 2 * margin)
        box = f'viewBox="{-margin} {-margin} {wide} {high}"'
        if not standalone:  # the page's colours
            return f'<svg role="img" {box}>{name}{"".join(self.parts)}</svg>'
        size = f'width="{wide}" height="{high}"'
        at = f'x="{-margin}" y="{-margin}"'
        paper = f'<rect {at} width="{wide}" height="{high}" fill="var(--paper)"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">{name}'
            f"<style>{STYLE}</style>{paper}{''.join(self.parts)}</svg>\n"
        )


def ticks(largest: float, about: int = 4) -> list[float]:
    """Round numbers from 0 up to `largest`, about so many."""
    if largest <= 0:
        return [0.0]
    raw = largest / about
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 1.0
    while raw < power:
        power /= 10
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= raw)
    count = int(largest / step + 1e-9)
    return [round(i * step, 10) for i in range(count + 1)]
