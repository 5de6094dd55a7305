"""Ours and transformers in turns on the same machine; medians and ratios.

usage: run.py MODEL.gguf [--rounds 3] [--dtype bfloat16 ...] [--context 512 ...]
              [--ours COMMAND] [--threads 2] [--json FILE]

Run it with a Python that has tests/reference/requirements.txt installed.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
OURS = (
    f"{HERE.parents[1] / 'build/release/bin/kvcache'} bench --json"
    " --model {model} --dtype {dtype} --lengths {context}"
)
SPEEDS = ("decode_tokens_per_second", "prefill_tokens_per_second")
PROBE_BYTES = 512 * 2**20  # beyond every cache
PROBE_PASSES = 5
# Of all CPUs, used by other programs during a run. Two spinning threads that
# share a core with a third can lose far more than the third one takes.
MOST_OTHERS = 0.05


def parse_arguments():
    parser = argparse.ArgumentParser(description="kvcache against transformers.")
    add = parser.add_argument
    add("model", help="a GGUF file")
    add("--rounds", type=int, default=3, help="of ours, then transformers")
    add("--dtype", nargs="+", default=["bfloat16", "float32"])
    add("--context", nargs="+", type=int, default=[512, 2000])
    add("--threads", type=int, default=2)
    add("--ours", default=OURS, help="with {model}, {dtype} and {context}")
    add("--json", help="also write every measurement here")
    return parser.parse_args()


def read_bandwidth() -> float:
    """GB/s of the best of a few sums over 512 MB. A sum of float32 is close to,
    not at, what the memory gives; it shows how the machine changes meanwhile."""
    data = torch.ones(PROBE_BYTES // 4)
    best = 0.0
    for _ in range(PROBE_PASSES):
        start = time.perf_counter()
        data.sum()
        best = max(best, PROBE_BYTES / (time.perf_counter() - start))
    return best / 1e9


def busy_seconds() -> float:
    """CPU time that the whole machine has spent, host's theft included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(command: list[str], threads: int) -> list[dict]:
    """The JSON lines that a command prints (progress bars are no JSON), each with
    the share of the CPUs that other programs used meanwhile."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    others = children_seconds() - busy_seconds()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    except OSError as error:
        sys.exit(f"run.py: error: {command[0]}: {error.strerror}; build it first")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"run.py: error: {command[0]} gave {done.returncode}: {last}")
    others = busy_seconds() - children_seconds() + others
    share = others / (time.perf_counter() - start) / os.cpu_count()
    lines = [json.loads(l) for l in done.stdout.splitlines() if l.startswith("{")]
    return [{**line, "others": round(max(0.0, share), 3)} for line in lines]


def run_ours(options) -> list[dict]:
    rows = []
    for dtype in options.dtype:
        for context in options.context:
            command = options.ours.format(
                model=shlex.quote(options.model), dtype=dtype, context=context
            )
            rows += run(shlex.split(command), options.threads)
    return [{**row, "who": "kvcache"} for row in rows]


def run_transformers(options) -> list[dict]:
    command = [sys.executable, str(HERE / "transformers_decode.py"), options.model]
    command += ["--threads", str(options.threads), "--repeat", "1"]
    command += ["--dtype", *options.dtype]
    command += ["--context", *map(str, options.context)]
    return run(command, options.threads)


def medians(rows: list[dict]) -> dict:
    """(dtype, context, who, speed) -> (median, least, most)."""
    found = {}
    for row in rows:
        for speed in SPEEDS:
            if row.get(speed) is not None:
                key = (row["dtype"], row["context"], row["who"], speed)
                found.setdefault(key, []).append(row[speed])
    return {
        key: (statistics.median(values), min(values), max(values))
        for key, values in found.items()
    }


def print_table(rows: list[dict]) -> None:
    """Tokens per second, and how many times a peer's median ours is."""
    found = medians(rows)
    for key in sorted(found, key=lambda k: (k[3], k[0], k[1], k[2])):
        dtype, context, who, speed = key
        median, least, most = found[key]
        line = f"{speed.split('_')[0]:8}{dtype:10}{context:6}  {who:22}"
        line += f"{median:9.1f}  ({least:.1f} to {most:.1f})"
        ours = found.get((dtype, context, "kvcache", speed))
        if ours and who != "kvcache":
            line += f"  ours is {ours[0] / median:.2f} times this"
        print(line)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


def main() -> None:
    options = parse_arguments()
    print(f"{processor()}, {os.cpu_count()} CPUs, {options.threads} threads used")
    torch.set_num_threads(options.threads)
    rows, bandwidths = [], [read_bandwidth()]
    for number in range(1, options.rounds + 1):
        rows += run_ours(options)
        bandwidths.append(read_bandwidth())
        rows += run_transformers(options)
        bandwidths.append(read_bandwidth())
        print(f"round {number} of {options.rounds} done", file=sys.stderr)
    print("read bandwidth between the runs, GB/s:", *(f"{b:.1f}" for b in bandwidths))
    print_table(rows)
    disturbed = max(row["others"] for row in rows)
    if disturbed > MOST_OTHERS:
        print(
            f"other programs used up to {disturbed:.0%} of the CPUs during a run: "
            "these figures say nothing; run again on an idle machine"
        )
    if options.json:
        content = {"bandwidth_gb_per_second": bandwidths, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
