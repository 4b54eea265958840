"""A run's process without a model or torch: it speaks to its MCP server as a run does, and plays.

`python mcp_played.py DIRECTORY...`; what each tool does stands below.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from agents.mcp_link import FD, Link
from harness.ledger import Ledger

TASK = "## Machine\n\nnone"


def main(directory: Path) -> None:
    link = Link.inherited()
    link.greet(directory=str(directory / "run"))
    link.tell(task=TASK)
    lives = 1
    while (call := link.ask(lambda: None)) is not None:
        match call["name"]:
            case "verify":
                print("said on stdout", flush=True)
                time.sleep(1.5)
            case "bench" if lives == 1:  # killed in the middle of its answer
                os.write(int(os.environ[FD]), b'{"result": "half of a')
                lives, link = lives + 1, Link.inherited()
                link.greet(directory=str(directory / "run"))
                continue
            case "attempts":
                sys.exit("error: the run broke")
            case "give_up":
                ledger = Ledger.create(directory / "run")
                ledger.append("stopped", {"reason": "done"})
                (directory / "run/report.md").write_text("report")
                return
        given = json.dumps(call["input"], sort_keys=True)
        error = call["name"] == "region"
        link.tell(result=call["id"], text=f"{call['name']} {given}, life {lives}", error=error)
        with (directory / "answered").open("a") as file:
            file.write(f"{call['id']}\n")
        if call["name"] == "search":  # killed while it waits for a call
            link.tell(ask=True)
            lives, link = lives + 1, Link.inherited()
            link.greet(directory=str(directory / "run"))
            time.sleep(0.5)
    (directory / "left").write_text("the client has left")


if __name__ == "__main__":
    if "--max-changes" in sys.argv:
        sys.exit("error: it will not begin")
    place = Path(os.environ["PLAYED"])
    if "--seed" in sys.argv:  # it measures before it asks, until it is interrupted
        signal.signal(signal.SIGTERM, lambda *_: sys.exit((place / "interrupted").write_text("")))
        (place / "begun").touch()
        time.sleep(30)
    main(place)
