"""Runs the kvcache program for the tests beside this file."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

PROGRAM = os.environ["KVCACHE_PROGRAM"]
DATA = Path(__file__).resolve().parents[1] / "reference" / "data"
LLAMA = DATA / "llama"  # 64 tokens, no tokenizer, context 128
TALKER = DATA / "llama_rope3"  # 272 tokens, byte tokenizer, context 512
HYBRID = DATA / "qwen3_5"  # 64 tokens, 3 of 4 layers are linear attention
CACHES = ("preallocated", "state", "window", "concat", "none")
PATIENCE = 300  # seconds


def run(*args, stdin=b"", check=None):
    """(exit status, stdout, stderr) as bytes."""
    done = subprocess.run(
        [PROGRAM, *map(str, args)],
        input=stdin,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    if check is not None and done.returncode != check:
        raise AssertionError(f"{args}: status {done.returncode}\n{done.stderr.decode()}")
    return done.returncode, done.stdout, done.stderr


def run_json(*args, stdin=b""):
    """The one object on the one line that --json writes."""
    _, out, _ = run(*args, "--json", stdin=stdin, check=0)
    lines = out.decode().split("\n")
    if len(lines) != 2 or lines[1]:
        raise AssertionError(f"not one line: {out!r}")
    return json.loads(lines[0])


def tiny(command, model=TALKER, *args):
    """Arguments for a tiny model: exact, and on one thread."""
    return (command, "--model", model, "--dtype", "float32", "--threads", "1", *args)


def start(*args, **kwargs):
    return subprocess.Popen(
        [PROGRAM, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def interrupt_when_ready(process):
    """Ctrl-C, once the program is there to take it."""
    status = Path(f"/proc/{process.pid}/status")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        fields = dict(
            line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line
        )
        if int(fields["SigBlk"], 16) & 1 << signal.SIGINT - 1:
            process.send_signal(signal.SIGINT)
            return
        time.sleep(0.01)
    raise AssertionError("the program never got ready for Ctrl-C")


class ProgramTest(unittest.TestCase):
    def assert_error(self, status, *args, text=(), stdin=b""):
        """Exactly one line on stderr, nothing on stdout."""
        got, out, err = run(*args, stdin=stdin)
        message = err.decode()
        self.assertEqual(got, status, (args, message))
        self.assertEqual(out, b"", args)
        self.assertRegex(message, r"\Akvcache: error: [^\n]+\n\Z", args)
        self.assertNotIn("[", message.split(":", 2)[2][:2], "a place in the code")
        for part in [text] if isinstance(text, str) else text:
            self.assertIn(part, message, args)

    def folder(self, model=TALKER):
        """A copy of a tiny model that a test may change."""
        folder = Path(tempfile.mkdtemp(prefix="kvcache-cli-"))
        self.addCleanup(shutil.rmtree, folder)
        copy = folder / "model"
        shutil.copytree(model, copy)
        return copy


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
