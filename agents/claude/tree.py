"""Reading the project's files for a model: nothing outside it, nothing hidden. Torch-free."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "reference", "optimized", "harness", "traces", "agents", "reports", "tests"
TEXTS = ".py", ".md", ".toml", ".txt"
CANDIDATES = "candidates"
MOST_LINES, MOST_LETTERS, MOST_HITS = 400, 24_000, 60


class Tree:
    """The project, and the folder of a run's candidates as `candidates/`."""

    def __init__(self, candidates: Path, root: Path = ROOT) -> None:
        self.candidates, self.root = candidates, root

    def find(self, path: str) -> Path:
        """ValueError, which says what can be read, for what cannot."""
        head, _, tail = path.removeprefix("./").partition("/")
        base, inner = (self.candidates, tail) if head == CANDIDATES else (self.root, path)
        found = (base / inner).resolve()
        inside = found.is_relative_to(base.resolve())
        within = found.relative_to(base.resolve()).parts if inside else ()
        hidden = any(part.startswith(".") for part in within)
        known = base == self.candidates or len(within) == 1 or (within and within[0] in FOLDERS)
        if not inside or hidden or not known:
            raise ValueError(
                f"{path} is not to be read; what can be: {', '.join(FOLDERS)}, files of the "
                f"project's root, and {CANDIDATES}/"
            )
        if not found.exists():
            raise ValueError(f"there is no {path}")
        return found

    def read(self, path: str, first: int = 1, last: int | None = None) -> str:
        """Lines `first` to `last`, numbered, at most MOST_LINES of them."""
        found = self.find(path)
        if found.is_dir():
            names = sorted(p.name + "/" * p.is_dir() for p in found.iterdir())
            shown = [n for n in names if not n.startswith((".", "__"))]
            return f"{path}: {len(shown)} files and folders\n" + "\n".join(shown)
        if found.suffix not in TEXTS:
            raise ValueError(f"{path} is no text file that can be read: {', '.join(TEXTS)}")
        lines = found.read_text(errors="replace").splitlines()
        first = max(1, first)
        last = min(len(lines), first + MOST_LINES - 1, last or len(lines))
        shown = [f"{n:4d}  {lines[n - 1]}" for n in range(first, last + 1)]
        head = f"{path}, lines {first} to {last} of {len(lines)}"
        return cut("\n".join([head, *shown]))

    def search(self, text: str, under: str = "") -> str:
        """Lines that contain `text`, whatever their case."""
        if not text.strip():
            raise ValueError("search for at least one letter")
        hits: list[str] = []
        count = 0
        for path in self._files(under):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
                if text.lower() in line.lower():
                    count += 1
                    if len(hits) < MOST_HITS:
                        hits.append(f"{self._name(path)}:{number}: {line.strip()[:160]}")
        left = f", the first {MOST_HITS}" if count > MOST_HITS else ""
        return "\n".join([f"{count} lines contain {text!r}{left}", *hits])

    def _files(self, under: str) -> Iterator[Path]:
        places = [self.find(under)] if under else [self.root / name for name in FOLDERS]
        for place in places:
            found = [place] if place.is_file() else sorted(place.rglob("*"))
            inside = place.resolve()
            for path in found:
                if path.suffix in TEXTS and path.is_file():
                    if path.resolve().is_relative_to(inside):
                        yield path

    def _name(self, path: Path) -> str:
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        return f"{CANDIDATES}/{path.name}"


def cut(text: str, most: int = MOST_LETTERS) -> str:
    """At most so many letters; what is left out is said."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n... {len(text) - most:,} letters are left out"
