"""LoRA adapters as the program's users meet them."""

import json
import shutil
import tempfile
import unittest
from pathlib import Path

from program import DATA, HYBRID, LLAMA, TALKER, ProgramTest, run, run_json, tiny

ADAPTERS = DATA / "adapters"
ALL, UPPER = ADAPTERS / "talker_all", ADAPTERS / "talker_upper"
BOTH = ("--adapter", f"all={ALL}", "--adapter", f"up={UPPER}")
PROMPT = [i * 7 % 61 + 1 for i in range(30)]
SAME = ("tokens", "text", "logprobs", "finish_reason")


def ids(tokens):
    return ",".join(map(str, tokens))


class AdapterTest(ProgramTest):
    def setUp(self):
        self.place = Path(tempfile.mkdtemp(prefix="kvcache-adapter-"))
        self.addCleanup(shutil.rmtree, self.place)

    def answers(self, command, model, requests, *more):
        given, output = self.place / "in.jsonl", self.place / "out.jsonl"
        given.write_text("".join(json.dumps(r) + "\n" for r in requests))
        run(*tiny(command, model, "--requests", given, "--output", output, *more), check=0)
        return [json.loads(line) for line in output.read_text().splitlines()]

    # The numbers of PEFT.
    def test_scores_are_pefts(self):
        for name, model in (("talker_all", TALKER), ("talker_upper", TALKER),
                            ("llama_all", LLAMA), ("qwen3_5_all", HYBRID)):  # fmt: skip
            expected = json.loads((ADAPTERS / name / "expected.json").read_text())
            base = tiny("score", model, "--tokens", ids(expected["tokens"]))
            got = run_json(*base, "--adapter", f"x={ADAPTERS / name}")["logprobs"]
            for ours, theirs in zip(got, expected["log_probs"], strict=True):
                self.assertAlmostEqual(ours, theirs, delta=1e-4)
            self.assertNotEqual(run_json(*base)["logprobs"], got)

    # The only one runs, of several none, and --route decides.
    def test_which_one_runs(self):
        base = tiny("generate", TALKER, "--tokens", ids(PROMPT), "--max-new-tokens", "6")
        plain = run_json(*base)
        one = run_json(*base, "--adapter", f"all={ALL}")
        self.assertNotEqual(one["logprobs"], plain["logprobs"])
        for more, wanted in (
            ((*BOTH,), plain),
            ((*BOTH, "--route", "all"), one),
            (("--adapter", f"all={ALL}", "--route", ""), plain),
            ((*BOTH, "--route", "all", "--adapter-from", "99"), plain),
            ((*BOTH, "--route", "all", "--cache", "none"), one),
            ((*BOTH, "--route", "all", "--cache", "window"), one),
            ((*BOTH, "--route", "all", "--cache", "window", "--steps-per-replay", "3"), one),
        ):
            got = run_json(*base, *more)
            for key in SAME:
                self.assertEqual(got[key], wanted[key], more)

    def test_verify(self):
        got = run_json(*tiny("verify", TALKER, "--tokens", ids(PROMPT), "--adapter", f"a={ALL}"))
        self.assertTrue(got["identical"])

    # Requests of all routes at the same time are those alone; what one left is
    # nothing to another, but the tokens before an adapter are everybody's.
    def test_routes_of_a_batch(self):
        routes = [
            {}, {"route": "all"}, {"route": "up"}, {"route": "all"}, {"route": ""},
            {"route": "all", "adapter_from": 20}, {"route": "up", "adapter_from": 20},
        ]  # fmt: skip
        requests = [{"tokens": PROMPT, "max_new_tokens": 5, **route} for route in routes]
        alone = []
        for route in routes:
            more = ("--route", route.get("route", ""), "--adapter-from",
                    route.get("adapter_from", 0))  # fmt: skip
            alone.append(run_json(*tiny("generate", TALKER, "--tokens", ids(PROMPT),
                                        "--max-new-tokens", "5", *BOTH, *more)))  # fmt: skip
        prefix = ("--prefix-cache-mb", "8")
        for more in (("--slots", "7"), ("--slots", "3", "--cache", "window"),
                     ("--slots", "1", *prefix)):  # fmt: skip
            got = self.answers("batch", TALKER, requests, *BOTH, *more)
            for answer, wanted in zip(got, alone, strict=True):
                for key in SAME:
                    self.assertEqual(answer[key], wanted[key], (more, answer["id"]))
        restored = [answer["reuse"]["restored"] for answer in got]
        self.assertEqual(restored, [0, 0, 0, 30, 30, 20, 20])

    # A folder knows an adapter by what it is, not by its name.
    def test_saved_texts(self):
        request = [{"tokens": PROMPT, "max_new_tokens": 3, "route": "x"}]
        kept = ("--prefix-cache-mb", "8", "--prefix-dir", self.place / "kept")
        for adapter, restored in ((ALL, 0), (UPPER, 0), (ALL, 30)):
            got = self.answers("batch", TALKER, request, "--adapter", f"x={adapter}", *kept)
            self.assertEqual(got[0]["reuse"]["restored"], restored)

    # As routes of one runner (none changes the lowest layer), or each alone.
    def test_choices(self):
        letters = (7, 3, 12, 60)
        base = {"tokens": [*PROMPT, 4, 5], "state_len": 30, "options": [4]}
        routes = [None, "up", "other", "up", 2, ""]
        requests = [{**base, **({} if route is None else {"route": route})} for route in routes]
        for other in (UPPER, ALL):
            named = ("--adapter", f"up={UPPER}", "--adapter", f"other={other}")
            got = self.answers("choose", TALKER, requests, "--letters", ids(letters), *named)
            cold = self.answers("choose", TALKER, requests, "--letters", ids(letters), *named,
                                "--prefix-cache-mb", "0")  # fmt: skip
            for answer, plain in zip(got, cold, strict=True):
                self.assertEqual(answer["probabilities"], plain["probabilities"])
            self.assertEqual([a["route"] for a in got],
                             [None, "up", "other", "up", "other", None])  # fmt: skip
            classes = [a["reuse"]["class"] for a in got]
            self.assertEqual(classes, ["cold", "cold", "cold", "memo", "memo", "hit"])
            scores = []
            for letter in letters:
                tokens = ids([*base["tokens"], letter])
                scored = run_json(*tiny("score", TALKER, "--tokens", tokens, *named,
                                        "--route", "other"))  # fmt: skip
                scores.append(scored["logprobs"][-1])
            order = sorted(range(4), key=lambda i: -scores[i])
            found = got[2]["probabilities"][0]
            self.assertEqual(order, sorted(range(4), key=lambda i: -found[i]))

    def test_wrong_requests_do_not_stop_the_others(self):
        requests = [{"tokens": PROMPT, "max_new_tokens": 2, **more}
                    for more in ({"route": "it"}, {"route": "all"})]  # fmt: skip
        got = self.answers("batch", TALKER, requests, *BOTH)
        self.assertIn("(all, up) but got it", got[0]["error"])
        self.assertIn("tokens", got[1])
        requests = [{"tokens": PROMPT, "state_len": 20, "options": [2], **more}
                    for more in ({"route": "it"}, {"route": "up"})]  # fmt: skip
        got = self.answers("choose", TALKER, requests, "--letters", "1,2", *BOTH)
        self.assertIn("(all, up) but got it", got[0]["error"])
        self.assertIn("probabilities", got[1])

    def test_wrong_usage(self):
        base = tiny("score", TALKER, "--tokens", "1,2")
        for more, text in (
            (("--adapter", "x"), "must be NAME=FOLDER but got x"),
            (("--adapter", "=x"), "must be NAME=FOLDER"),
            ((*BOTH, "--adapter", "up=x"), "--adapter up is given twice"),
            ((*BOTH, "--route", "it"), "no --adapter has that name"),
            ((*BOTH, "--adapter-from", "-1"), "--adapter-from must be at least 0"),
        ):
            self.assert_error(2, *base, *more, text=(text,))
        for command in ("batch", "choose"):  # where the only one does not run by itself
            said = " ".join(run(command, "--help", check=0)[1].decode().split())
            self.assertIn("of requests that name none; default: none", said)
        for folder, text in ((self.place, "must have adapter_config.json"),
                             (ADAPTERS / "gpt2_all", "target_modules")):  # fmt: skip
            self.assert_error(1, *base, "--adapter", f"x={folder}", text=(text,))


if __name__ == "__main__":
    unittest.main()
