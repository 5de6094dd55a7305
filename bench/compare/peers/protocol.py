"""How every peer answers: one JSON object a line.

A worker prints one line when its model is there ({"ready": true, ...}, or
{"error": why}), then answers each line of its input. A request: `prompts` (lists
of ids, of one length), `new` (tokens of each, greedy), and what the peer knows of
`cache` and `space` (go on from earlier requests). An answer: `tokens`, `logprobs`
or null, `first_ms`, `decode_ms`, `decode_tokens`, `token_ms` or null.
"""

import json
import os
import sys
import time


def serve(load):
    """`load()` gives (facts for the first line, answer(request) -> dict)."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        facts, answer = load()
    except Exception as error:  # whatever a library throws, it is why not
        print(json.dumps({"error": one_line(error)}), file=lines)
        return
    print(json.dumps({"ready": True, **facts}), file=lines)
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:
            result = {"error": one_line(error)}
        print(json.dumps(result), file=lines)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}"


class Clock:
    """When tokens came, in ms after the request."""

    def __init__(self, rows: int = 1):
        self.start = time.perf_counter()
        self.times = [[] for _ in range(rows)]

    def token(self, row: int = 0) -> None:
        self.times[row].append((time.perf_counter() - self.start) * 1e3)

    def timings(self) -> dict:
        return timings(self.times)


def timings(times: list[list[float]]) -> dict:
    """Decode is what follows the last row's first token."""
    first = max(row[0] for row in times)
    last = max(row[-1] for row in times)
    gaps = None
    if len(times) == 1:
        gaps = [after - before for before, after in zip(times[0], times[0][1:])]
    return {
        "first_ms": first,
        "decode_ms": last - first,
        "decode_tokens": sum(time > first for row in times for time in row),
        "token_ms": gaps,
    }
