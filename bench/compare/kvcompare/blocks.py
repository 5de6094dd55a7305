"""A block: a few contenders in turns, between two probes of the machine."""

import sys

from kvcompare import figures, machine
from kvcompare.contenders import REFERENCE, Contender, Pool
from kvcompare.workers import PeerError

FILE_WEIGHTS = ("llama.cpp", "llama.cpp-native")  # read the file's bytes as they are


def say(text: str) -> None:
    print(f"compare: {text}", file=sys.stderr, flush=True)


class Runner:
    """Runs blocks and keeps what the whole run shares."""

    def __init__(self, options, pool: Pool):
        self.options = options
        self.pool = pool
        self.references = {}  # prompts, new -> answer
        self.blocks = []

    def probe(self, threads: int) -> dict:
        return machine.probe(self.options.probe, threads)

    def run(self, block: dict, contenders: list[Contender], measure) -> None:
        """`measure(contender, run)` -> answer; run 0 is the warm-up. Adds the
        block with `entries`: name -> {"runs": [...]} or {"error": why}."""
        say(f"{block['workload']}, {block['what']}, {block['threads']} threads")
        entries = {contender.name: {"runs": []} for contender in contenders}
        # The warm-up also loads models, so that the first probe is of a quiet
        # machine.
        self.turn(contenders, entries, measure, 0)
        before = self.probe(block["threads"])
        for run in range(1, self.options.repeats + 1):
            self.turn(contenders, entries, measure, run)
        after = self.probe(block["threads"])
        runs = [run for entry in entries.values() for run in entry.get("runs", [])]
        others = max((run["others"] for run in runs if "others" in run), default=0.0)
        block |= {
            "probe_before": before,
            "probe_after": after,
            "others": others,
            "marks": figures.marks(before, after, others),
            "entries": entries,
        }
        self.blocks.append(block)

    def turn(self, contenders, entries, measure, run: int) -> None:
        for contender in contenders:
            entry = entries[contender.name]
            if "error" in entry:
                continue
            try:
                answer = measure(contender, run)
            except PeerError as error:
                say(f"{contender.name}: {error}")
                entries[contender.name] = {"error": str(error)}
                continue
            if run == 0:
                entry["warm_up"] = answer
            else:
                entry["runs"].append(answer)

    def ask(self, contender: Contender, threads: int, request: dict, slots: int = 1) -> dict:
        worker = self.pool.get(contender, threads, slots)
        answer = worker.ask(contender.request(request))
        answer["peak_rss_bytes"] = worker.peak_rss_bytes()
        return answer

    def runs(self, contender: Contender, threads: int) -> bool:
        try:
            self.pool.get(contender, threads)
        except PeerError:
            return False
        return True

    def reference(self, threads: int, request: dict) -> dict | None:
        """The exact answer to a request; null where ours cannot run."""
        key = (str(request["prompts"]), request["new"])
        if key not in self.references:
            try:
                answer = self.ask(REFERENCE, threads, request)
            except PeerError as error:
                say(f"no reference: {error}")
                answer = None
            self.references[key] = answer
        return self.references[key]

    def weight_bytes(self, contender: Contender) -> float | None:
        facts = self.pool.facts.get((contender.peer, contender.dtype), {})
        if contender.peer in FILE_WEIGHTS:
            return self.options.model.stat().st_size
        return facts.get("weight_bytes")

    def kv_bytes_per_token(self, contender: Contender) -> float | None:
        """Of the model in 16 bits, as ours says; twice that in float32."""
        for (peer, dtype), facts in self.pool.facts.items():
            if peer == "kvcache":
                wide = 2 if dtype == "float32" else 1
                own = 2 if contender.dtype == "float32" else 1
                return facts["kv_bytes_per_token"] / wide * own
        return None


def summarise(runner: Runner, contender: Contender, block: dict) -> None:
    """From the runs of an entry: speeds, gaps, share of the bandwidth, memory."""
    entry = block["entries"][contender.name]
    runs = entry.get("runs")
    if not runs:
        return
    prompt_tokens = block["context"] * block.get("slots", 1)
    entry["prefill"] = figures.spread([prompt_tokens / r["first_ms"] * 1e3 for r in runs])
    entry["first_ms"] = figures.spread([r["first_ms"] for r in runs])
    entry["peak_rss_bytes"] = max(r["peak_rss_bytes"] for r in runs)
    if runs[0]["decode_tokens"] == 0:
        return
    decode = [r["decode_tokens"] / r["decode_ms"] * 1e3 for r in runs]
    entry["decode"] = figures.spread(decode)
    gaps = [gap for r in runs for gap in r.get("token_ms") or []]
    if gaps:
        entry["p50_ms"] = figures.percentile(gaps, 0.50)
        entry["p99_ms"] = figures.percentile(gaps, 0.99)
    weights, kv = runner.weight_bytes(contender), runner.kv_bytes_per_token(contender)
    if weights and kv and block.get("slots", 1) == 1 and contender.cache != "none":
        entry["share"] = figures.roofline_share(
            entry["decode"]["median"],
            weights,
            kv,
            block["context"] + block["new"] / 2,
            (block["probe_before"]["read_gb_s"] + block["probe_after"]["read_gb_s"]) / 2,
        )


def compare_with(reference: dict | None, entry: dict) -> None:
    """Tokens and log-probabilities of the warm-up beside the exact ones."""
    answer = entry.get("warm_up")
    if not reference or not answer or not (answer.get("tokens") or [None])[0]:
        return
    tokens, wanted = answer["tokens"][0], reference["tokens"][0]
    same = figures.agreement(tokens, wanted)
    entry["agreement"] = {"same": same, "of": len(wanted)}
    log_probs = (answer.get("logprobs") or [None])[0]
    if log_probs and same:  # up to there both saw the same text
        entry["log_prob"] = figures.log_prob_difference(
            log_probs[:same], reference["logprobs"][0][:same]
        )


def strip(block: dict) -> None:
    """What a file of results need not keep: tokens, and the gaps of each run."""
    for entry in block["entries"].values():
        for answer in [entry.get("warm_up"), *entry.get("runs", [])]:
            for key in ("tokens", "logprobs", "token_ms"):
                if answer:
                    answer.pop(key, None)
