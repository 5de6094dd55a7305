"""kvcache bench --worker: answers on request, the same tokens whatever the way."""

import json
import unittest

from program import CACHES, HYBRID, LLAMA, ProgramTest, run, run_json, tiny

PROMPT = [3, 14, 15, 9, 26, 5, 35]


class WorkerTest(ProgramTest):
    def answers(self, *requests, model=LLAMA, args=()):
        """The first line, and the answer to each request (an object, or a text)."""
        lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
        _, out, err = run(
            *tiny("bench", model, "--worker", *args),
            stdin=("\n".join(lines) + "\n").encode(),
            check=0,
        )
        self.assertEqual(err, b"")
        ready, *answers = map(json.loads, out.decode().splitlines())
        self.assertEqual(len(answers), len(requests))
        return ready, answers

    def test_every_kind_gives_the_tokens_of_generate(self):
        whole = run_json(
            *tiny("generate", LLAMA, "--tokens", ",".join(map(str, PROMPT))),
            *("--max-new-tokens", "6", "--ignore-eos"),
        )
        ready, answers = self.answers(
            *({"prompts": [PROMPT], "new": 6, "cache": cache} for cache in CACHES)
        )
        self.assertEqual((ready["ready"], ready["dtype"], ready["threads"]), (True, "float32", 1))
        self.assertGreater(ready["weight_bytes"], 0)
        self.assertGreater(ready["kv_bytes_per_token"], 0)
        for answer in answers:
            self.assertEqual(answer["tokens"], [whole["tokens"]])
            self.assertEqual(answer["logprobs"], [whole["logprobs"]])
            self.assertEqual((len(answer["token_ms"]), answer["decode_tokens"]), (5, 5))
            self.assertAlmostEqual(sum(answer["token_ms"]), answer["decode_ms"], places=3)
            self.assertGreater(answer["first_ms"], 0)

    def test_prompts_at_the_same_time(self):
        prompts = [PROMPT, PROMPT[:3], PROMPT[2:]]
        _, (together, *alone) = self.answers(
            {"prompts": prompts, "new": 5},
            *({"prompts": [prompt], "new": 5} for prompt in prompts),
        )
        self.assertEqual(together["tokens"], [answer["tokens"][0] for answer in alone])
        self.assertNotIn("token_ms", together)
        self.assertLessEqual(together["decode_tokens"], 3 * 4)

    def test_a_space_is_shared(self):
        prompt = (PROMPT * 5)[:33]
        request = {"prompts": [prompt], "new": 2, "space": "a"}
        _, (cold, warm, other) = self.answers(
            request, request, request | {"space": "b"}, args=("--prefix-cache-mb", "8")
        )
        self.assertEqual(cold["tokens"], warm["tokens"])
        self.assertEqual([a["reuse"]["restored"] > 16 for a in (cold, warm, other)], [False, True, False])

    def test_a_cut_text_comes_again(self):
        for model in (LLAMA, HYBRID):
            _, (answer,) = self.answers(
                {"prompts": [PROMPT], "new": 8, "crop": 3, "cache": "state"}, model=model
            )
            self.assertTrue(answer["crop_same"])
            self.assertGreater(answer["crop_us"], 0)

    def test_a_wrong_request_is_answered_and_the_next_one_too(self):
        good = {"prompts": [PROMPT], "new": 2}
        _, answers = self.answers(
            "nonsense",
            {"new": 2},
            good | {"cache": "ring"},
            good | {"space": "a"},
            good | {"crop": 2},
            {"prompts": [PROMPT, PROMPT], "new": 2, "crop": 1},
            {"prompts": [PROMPT, PROMPT], "new": 2, "cache": "none"},
            good | {"tokens": 1},
            {"prompts": [[]], "new": 2},
            good,
        )
        for answer in answers[:-1]:
            self.assertEqual(list(answer), ["error"])
        self.assertIn("--prefix-cache-mb", answers[3]["error"])
        self.assertIn("less than new, 2", answers[4]["error"])
        self.assertEqual(len(answers[-1]["tokens"][0]), 2)

    def test_usage(self):
        self.assert_error(2, *tiny("bench", LLAMA, "--prefix-cache-mb", "8"), text="--worker")
        self.assert_error(
            *(2, *tiny("bench", LLAMA, "--worker", "--prefix-cache-mb", "-1")),
            text="--prefix-cache-mb",
        )


if __name__ == "__main__":
    unittest.main()
