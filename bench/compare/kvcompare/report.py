"""Tables and plots of a finished run; reads nothing but its JSON."""

from pathlib import Path

from kvcompare import plots, tables


def blocks_of(results: dict, *workloads: str) -> list[dict]:
    return [b for b in results["blocks"] if b["workload"] in workloads]


def marked(block: dict) -> str:
    return " (*)" if block["marks"] else ""


def heading(block: dict) -> str:
    return f"{block['what']}, {block['threads']} threads{marked(block)}"


def speed_rows(block: dict) -> list[list[str]]:
    rows = []
    for name, entry in block["entries"].items():
        if "error" in entry:
            continue
        agreement = entry.get("agreement")
        log_prob = entry.get("log_prob")
        rows.append(
            [
                name,
                tables.ranged(entry.get("decode")),
                tables.number(entry.get("p50_ms")),
                tables.number(entry.get("p99_ms")),
                tables.share(entry.get("share")),
                tables.ranged(entry.get("prefill")),
                tables.number(entry["first_ms"]["median"]) if "first_ms" in entry else "-",
                tables.mebibytes(entry.get("peak_rss_bytes")),
                f"{agreement['same']} of {agreement['of']}" if agreement else "-",
                f"{log_prob['mean']:.4f} / {log_prob['max']:.4f}" if log_prob else "-",
            ]
        )
    return rows


SPEED_HEADER = [
    "who",
    "decode tok/s",
    "p50 ms",
    "p99 ms",
    "of the bandwidth",
    "prefill tok/s",
    "first token ms",
    "peak MiB",
    "ids as float32",
    "log-prob. difference, mean / max",
]


def speeds(results: dict) -> str:
    parts = []
    for block in blocks_of(results, "W1", "W2"):
        rows = [row for row in speed_rows(block) if row[5] != "-"]
        if rows:
            parts.append(f"### {block['workload']}: {heading(block)}\n\n")
            parts.append(tables.markdown(SPEED_HEADER, rows) + "\n")
    return "".join(parts)


def generation(results: dict) -> str:
    header = ["who", "first ms/token", "last ms/token", "slope, us/token", "of reading K/V"]
    parts = []
    for block in blocks_of(results, "W3"):
        rows = [
            [
                name,
                tables.number(entry["first_ms_per_token"]),
                tables.number(entry["last_ms_per_token"]),
                f"{entry['slope_us']:.3f}",
                f"{entry['slope_bound']:.2f} x" if "slope_bound" in entry else "-",
            ]
            for name, entry in block["entries"].items()
            if "curve" in entry
        ]
        parts.append(f"### W3: {heading(block)}\n\n{tables.markdown(header, rows)}\n")
    return "".join(parts)


def slots(results: dict) -> str:
    """One row each: total tokens per second by number of slots."""
    found = {}
    for block in blocks_of(results, "W4"):
        table = found.setdefault(block["threads"], {})
        for name, entry in block["entries"].items():
            if "decode" in entry:
                table.setdefault(name, {})[block["slots"]] = entry["decode"]["median"]
    parts = []
    for threads, table in found.items():
        counts = sorted({count for row in table.values() for count in row})
        header = ["who", *(f"{count}" for count in counts), "most against one"]
        rows = []
        for name, row in table.items():
            ratio = max(row.values()) / row[1] if 1 in row else None
            cells = [tables.number(row.get(count)) for count in counts]
            rows.append([name, *cells, f"{ratio:.1f} x" if ratio else "-"])
        title = f"### W4: tokens per second of all slots together, {threads} threads"
        parts.append(f"{title}\n\n{tables.markdown(header, rows)}\n")
    return "".join(parts)


def reuse(results: dict) -> str:
    parts = []
    for block in blocks_of(results, "W5"):
        good = {n: e for n, e in block["entries"].items() if e.get("first_ms")}
        if not good:
            continue
        labels = list(next(iter(good.values()))["first_ms"])
        rows = [
            [name, *(tables.number(e["first_ms"][label]["median"]) for label in labels)]
            for name, e in good.items()
        ]
        title = f"### W5: {heading(block)}: ms to the first token, {block['shared']} tokens shared"
        parts.append(f"{title}\n\n{tables.markdown(['who', *labels], rows)}\n")
        parts += keeping(good)
    return "".join(parts)


def keeping(entries: dict) -> list[str]:
    """What a stream without hits costs with a store against without."""
    lines = []
    for name, entry in entries.items():
        pairs = [r for r in entry["runs"] if "off_ms" in r]
        if pairs:
            with_store = sum(sum(r["first_ms"].values()) for r in pairs)
            without = sum(sum(r["off_ms"]) for r in pairs)
            lines.append(f"{name}: {with_store / without:.3f} x the time with nothing kept.\n\n")
    return lines


def crops(results: dict) -> str:
    parts = []
    for block in blocks_of(results, "W8"):
        rows = [
            [name, tables.ranged(entry["crop_us"])]
            for name, entry in block["entries"].items()
            if "crop_us" in entry
        ]
        parts.append(f"### W8: {heading(block)}\n\n{tables.markdown(['who', 'us'], rows)}\n")
    return "".join(parts)


