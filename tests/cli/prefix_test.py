"""The prefix cache as its users meet it: batch, generate, verify, inspect."""

import json
import random
import resource
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from program import HYBRID, PATIENCE, PROGRAM, TALKER, ProgramTest, run, run_json, tiny

SAME = ("tokens", "text", "logprobs", "finish_reason")
REUSE_KEYS = ["matched", "restored", "computed", "decoded", "reason", "first_different",
              "in_row"]


def trace(count, vocabulary, seed=5):
    """Prompts that share beginnings, grow, are edited, and come again."""
    draw = random.Random(seed)
    ids = lambda n: [draw.randrange(1, vocabulary) for _ in range(n)]
    prompts = [ids(40), ids(25)]
    while len(prompts) < count:
        prompt = list(draw.choice(prompts))
        kind = draw.randrange(5)
        if kind == 1:
            prompt += ids(draw.randrange(1, 12))
        elif kind == 2:
            prompt[draw.randrange(len(prompt))] = draw.randrange(1, vocabulary)
        elif kind == 3:
            prompt = prompt[: draw.randrange(1, len(prompt) + 1)]
        elif kind == 4:
            prompt = ids(draw.randrange(1, 40))
        prompts.append(prompt[:80])
    return prompts


class PrefixTest(ProgramTest):
    def setUp(self):
        self.place = Path(tempfile.mkdtemp(prefix="kvcache-prefix-"))
        self.addCleanup(shutil.rmtree, self.place)
        self.kept = self.place / "kept"

    def batch(self, model, requests, *more):
        (self.place / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
        output = self.place / "out.jsonl"
        _, _, err = run(
            *tiny("batch", model, "--requests", self.place / "in.jsonl", "--output", output, *more),
            check=0,
        )
        return [json.loads(line) for line in output.read_text().splitlines()], err.decode()

    def assert_same(self, got, cold):
        for a, b in zip(got, cold, strict=True):
            for key in SAME:
                self.assertEqual(a[key], b[key], a["id"])

    # A trace of 200 requests: the answers of a store are those without, on
    # every kind, and the report adds up.
    def test_a_trace_of_200_requests(self):
        for model in (TALKER, HYBRID):
            requests = [
                {"tokens": prompt, "max_new_tokens": 4, "ignore_eos": True}
                for prompt in trace(200, 60)
            ]
            cold, _ = self.batch(model, requests, "--slots", "4")
            for more in (
                ("--slots", "1"),
                ("--slots", "4", "--cache", "window"),
                ("--slots", "3", "--cache", "state"),
            ):
                warm, said = self.batch(model, requests, "--prefix-cache-mb", "8", *more)
                self.assert_same(warm, cold)
                restored = 0
                for answer, request in zip(warm, requests):
                    reuse = answer["reuse"]
                    self.assertEqual(list(reuse), REUSE_KEYS)
                    self.assertEqual(
                        reuse["restored"] + reuse["computed"], len(request["tokens"])
                    )
                    self.assertLessEqual(reuse["restored"], reuse["matched"])
                    restored += reuse["restored"]
                self.assertGreater(restored, 1000)
                self.assertIn(f"{restored} reused", said)

    # A process that starts on the folder of another computes nothing again.
    def test_a_folder_outlives_the_process(self):
        for model in (TALKER, HYBRID):
            shutil.rmtree(self.kept, ignore_errors=True)
            keep = ("--slots", "1", "--prefix-cache-mb", "8", "--prefix-dir", self.kept)
            first = [
                {"tokens": prompt, "max_new_tokens": 4, "ignore_eos": True}
                for prompt in (list(range(1, 31)), list(range(30, 1, -1)))
            ]
            answers, _ = self.batch(model, first, *keep)
            self.assertEqual([a["reuse"]["reason"] for a in answers], ["no_entry"] * 2)
            again, _ = self.batch(model, first, *keep)
            self.assert_same(again, answers)
            for answer in again:
                self.assertEqual(answer["reuse"]["computed"], 0)
                self.assertIsNone(answer["reuse"]["reason"])
            # The text goes on: only what is new.
            longer = first[0]["tokens"] + answers[0]["tokens"] + [7, 8]
            request = {"tokens": longer, "max_new_tokens": 3, "ignore_eos": True}
            warm, _ = self.batch(model, [request], *keep)
            cold, _ = self.batch(model, [request])
            self.assert_same(warm, cold)
            self.assertEqual(warm[0]["reuse"]["computed"], 3)
            one = run_json(
                *tiny("generate", model, "--tokens", ",".join(map(str, longer)),
                      "--max-new-tokens", "3", "--ignore-eos", "--prefix-cache-mb", "8",
                      "--prefix-dir", self.kept)
            )  # fmt: skip
            self.assertEqual(one["tokens"], cold[0]["tokens"])
            self.assertEqual(one["reuse"]["computed"], 0)

            listed = run_json("inspect", self.kept)["saved"]
            self.assertGreaterEqual(len(listed), 2)
            for text in listed:
                self.assertGreater(text["tokens"], 0)
                self.assertEqual(text["restore_points"] != [], model == HYBRID)
                self.assertIn("weights", text["identity"])
            self.assertIn(b"tokens", run("inspect", self.kept, check=0)[1])

    # Another model's files are passed over and named; so is a damaged one.
    def test_files_of_others_are_passed_over(self):
        keep = ("--slots", "1", "--prefix-cache-mb", "8", "--prefix-dir", self.kept)
        request = [{"tokens": list(range(1, 31)), "max_new_tokens": 2, "ignore_eos": True}]
        self.batch(TALKER, request, *keep)
        other = self.folder(TALKER)
        weights = other / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-2] ^= 1
        weights.write_bytes(content)
        answers, said = self.batch(other, request, *keep)
        self.assertEqual(answers[0]["reuse"]["restored"], 0)
        self.assertRegex(said, r"warning: /.* weights must be")
        for path in self.kept.iterdir():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        answers, said = self.batch(TALKER, request, *keep)
        self.assertEqual(answers[0]["reuse"]["restored"], 0)
        self.assertRegex(said, r"warning: .* is not what was written")

    # Names share nothing; requests of one name do.
    def test_names_share_nothing(self):
        tokens = list(range(1, 31))
        requests = [
            {"tokens": tokens, "namespace": name, "max_new_tokens": 1}
            for name in ("a", "b", "a", "b")
        ]
        answers, _ = self.batch(TALKER, requests, "--slots", "1", "--prefix-cache-mb", "8")
        self.assertEqual([a["reuse"]["restored"] for a in answers], [0, 0, 30, 30])

    # A disk that is full costs what was to be kept, not the answer.
    def test_a_full_disk_keeps_the_answer(self):
        args = tiny("generate", TALKER, "--tokens", ",".join(map(str, range(1, 41))),
                    "--max-new-tokens", "3", "--json", "--prefix-cache-mb", "8",
                    "--prefix-dir", self.kept)  # fmt: skip
        done = subprocess.run(
            [PROGRAM, *map(str, args)],
            capture_output=True,
            timeout=PATIENCE,
            check=False,
            restore_signals=False,  # Python ignores SIGXFSZ
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        )
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr.decode(), r"\Akvcache: error: .*could not be written[^\n]*\n\Z")
        self.assertEqual(len(json.loads(done.stdout)["tokens"]), 3)
        self.assertEqual(list(self.kept.iterdir()), [])

    def test_wrong_folders(self):
        base = tiny("generate", TALKER, "--tokens", "1,2", "--prefix-cache-mb", "1", "--prefix-dir")
        self.assert_error(2, *base, "", text="must be a folder")
        self.assert_error(1, "inspect", self.place, text="has neither config.json")
        (self.place / "file").write_text("x")
        self.assert_error(1, *base, self.place / "file", text="must be a folder to keep texts in")

    def test_verify_says_bit_identical(self):
        tokens = ",".join(map(str, range(1, 41)))
        for model in (TALKER, HYBRID):
            for cache in ("preallocated", "state", "window", "concat"):
                for split in ("1", "17", "39"):
                    said = run_json(
                        *tiny("verify", model, "--tokens", tokens, "--cache", cache,
                              "--split", split, "--chunk", "16")
                    )  # fmt: skip
                    self.assertTrue(said["identical"], said)
                    self.assertIsNone(said["first_difference"])
        _, out, _ = run(*tiny("verify", TALKER, "--tokens", tokens), check=0)
        self.assertRegex(out.decode(), r"\Abit-identical: \d+ layers .*\n\Z")
        base = ("verify", "--model", TALKER)
        self.assert_error(2, *base, text="exactly one of --prompt and --tokens")
        self.assert_error(2, *base, "--tokens", "1,2", "--cache", "none", text="nothing to save")
        self.assert_error(1, *base, "--tokens", "1", text="the split must be in")
        self.assert_error(1, *base, "--tokens", "1,2", "--split", "2", text="the split must be")


if __name__ == "__main__":
    unittest.main()
