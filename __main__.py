"""The program `edge-convert`, also `python -m edge_convert`: Ctrl-C is one line from the first moment on."""

from __future__ import annotations

import os
import sys


def run() -> None:
    """Run the command line; standard streams that the caller closed are replaced by nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    try:
        from edge_convert.cli import main

        main()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    run()
