"""`kvcache choose`: probabilities of choices, and what questions share."""

import json
import math
import shutil
import tempfile
import unittest
from pathlib import Path

from program import HYBRID, TALKER, ProgramTest, run, run_json, tiny

REUSE_KEYS = [
    "matched", "restored", "computed", "decoded", "reason", "first_different", "class", "refusal",
]  # fmt: skip
LETTERS = (7, 3, 12, 60)


class ChooseTest(ProgramTest):
    def setUp(self):
        self.place = Path(tempfile.mkdtemp(prefix="kvcache-choose-"))
        self.addCleanup(shutil.rmtree, self.place)

    def arguments(self, model, *more):
        return tiny("choose", model, "--requests", self.place / "in.jsonl",
                    "--output", self.place / "out.jsonl", *more)  # fmt: skip

    def choose(self, model, requests, *more, letters=LETTERS):
        (self.place / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
        ids = ",".join(map(str, letters))
        _, _, err = run(*self.arguments(model, "--letters", ids, *more), check=0)
        text = (self.place / "out.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()], err.decode()

    # Questions about one page, a page that grows, one that is edited: the
    # answers of a store are those without, bit for bit.
    def test_questions_about_a_state(self):
        page = [i * 7 % 61 + 1 for i in range(60)]
        edited = page[:40] + [9] + page[41:]
        requests = [
            {"id": "a", "state": page, "suffix": [1, 2, 3], "options": [4]},
            {"id": "b", "state": page, "suffix": [4, 5], "options": [3]},
            {"id": "c", "state": page + [8, 9], "suffix": [4, 5], "options": [2]},
            {"id": "d", "tokens": edited + [4, 5, 6], "state_len": 60, "slots": [60, 62, -1],
             "options": [2, 3, 4]},
            {"id": "e", "state": page, "suffix": [4, 5], "options": [3], "namespace": "other"},
            {"id": "f", "state": page, "suffix": [1, 2, 3], "options": [4]},
            {"id": "g", "tokens": page, "options": [4]},
        ]  # fmt: skip
        for model in (TALKER, HYBRID):
            warm, said = self.choose(model, requests)
            cold, _ = self.choose(model, requests, "--prefix-cache-mb", "0")
            for got, want, request in zip(warm, cold, requests, strict=True):
                self.assertEqual(list(got), ["id", "probabilities", "route", "reuse"])
                self.assertEqual(got["probabilities"], want["probabilities"], got["id"])
                self.assertEqual([len(p) for p in got["probabilities"]], request["options"])
                for slot in got["probabilities"]:
                    self.assertAlmostEqual(sum(slot), 1, places=5)
                self.assertEqual(got["route"], 0)
                self.assertIsNone(want["reuse"])
                self.assertEqual(list(got["reuse"]), REUSE_KEYS)
            classes = [answer["reuse"]["class"] for answer in warm]
            self.assertEqual(classes[:3], ["cold", "hit", "partial"])
            self.assertEqual(classes[4:], ["cold", "memo", "none"])
            self.assertEqual([a["reuse"]["restored"] for a in warm[:3]], [0, 60, 60])
            self.assertEqual(warm[6]["reuse"]["refusal"][:11], "the request")
            self.assertRegex(said, r"7 requests; 1 hits, [12] partial, [23] cold, 1 repeated, 1 wi")

    # They are the model's own: those of the letters among its log-probabilities.
    def test_probabilities_are_the_models(self):
        prompt = list(range(1, 31))
        answers, _ = self.choose(HYBRID, [{"tokens": prompt, "state_len": 20, "options": [4]}])
        scores = []
        for letter in LETTERS:
            tokens = ",".join(map(str, [*prompt, letter]))
            scores.append(run_json(*tiny("score", HYBRID, "--tokens", tokens))["logprobs"][-1])
        total = sum(map(math.exp, scores))
        for got, score in zip(answers[0]["probabilities"][0], scores, strict=True):
            self.assertAlmostEqual(got, math.exp(score) / total, places=5)

    def test_texts(self):
        requests = [
            {"state": "The page says many things.", "suffix": f" Q{i}?", "options": [2]}
            for i in range(2)
        ]
        answers, _ = self.choose(TALKER, requests)
        self.assertEqual([a["reuse"]["class"] for a in answers], ["cold", "hit"])

    def test_wrong_requests_do_not_stop_the_others(self):
        base = {"tokens": list(range(1, 31)), "state_len": 20, "options": [4]}
        wrong = [
            ({**base, "options": [5]}, "options must be 1 to 4, the letters, but got 5"),
            ({**base, "options": []}, "options must be one count for each of 1 slots"),
            ({**base, "slots": [30]}, "slots must be positions of the 30 tokens"),
            ({**base, "slots": [-31]}, "but one is -31"),
            ({**base, "state_len": 31}, "state_len must be in [0, 30] but got 31"),
            ({**base, "state": [1], "suffix": [2]}, "either tokens with state_len, or state"),
            ({"state": [1, 2], "options": [2]}, "either tokens with state_len, or state"),
            ({**base, "route": 2}, "route 2 must be loaded but the model has []"),
            ({**base, "tokens": [1, 99999]}, "ids must be in [0, "),
            ({**base, "question": 1}, 'the key "question" is not known; there are id, tokens'),
        ]
        answers, said = self.choose(TALKER, [base, *(request for request, _ in wrong)])
        self.assertIn("probabilities", answers[0])
        for answer, (_, text) in zip(answers[1:], wrong, strict=True):
            self.assertIn(text, answer["error"])
        self.assertIn("11 requests, 10 in error", said)

    def test_wrong_usage(self):
        (self.place / "in.jsonl").write_text("")
        run(*self.arguments(TALKER, "--letters", "1,2"), check=0)
        self.assertEqual((self.place / "out.jsonl").read_text(), "")
        self.assert_error(2, *self.arguments(TALKER, "--cache", "concat"), text="of its own")
        self.assert_error(2, *self.arguments(TALKER, "--prefix-cache-mb", "-1"), text="between 0")
        self.assert_error(1, *self.arguments(HYBRID), text="--letters")
        self.assert_error(2, *self.arguments(TALKER, "--letters", "a"), text="--letters must be")


if __name__ == "__main__":
    unittest.main()
