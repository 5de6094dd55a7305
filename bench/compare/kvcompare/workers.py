"""Programs that stay loaded and answer one JSON line a request."""

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

from kvcompare import machine


class PeerError(Exception):
    """Why a peer gave no figure, in one line."""


class Worker:
    """One process. Starting it waits until its model is loaded."""

    def __init__(self, command: list, threads: int, log: Path, patience: float):
        self.patience = patience
        self.log = log  # what it says besides answers
        variables = {"OMP_NUM_THREADS": str(threads), "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.perf_counter()
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [*machine.pinned(threads), *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | variables,
            )
        self.facts = self._read()
        self.facts["start_ms"] = (time.perf_counter() - start) * 1e3

    def ask(self, request: dict) -> dict:
        """The answer, with `others`: the share of the CPUs that other programs
        used meanwhile."""
        pid = self.process.pid
        before = machine.busy_seconds() - machine.process_seconds(pid)
        start = time.perf_counter()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise PeerError(f"it ended ({error})") from None
        answer = self._read()
        taken = time.perf_counter() - start
        busy = machine.busy_seconds() - machine.process_seconds(pid) - before
        answer["others"] = max(0.0, busy / taken / os.cpu_count())
        return answer

    def peak_rss_bytes(self) -> int:
        return machine.peak_rss_bytes(self.process.pid)

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _read(self) -> dict:
        timer = threading.Timer(self.patience, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            status = self.process.wait()
            said = self.log.read_text(errors="replace").strip().splitlines()
            if status < 0:
                said.append(f"ended by signal {-status}, perhaps after {self.patience:.0f} s")
            raise PeerError(said[-1] if said else f"it ended with status {status}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer
