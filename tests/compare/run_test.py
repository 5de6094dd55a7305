"""A whole run of bench/compare with programs that only pretend to compute."""

import contextlib
import io
import json
import os
import stat
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/compare"))

from kvcompare.main import main  # noqa: E402

HEAD = f"#!{sys.executable}\nimport json, sys\n"
PROBE = """
print(json.dumps({"threads": int(sys.argv[1]), "read_gb_s": 10.0, "gflop_s": 50.0}))
"""
# Says what a model would: as many tokens as asked for, 10 ms each.
KVCACHE = """
arguments = sys.argv[1:]
dtype = arguments[arguments.index("--dtype") + 1] if "--dtype" in arguments else None
if dtype == "packed":
    sys.exit("kvcache: error: --dtype must be auto, float32 or bfloat16")
if arguments[0] == "tokenize":
    print(json.dumps({"tokens": list(range(20))}))
elif arguments[0] == "score":
    shift = 0.0 if dtype == "float32" else 0.25
    print(json.dumps({"logprobs": [-1.0 - shift] * 19}))
else:
    print(json.dumps({"ready": True, "weight_bytes": 10**8, "kv_bytes_per_token": 1000}))
    for line in sys.stdin:
        request = json.loads(line)
        rows, new = len(request["prompts"]), request["new"]
        if request.get("cache") == "window":
            print(json.dumps({"error": "no window today"}), flush=True)
            continue
        tokens = [(prompt[0] + i) % 97 for prompt in request["prompts"][:1] for i in range(new)]
        answer = {"tokens": [tokens] * rows, "logprobs": [[-1.0] * new] * rows}
        answer |= {"first_ms": 20.0, "decode_ms": 10.0 * (new - 1)}
        answer |= {"decode_tokens": rows * (new - 1), "token_ms": None if rows > 1 else [10.0] * (new - 1)}
        if "crop" in request:
            answer |= {"crop_us": 3.0, "crop_replay": 0, "crop_same": True}
        print(json.dumps(answer), flush=True)
"""


class RunTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "model.gguf").write_bytes(b"x" * 1000)
        self.program("kvcache", KVCACHE)
        self.program("probe", PROBE)

    def program(self, name, source):
        path = self.folder / name
        path.write_text(HEAD + source)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def compare(self, *more):
        """(status, results, what it printed)"""
        out = self.folder / "out"
        paths = ("--model", "model.gguf"), ("--kvcache", "kvcache"), ("--probe", "probe")
        arguments = [text for name, file in paths for text in (name, str(self.folder / file))]
        printed, said = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            status = main([*arguments, "--out", str(out), *more])
        path = out / "results.json"
        results = json.loads(path.read_text()) if path.exists() else None
        return status, results, printed.getvalue() + said.getvalue()

    def test_everything_of_ours(self):
        status, results, text = self.compare(
            *("--quick", "--peers", "kvcache", "--kinds", "preallocated,window,none")
        )
        self.assertEqual(status, 0, text)
        found = {block["workload"] for block in results["blocks"]}
        self.assertEqual(found, {"W1", "W2", "W3", "W4", "W5", "W8"})
        first = results["blocks"][0]
        entry = first["entries"]["kvcache bfloat16 preallocated"]
        self.assertAlmostEqual(entry["decode"]["median"], 100.0)
        self.assertEqual(entry["decode"]["runs"], 2)
        self.assertEqual(entry["agreement"], {"same": 32, "of": 32})
        self.assertEqual(entry["log_prob"]["max"], 0.0)
        # 100 MB and 48 tokens of 1000 bytes, 100 times a second, of 10 GB/s.
        self.assertAlmostEqual(entry["share"], 1.0, delta=0.01)
        self.assertEqual(first["entries"]["kvcache bfloat16 window"], {"error": "no window today"})
        self.assertIn("must be auto", first["entries"]["kvcache packed preallocated"]["error"])
        self.assertIn("- not run: kvcache packed preallocated: kvcache: error", text)
        names = sorted(path.name for path in (self.folder / "out").glob("*.svg"))
        self.assertEqual(
            names, ["decode-2.svg", "first_token-2.svg", "generation-2.svg", "slots-2.svg"]
        )
        rows = {(row["dtype"], row.get("how")): row for row in results["accuracy"]}
        self.assertEqual(rows[("bfloat16", "token by token")]["mean"], 0.25)
        self.assertEqual(rows[("bfloat16", "in chunks")]["best_same"], 1.0)
        self.assertIn("error", rows[("packed", None)])

    def test_no_cache_stays_with_short_prompts(self):
        _, results, _ = self.compare(
            *("--quick", "--only", "W1", "--peers", "kvcache", "--kinds", "none"),
            *("--dtypes", "float32", "--contexts", "32,64"),
        )
        self.assertEqual([len(block["entries"]) for block in results["blocks"]], [1, 0])

    def test_the_report_can_be_made_again(self):
        few = ("--quick", "--peers", "kvcache", "--dtypes", "float32", "--only", "W1")
        _, results, text = self.compare(*few)
        again, _, second = self.compare("--report", str(self.folder / "out/results.json"))
        self.assertEqual(again, 0)
        self.assertIn(second, text)
        self.assertTrue(results["blocks"])

    def test_what_is_missing_is_named(self):
        os.remove(self.folder / "probe")
        status, _, text = self.compare("--quick")
        self.assertEqual(status, 1)
        self.assertRegex(text, r"compare: error: \S*probe: not there")

    def test_unknown_words_are_refused(self):
        for option, word in (("--only", "W9"), ("--peers", "vllm"), ("--kinds", "ring")):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
                main([option, word])
            self.assertIn(f"{word}: there are", said.getvalue())


if __name__ == "__main__":
    unittest.main()
