"""The kvcache program on SmolLM2-135M-Instruct, where its weights are there."""

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

from program import CACHES, ProgramTest, run, run_json, start

SKIPPED = 77
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights():
    named = os.environ.get("KVCACHE_TEST_MODEL")
    if named:
        return Path(named)
    cache = os.environ.get("KVCACHE_CACHE_DIR") or (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcache"
    )
    return Path(cache) / "models" / NAME


MODEL = weights()
# Threads that others keep waiting for would make many small steps slow.
ONE_THREAD = ("--threads", 1)
QUESTION = ("--model", MODEL, "--chat", "--prompt", "What is the capital of France?")


class SmolLm2Test(ProgramTest):
    def test_answers_with_every_cache(self):
        results = {}
        for cache in CACHES:
            _, out, _ = run("generate", *QUESTION, "--cache", cache, check=0)
            self.assertIn("Paris", out.decode())
            results[cache] = run_json("generate", *QUESTION, "--cache", cache)
            self.assertEqual(results[cache]["finish_reason"], "stop")
            self.assertIn("Paris", results[cache]["text"])
            self.assertNotIn("<|im_end|>", results[cache]["text"])
        for key in ("tokens", "logprobs"):
            for cache in CACHES:
                self.assertEqual(results["none"][key], results[cache][key], cache)

    def test_a_window_across_buckets(self):
        # 300 tokens behind a short prompt: windows of 128, 256 and the rest.
        base = ("generate", "--model", MODEL, "--prompt", "Once upon a time",
                "--max-new-tokens", "300", "--ignore-eos", *ONE_THREAD)
        wanted = run_json(*base)
        got = run_json(*base, "--cache", "window", "--graph", "eager")
        for key in ("tokens", "logprobs", "text"):
            self.assertEqual(got[key], wanted[key], key)

    def test_scores_agree(self):
        text = "The Cache interface stores keys and values of every token once. " * 12
        ids = run_json("tokenize", "--model", MODEL, "--text", text)["tokens"][:140]
        base = ("score", "--model", MODEL, "--tokens", ",".join(map(str, ids)))
        for dtype in ("float32", "packed"):
            wanted = run_json(*base, "--dtype", dtype, "--cache", "none")["logprobs"]
            for cache, chunk in (("concat", 64), ("preallocated", 256), ("preallocated", 33)):
                got = run_json(*base, "--dtype", dtype, "--cache", cache, "--chunk", chunk)
                self.assertEqual(got["logprobs"], wanted, (dtype, cache, chunk))

    def test_a_conversation_reuses_the_cache(self):
        _, out, _ = run(
            "chat", "--model", MODEL, "--max-new-tokens", "30", "--json",
            stdin=b"What is the capital of France?\nAnd of Italy?\n", check=0,
        )
        first, second = (json.loads(line) for line in out.decode().splitlines())
        self.assertIn("Paris", first["text"])
        self.assertGreaterEqual(second["reused_tokens"], len(first["prompt_tokens"]))

    def test_control_c_keeps_the_text_so_far(self):
        process = start("generate", *QUESTION, "--ignore-eos", "--max-new-tokens", "4000")
        first = process.stdout.read(4)
        process.send_signal(2)
        rest, err = process.communicate()
        self.assertEqual(process.returncode, 0, err)
        self.assertIn("cancelled", err.decode())
        text = (first + rest).decode()
        self.assertTrue(text.startswith("The ") and text.endswith("\n"), text)

    def requests(self):
        """64 of many lengths, sorts and ends, and how to ask `generate` for each."""
        topics = ("Paris", "a river in spring", "numbers", "the sea", "C++ and memory")
        pairs = []
        for i in range(64):
            request = {"prompt": f"Tell me about {topics[i % 5]}. " * (1 + i * 7 % 6)}
            request |= {"max_new_tokens": 2 + i * 5 % 9, "chat": i % 3 == 0}
            args = ["--prompt", request["prompt"], "--max-new-tokens", 2 + i * 5 % 9]
            args += ["--chat"] * request["chat"]
            if i % 2:
                request |= {"temperature": 0.8, "seed": i, "top_p": 0.9}
                args += ["--temperature", 0.8, "--seed", i, "--top-p", 0.9]
            if i % 4 == 1:
                request |= {"repetition_penalty": 1.2, "stop": [" the", "."]}
                args += ["--repetition-penalty", 1.2, "--stop", " the", "--stop", "."]
            pairs.append((request, args))
        return pairs

    def test_a_batch_is_one_by_one(self):
        with tempfile.TemporaryDirectory(prefix="kvcache-batch-") as folder:
            requests, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
            pairs = self.requests()
            requests.write_text("".join(json.dumps(request) + "\n" for request, _ in pairs))
            answers = {}
            for slots, cache in ((1, "preallocated"), (4, "window")):
                run(
                    "batch", "--model", MODEL, "--slots", slots, "--cache", cache, *ONE_THREAD,
                    "--requests", requests, "--output", output, check=0,
                )
                answers[slots] = [json.loads(line) for line in output.read_text().splitlines()]
        self.assertEqual(len(answers[4]), 64)
        keys = ("tokens", "text", "logprobs", "finish_reason")
        for one, four in zip(answers[1], answers[4]):
            for key in keys:
                self.assertEqual(four[key], one[key], four["id"])
        # A process each takes its time to load, so of these a few.
        for i in (21, 48):  # sampled with stops; chat
            alone = run_json("generate", "--model", MODEL, *ONE_THREAD, *pairs[i][1])
            for key in keys:
                self.assertEqual(answers[4][i][key], alone[key], i)


if __name__ == "__main__":
    if not MODEL.exists():
        print(f"{NAME} is not there: fetch it with scripts/demo or set KVCACHE_TEST_MODEL")
        sys.exit(SKIPPED)
    unittest.main()
