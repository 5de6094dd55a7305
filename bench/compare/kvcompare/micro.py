"""W7: our Google Benchmarks, those that need no model."""

import json
import os
import subprocess

from kvcompare import machine, tables

NEED_A_MODEL = ("graph_bench", "prefix_bench")
COUNTERS = ("GB_s", "share", "of_scale", "GFLOP_s", "faster")


def measure(options) -> list[dict]:
    rows = []
    for program in sorted(options.probe.parent.glob("*_bench")):
        if program.name not in NEED_A_MODEL:
            rows += run(options, program)
    return rows


def run(options, program) -> list[dict]:
    threads = options.threads[0]
    done = subprocess.run(
        [*machine.pinned(threads), program, "--benchmark_format=json"],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return [{"program": program.name, "error": f"status {done.returncode}"}]
    found = json.loads(done.stdout)["benchmarks"]
    return [{"program": program.name, "threads": threads, **row} for row in found]


def markdown(rows: list[dict] | None) -> str:
    if not rows:
        return ""
    header = ["program", "benchmark", "time", *COUNTERS]
    table = [
        [
            row["program"],
            row["name"],
            f"{tables.number(row['real_time'])} {row['time_unit']}",
            *(tables.number(row.get(counter)) for counter in COUNTERS),
        ]
        for row in rows
        if "real_time" in row
    ]
    return "### W7: micro benchmarks\n\n" + tables.markdown(header, table) + "\n"
