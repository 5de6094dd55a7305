"""The command line of bench/compare/compare."""

import argparse
import json
import sys
import time
from pathlib import Path

from kvcompare import accuracy, environment, machine, micro, report
from kvcompare.blocks import Runner, say
from kvcompare.contenders import KINDS, PEERS, Pool, choose
from kvcompare.workloads import WORKLOADS

BUILD = environment.PROJECT / "build/bench/bin"
MODEL = environment.cache_folder() / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ["packed", "bfloat16", "float32"]
QUICK = {
    "contexts": [32, 512],
    "prefills": [128],
    "new": 32,
    "long": 512,
    "slots": [1, 4],
    "slot_new": 16,
    "shared": 512,
    "repeats": 2,
    "threads": [2],
    "kinds": ["preallocated"],
}
FULL = {
    "contexts": [32, 512, 2000, 8000],
    "prefills": [128],  # those of W1 are prefilled there
    "new": 128,
    "long": 4096,
    "slots": [1, 2, 4, 8],
    "slot_new": 64,
    "shared": 2048,
    "repeats": 5,
    "threads": [2, 1],
    "kinds": ["preallocated", "concat", "window", "state", "none"],
}


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="compare",
        description="kvcache and its peers in turns on one machine: a table, JSON and plots.",
    )
    add = made.add_argument
    add("--model", type=Path, default=MODEL, help="a GGUF file, or for ours and transformers a folder")
    add("--out", type=Path, default=Path("compare-results"), help="a folder for what it writes")
    add("--only", type=words, help="of " + ",".join([*WORKLOADS, "W7", "accuracy"]))
    add("--peers", type=words, default=list(PEERS), help="of " + ",".join(PEERS))
    add("--dtypes", type=words, default=DTYPES, help="of ours and of transformers")
    add("--kinds", type=words, help="of our caches: " + ",".join(KINDS))
    add("--quick", action="store_true", help="a few minutes instead of hours")
    add("--repeats", type=int, help="turns after the warm-up (5)")
    add("--threads", type=numbers, help="numbers of threads (2,1)")
    add("--contexts", type=numbers, help="of W1 (32,512,2000,8000)")
    add("--prefills", type=numbers, help="of W2, beside those of W1 (128)")
    add("--new", type=int, help="tokens decoded in W1 (128)")
    add("--long", type=int, help="tokens of W3 (4096)")
    add("--slots", type=numbers, help="of W4 (1,2,4,8)")
    add("--slot-new", type=int, help="tokens of each slot in W4 (64)")
    add("--shared", type=int, help="tokens that requests of W5 share (2048)")
    add("--kvcache", type=Path, default=BUILD / "kvcache", help="our program")
    add("--probe", type=Path, default=BUILD / "machine_probe", help="the probe program")
    add("--python", type=Path, help="of an environment that has the peers already")
    add("--native", action="store_true", help="build llama.cpp for this processor (20 minutes)")
    add("--patience", type=float, default=900.0, help="seconds that an answer may take")
    add("--report", type=Path, help="write table and plots of this results.json again")
    return made


def parse(arguments: list[str]) -> argparse.Namespace:
    made = parser()
    options = made.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for given, known in (
        (options.only or [], [*WORKLOADS, "W7", "accuracy"]),
        (options.peers, PEERS),
        (options.kinds, KINDS),
    ):
        for word in given:
            if word not in known:
                made.error(f"{word}: there are {', '.join(known)}")
    if options.repeats < 1 or min(options.threads) < 1:
        made.error("--repeats and --threads must be at least 1")
    # The longest of W1, or of W3 and W5, with what follows it.
    longest = max(*options.contexts, options.long, options.shared)
    options.context = longest + options.new + 64
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.report:
        write(json.loads(options.report.read_text()), options.out)
        return 0
    for needed in (options.kvcache, options.probe, options.model):
        if not needed.exists():
            print(f"compare: error: {needed}: not there; see bench/README.md", file=sys.stderr)
            return 1
    wanted = options.only or [*WORKLOADS, "accuracy"]
    results = measure(options, wanted)
    if "accuracy" in wanted:
        results["accuracy"] = accuracy.measure(options)
    if "W7" in wanted:
        results["micro"] = micro.measure(options)
    write(results, options.out)
    return 0


def measure(options, wanted: list[str]) -> dict:
    start = time.time()
    contenders = choose(options)
    pool = Pool(options)
    runner = Runner(options, pool)
    try:
        for threads in options.threads:
            for name, workload in WORKLOADS.items():
                if name in wanted:
                    workload(runner, threads, contenders)
                    save(collect(options, runner), options.out)  # it may be ended early
            pool.stop()
    finally:
        pool.stop()
    say(f"{time.time() - start:.0f} s")
    return collect(options, runner)


def collect(options, runner: Runner) -> dict:
    facts = {
        " ".join(filter(None, key)): facts for key, facts in sorted(runner.pool.facts.items())
    }
    shown = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
    shown["model"] = options.model.name
    return {
        "machine": machine.describe(),
        "options": shown,
        "facts": facts,
        "blocks": runner.blocks,
    }


def save(results: dict, folder: Path) -> None:
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def write(results: dict, folder: Path) -> None:
    save(results, folder)
    table = report.markdown(results)
    table += accuracy.markdown(results.get("accuracy")) + micro.markdown(results.get("micro"))
    (folder / "table.md").write_text(table)
    report.write_plots(results, folder)
    print(table)
