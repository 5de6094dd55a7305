"""How far a dtype's log-probabilities are from the exact ones on real text.

The exact ones are float32 on the same weights, dequantised. Each dtype is scored
in chunks, as a prompt is, and token by token, as an answer is.
"""

import json
import subprocess

from kvcompare import environment, figures, tables
from kvcompare.contenders import Contender, Pool
from kvcompare.workers import PeerError

TEXT = environment.HERE / "text.txt"
TOKENS = 300
CHUNKS = {"in chunks": 256, "token by token": 1}


def run(options, *arguments) -> dict:
    command = [options.kvcache, *arguments, "--model", options.model, "--json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise PeerError(lines[-1])
    return json.loads(done.stdout)


def score(options, ids: list[int], dtype: str, chunk: int) -> list[float]:
    listed = ",".join(map(str, ids))
    arguments = ("score", "--tokens", listed, "--dtype", dtype, "--chunk", chunk)
    return run(options, *arguments)["logprobs"]


def best_tokens(pool: Pool, ids: list[int], dtype: str) -> list[int]:
    """The most likely token after each beginning of the text."""
    worker = pool.get(Contender("kvcache", dtype, "preallocated"), 1)
    found = []
    for length in range(1, len(ids)):
        request = {"prompts": [ids[:length]], "new": 1, "space": "text"}
        found.append(worker.ask(request)["tokens"][0][0])
    return found


def measure(options) -> list[dict]:
    ids = run(options, "tokenize", "--text-file", TEXT)["tokens"][:TOKENS]
    exact = score(options, ids, "float32", 256)
    pool = Pool(options)
    rows = []
    try:
        wanted = best_tokens(pool, ids, "float32")
        for dtype in options.dtypes:
            rows += measure_dtype(options, pool, ids, dtype, exact, wanted)
    finally:
        pool.stop()
    return rows


def measure_dtype(options, pool, ids, dtype, exact, wanted) -> list[dict]:
    try:
        best = best_tokens(pool, ids, dtype)
        same = sum(a == b for a, b in zip(best, wanted, strict=True)) / len(wanted)
        return [
            {"dtype": dtype, "how": how, "best_same": same}
            | figures.log_prob_difference(score(options, ids, dtype, chunk), exact)
            for how, chunk in CHUNKS.items()
        ]
    except PeerError as error:
        return [{"dtype": dtype, "error": str(error)}]


def markdown(rows: list[dict] | None) -> str:
    if not rows:
        return ""
    header = ["dtype", "run", "tokens", "mean", "largest", "same best token"]
    table = [
        [
            row["dtype"],
            row["how"],
            str(row["tokens"]),
            f"{row['mean']:.5f}",
            f"{row['max']:.5f}",
            f"{row['best_same']:.1%}",
        ]
        for row in rows
        if "error" not in row
    ]
    title = "### Log-probabilities against float32, absolute difference\n\n"
    missing = [f"- not run: {row['dtype']}: {row['error']}\n" for row in rows if "error" in row]
    return title + tables.markdown(header, table) + "\n" + "".join(missing)
