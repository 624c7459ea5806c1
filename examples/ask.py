"""A patrol robot that answers questions about what it knows, on the device, without network.

    python examples/ask.py demo/smollm2-cpu "Where should I wait?"

Loads the bundle once, then answers each argument (or each line of standard input) with a deadline: an
answer that is not ready in time is cut and marked, because a robot must not wait for a sentence.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator

from edge_convert import GenerationConfig, TextGenerator
from edge_convert.runtime.errors import EdgeError

SYSTEM = (
    "You are a delivery robot at the main gate. The battery is at 62 percent. The next parcel goes to building 4. "
    "Answer in one short sentence."
)


def answer(robot: TextGenerator, question: str, *, deadline_s: float) -> Iterator[str]:
    """Pieces of the answer as they are ready, at most until the deadline."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    start = time.monotonic()
    for piece in robot.stream_chat(messages, GenerationConfig(max_tokens=80)):
        yield piece
        if time.monotonic() - start > deadline_s:
            yield " …"
            return


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the robot.")
    parser.add_argument("bundle", help="a text-generation bundle with a chat template")
    parser.add_argument("question", nargs="*", help="questions; standard input when there are none")
    parser.add_argument("--deadline", type=float, default=5.0, metavar="SECONDS")
    options = parser.parse_args()
    questions: Iterable[str] = options.question or (line.strip() for line in sys.stdin)
    try:
        robot = TextGenerator.load(options.bundle)
        for question in filter(None, questions):
            for piece in answer(robot, question, deadline_s=options.deadline):
                print(piece, end="", flush=True)
            print()
    except EdgeError as error:
        print(f"The robot cannot answer: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
