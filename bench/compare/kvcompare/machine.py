"""What the machine is, what it gives right now, and who else uses it."""

import json
import os
import subprocess
from pathlib import Path


def probe(program: Path, threads: int) -> dict:
    """{"read_gb_s", "gflop_s", ...} of machine_probe, pinned as the peers are."""
    done = subprocess.run(
        [*pinned(threads), program, str(threads)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def pinned(threads: int) -> list[str]:
    """A prefix of a command: run on the first CPUs that this process may use."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    return ["taskset", "--cpu-list", ",".join(map(str, cpus))]


def busy_seconds() -> float:
    """CPU time that the whole machine has spent, the host's theft included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """CPU time of one process, all of its threads."""
    # The name, in parentheses, may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_fields() -> dict:
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


INTERESTING = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def describe() -> dict:
    fields = cpu_fields()
    flags = fields.get("flags", "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": fields.get("model name", "unknown"),
        "family": fields.get("cpu family"),
        "model": fields.get("model"),
        "cpus": os.cpu_count(),
        "flags": [flag for flag in INTERESTING if flag in flags],
        "memory_gib": round(memory / 2**30, 1),
        "governor": governor(),
        "kernel": os.uname().release,
    }


def governor() -> str | None:
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return path.read_text().strip() if path.exists() else None
