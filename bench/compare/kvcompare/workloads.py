"""What is measured: W1 to W5 and W8. Each adds blocks to a Runner."""

from kvcompare import figures
from kvcompare.blocks import Runner, compare_with, strip, summarise
from kvcompare.contenders import Contender
from kvcompare.workers import PeerError

RUNS_PER_CELL = 100  # run numbers, and with them token ids, that a cell may use
SLOTS_PER_RUN = 10
FIRST_SLOT_PROMPT = 64  # tokens of each slot's prompt


class Cells:
    """Numbers for prompts, so that no two cells share the beginning of one."""

    def __init__(self):
        self.numbers = {}

    def prompt(self, cell: tuple, run: int, tokens: int) -> list[int]:
        number = self.numbers.setdefault(cell, len(self.numbers))
        return figures.token_ids(tokens, number * RUNS_PER_CELL + run)


CELLS = Cells()


def lengths(runner: Runner, threads: int, contenders, workload: str, context: int, new: int):
    """One cell: `new` tokens after a prompt of `context`."""
    block = {
        "workload": workload,
        "what": f"{new} tokens after {context}",
        "threads": threads,
        "context": context,
        "new": new,
    }

    def request(run: int) -> dict:
        prompt = CELLS.prompt((workload, context, new), run, context)
        return {"prompts": [prompt], "new": new} | ({"check": True} if run == 0 else {})

    runner.run(block, contenders, lambda c, run: runner.ask(c, threads, request(run)))
    finish(runner, threads, contenders, block, request(0))


def finish(runner: Runner, threads: int, contenders, block: dict, request: dict) -> None:
    exact = runner.reference(threads, request)
    for contender in contenders:
        summarise(runner, contender, block)
        compare_with(exact, block["entries"][contender.name])
    strip(block)


def one_at_a_time(contenders):
    """Without a cache each token costs a prefill: a few after a short prompt."""
    return [c for c in contenders if c.cache != "none"]


def w1_decode(runner: Runner, threads: int, contenders) -> None:
    options = runner.options
    for context in options.contexts:
        cheap = contenders if context <= 32 else one_at_a_time(contenders)
        lengths(runner, threads, cheap, "W1", context, options.new)


def w2_prefill(runner: Runner, threads: int, contenders) -> None:
    chosen = one_at_a_time(contenders)
    for context in runner.options.prefills:
        lengths(runner, threads, chosen, "W2", context, 1)


def w3_generation(runner: Runner, threads: int, contenders) -> None:
    """One long text: ms a token against its length, once."""
    new, prompt = runner.options.long, 32
    chosen = long_contenders(runner, threads, contenders)
    block = {
        "workload": "W3",
        "what": f"one text of {new} tokens",
        "threads": threads,
        "context": prompt,
        "new": new,
    }

    def measure(contender: Contender, run: int) -> dict:
        tokens = new if run == 1 else 8  # the warm-up is short
        request = {"prompts": [CELLS.prompt(("W3", new), run, prompt)], "new": tokens}
        return runner.ask(contender, threads, request) if run <= 1 else {}

    runner.run(block, chosen, measure)
    for contender in chosen:
        entry = block["entries"][contender.name]
        entry["runs"] = [run for run in entry.get("runs", []) if run]
        if entry["runs"] and entry["runs"][0].get("token_ms"):
            describe_curve(runner, contender, block, entry)
    strip(block)


def long_contenders(runner: Runner, threads: int, contenders):
    """Every kind of ours in the first dtype that runs, and each peer once."""
    found, peers = [], {}
    for contender in one_at_a_time(contenders):
        if not contender.ours:
            peers.setdefault((contender.peer, contender.cache), contender)
        elif (not found or contender.dtype == found[0].dtype) and runner.runs(contender, threads):
            found.append(contender)
    return found + list(peers.values())