def notes(results: dict) -> str:
    lines = []
    for block in results["blocks"]:
        if block["marks"]:
            where = f"{block['workload']}, {block['what']}, {block['threads']} threads"
            lines.append(f"- (*) {where}: {'; '.join(block['marks'])}\n")
    for name, why in sorted(not_run(results).items()):
        lines.append(f"- not run: {name}: {why}\n")
    return "### Notes\n\n" + "".join(lines) + "\n" if lines else ""


def not_run(results: dict) -> dict:
    """Contenders without a single figure, and what they said."""
    said, ran = {}, set()
    for block in results["blocks"]:
        for name, entry in block["entries"].items():
            if "error" in entry:
                said.setdefault(name, entry["error"])
            else:
                ran.add(name)
    return {name: why for name, why in said.items() if name not in ran}


def machine_lines(results: dict) -> str:
    machine = results["machine"]
    probes = [b[k] for b in results["blocks"] for k in ("probe_before", "probe_after")]
    lines = [
        f"{machine['cpu']} (family {machine['family']}, model {machine['model']}), "
        f"{machine['cpus']} CPUs, {', '.join(machine['flags'])}; {machine['memory_gib']} GiB; "
        f"Linux {machine['kernel']}; governor {machine['governor'] or 'not shown'}."
    ]
    for threads in sorted({p["threads"] for p in probes}):
        read = [p["read_gb_s"] for p in probes if p["threads"] == threads]
        flops = [p["gflop_s"] for p in probes if p["threads"] == threads]
        lines.append(
            f"Probes, {threads} threads: read {min(read):.1f} to {max(read):.1f} GB/s, "
            f"float32 {min(flops):.0f} to {max(flops):.0f} GFLOP/s."
        )
    versions = [
        f"{peer} {facts['version']}" for peer, facts in results["facts"].items() if "version" in facts
    ]
    if versions:
        lines.append("Versions: " + ", ".join(versions) + ".")
    return "\n".join(lines) + "\n\n"


def markdown(results: dict) -> str:
    parts = [machine_lines, speeds, generation, slots, reuse, crops, notes]
    return "".join(part(results) for part in parts)


# --- plots ------------------------------------------------------------------


def speed_series(results: dict, threads: int, workload: str, x: str) -> dict:
    """Tokens per second of decode against `x` of a block."""
    series = {}
    for block in blocks_of(results, workload):
        if block["threads"] == threads:
            for name, entry in block["entries"].items():
                if "decode" in entry:
                    point = (block[x], entry["decode"]["median"])
                    series.setdefault(name, []).append(point)
    return series


def decode_series(results: dict, threads: int) -> dict:
    return speed_series(results, threads, "W1", "context")


def curve_series(results: dict, threads: int) -> dict:
    return {
        name: [tuple(point) for point in entry["curve"]]
        for block in blocks_of(results, "W3")
        if block["threads"] == threads
        for name, entry in block["entries"].items()
        if "curve" in entry
    }


def first_token_series(results: dict, threads: int) -> dict:
    """Turns of a conversation, which go on from the last; cold prompts beside."""
    series = {}
    for block in blocks_of(results, "W5"):
        if block["threads"] == threads and block["what"] == "conversation":
            for name, entry in block["entries"].items():
                for i, spread in enumerate(entry.get("first_ms", {}).values()):
                    # A turn adds 48 tokens and its answer 32.
                    point = (48 + 80 * i, spread["median"])
                    series.setdefault(f"{name}, warm", []).append(point)
    warm = {name.removesuffix(", warm") for name in series}
    for block in blocks_of(results, "W1", "W2"):
        if block["threads"] == threads and block["context"] <= 800:
            for name, entry in block["entries"].items():
                if name in warm and "first_ms" in entry:
                    point = (block["context"], entry["first_ms"]["median"])
                    series.setdefault(f"{name}, cold", []).append(point)
    return series


def slot_series(results: dict, threads: int) -> dict:
    return speed_series(results, threads, "W4", "slots")


PLOTS = {
    "decode": ("Decode against context", "tokens before", "tokens per second", decode_series),
    "generation": ("One long text", "tokens before", "ms per token", curve_series),
    "first_token": ("First token, cold and warm", "tokens of prompt", "ms", first_token_series),
    "slots": ("Texts at the same time", "slots", "tokens per second, all", slot_series),
}


def write_plots(results: dict, folder: Path) -> list[Path]:
    written = []
    for name, (title, x_name, y_name, series_of) in PLOTS.items():
        for threads in sorted({b["threads"] for b in results["blocks"]}):
            series = series_of(results, threads)
            if series:
                path = folder / f"{name}-{threads}.svg"
                title_of = f"{title}, {threads} thread{'s' if threads > 1 else ''}"
                path.write_text(plots.line_plot(title_of, x_name, y_name, series))
                written.append(path)
    return written