def describe_curve(runner: Runner, contender: Contender, block: dict, entry: dict) -> None:
    """`slope_us`: by what a token gets slower with each token before it, and
    `slope_bound`: that by the time in which memory gives a token's K/V."""
    gaps = entry["runs"][0]["token_ms"]
    width = max(1, len(gaps) // 64)
    points = figures.smooth(gaps, width)  # medians: what disturbs one token does not count
    entry["curve"] = [[round(block["context"] + x, 1), round(y, 4)] for x, y in points]
    entry["slope_us"] = figures.slope([y for _, y in points]) / width * 1e3
    entry["first_ms_per_token"] = points[0][1]
    entry["last_ms_per_token"] = points[-1][1]
    entry["peak_rss_bytes"] = entry["runs"][0]["peak_rss_bytes"]
    if kv := runner.kv_bytes_per_token(contender):
        read = (block["probe_before"]["read_gb_s"] + block["probe_after"]["read_gb_s"]) / 2
        entry["slope_bound"] = entry["slope_us"] / (kv / (read * 1e3))


def w4_slots(runner: Runner, threads: int, contenders) -> None:
    """Texts at the same time: tokens per second of all of them together."""
    options = runner.options
    most = max(options.slots)
    for slots in options.slots:
        block = {
            "workload": "W4",
            "what": f"{slots} slots, {options.slot_new} tokens each",
            "threads": threads,
            "context": FIRST_SLOT_PROMPT,
            "new": options.slot_new,
            "slots": slots,
        }

        def request(run: int, count: int = slots) -> dict:
            cell = ("W4", count)
            prompts = [
                CELLS.prompt(cell, run * SLOTS_PER_RUN + i, FIRST_SLOT_PROMPT) for i in range(count)
            ]
            return {"prompts": prompts, "new": options.slot_new}

        # The peers' programs are made for a number of slots; ours is not.
        runner.run(
            block,
            one_at_a_time(contenders),
            lambda c, run: runner.ask(c, threads, request(run), 1 if c.ours else most),
        )
        alone = request(0) | {"prompts": request(0)["prompts"][:1]}
        finish(runner, threads, one_at_a_time(contenders), block, alone)
    runner.pool.stop(slots_above=1)


# W5: what a request costs that begins like an earlier one. A scenario gives the
# time to the first token of each of its requests, cold ones included.


class Scenario:
    """Requests of one contender that may go on from each other."""

    def __init__(self, runner: Runner, contender: Contender, threads: int, space: str):
        self.ask_it = lambda request: runner.ask(contender, threads, request | {"space": space})
        self.first_ms = {}
        self.answer = None

    def ask(self, label: str, prompt: list[int], new: int = 1) -> list[int]:
        self.answer = self.ask_it({"prompts": [prompt], "new": new, "check": new > 1})
        self.first_ms[label] = self.answer["first_ms"]
        return (self.answer.get("tokens") or [None])[0] or []


def shared_prefix(scenario: Scenario, run: int, shared: int) -> None:
    prefix = CELLS.prompt(("W5", "shared"), run, shared)
    for label in ("cold", "warm", "again"):  # again: the same prompt a second time
        which = 1 if label == "cold" else 2
        scenario.ask(label, prefix + CELLS.prompt(("W5", "suffix", which), run, 16))


def edit(scenario: Scenario, run: int, shared: int) -> None:
    prompt = CELLS.prompt(("W5", "edit"), run, shared)
    scenario.ask("cold", prompt)
    middle = shared // 2
    scenario.ask("warm", prompt[:middle] + [prompt[middle] + 1] + prompt[middle + 1 :])


def conversation(scenario: Scenario, run: int, shared: int) -> None:
    """Ten turns: 48 tokens of the user, 32 of the model."""
    text = []
    for turn in range(10):
        text += CELLS.prompt(("W5", "turn", turn), run, 48)
        answer = scenario.ask(f"turn {turn + 1}", text, 32)
        text += answer or CELLS.prompt(("W5", "reply", turn), run, 32)


def no_hits(scenario: Scenario, run: int, shared: int) -> None:
    for i in range(4):
        scenario.ask(f"request {i + 1}", CELLS.prompt(("W5", "new", i), run, 512))


SCENARIOS = {
    "shared prefix": shared_prefix,
    "edit in the middle": edit,
    "conversation": conversation,
    "no hits": no_hits,
}


def w5_reuse(runner: Runner, threads: int, contenders) -> None:
    shared = runner.options.shared
    chosen = [c for c in contenders if can_share(c)]
    for name, play in SCENARIOS.items():
        block = {"workload": "W5", "what": name, "threads": threads, "shared": shared}

        def measure(contender: Contender, run: int, name=name, play=play) -> dict:
            # Kinds of one dtype share a worker, but nothing that it keeps.
            scenario = Scenario(runner, contender, threads, f"{contender.name} {name} {run}")
            play(scenario, run, shared)
            others = scenario.answer["others"]
            return {"first_ms": scenario.first_ms, "others": others} | without_store(
                runner, contender, threads, name, run
            )

        runner.run(block, chosen, measure)
        for entry in block["entries"].values():
            runs = entry.get("runs", [])
            if runs:
                labels = runs[0]["first_ms"]
                entry["first_ms"] = {
                    label: figures.spread([r["first_ms"][label] for r in runs]) for label in labels
                }


def can_share(contender: Contender) -> bool:
    if contender.ours:
        return contender.cache in ("preallocated", "state") and contender.dtype != "float32"
    return contender.peer in ("llama.cpp", "openvino")


def without_store(runner: Runner, contender: Contender, threads: int, name: str, run: int) -> dict:
    """The stream of `no hits` for ours with nothing kept: what keeping costs."""
    if name != "no hits" or not contender.ours:
        return {}
    first_ms = [
        runner.ask(
            contender,
            threads,
            {"prompts": [CELLS.prompt(("W5", "off", i), run, 512)], "new": 1},
        )["first_ms"]
        for i in range(4)
    ]
    return {"off_ms": first_ms}


def w8_crop(runner: Runner, threads: int, contenders) -> None:
    """Cut 16 tokens and make them anew, as after a rejected draft."""
    chosen = [c for c in contenders if c.ours and c.cache != "none" or c.peer == "transformers"]
    block = {
        "workload": "W8",
        "what": "crop 16 of 32 tokens after 512",
        "threads": threads,
        "context": 512,
        "new": 32,
    }

    def measure(contender: Contender, run: int) -> dict:
        prompt = CELLS.prompt(("W8",), run, 512)
        answer = runner.ask(contender, threads, {"prompts": [prompt], "new": 32, "crop": 16})
        if answer.get("crop_same") is False:
            raise PeerError("other tokens after the crop")
        return answer

    runner.run(block, chosen, measure)
    for entry in block["entries"].values():
        if entry.get("runs"):
            entry["crop_us"] = figures.spread([r["crop_us"] for r in entry["runs"]])
    strip(block)


WORKLOADS = {
    "W1": w1_decode,
    "W2": w2_prefill,
    "W3": w3_generation,
    "W4": w4_slots,
    "W5": w5_reuse,
    "W8": w8_crop,
}
