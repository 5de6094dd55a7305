"""Beam search with end tokens as transformers' generate() does it, over tiny models.

usage: make_beams.py     (writes data/beams.json beside this file)

Needs the packages of tests/reference/requirements.txt. A case is kept only if
float32 and float64 weights give the same beams, so that rounding decides nothing.
"""

import json
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
MODELS = HERE.parents[1] / "reference" / "data"
NEW_TOKENS = 12
PROMPTS = 3
CHOICES = [  # beams, end tokens, length penalty, early stopping
    (3, [21], 1.0, False),
    (3, [21], 1.0, True),
    (3, [21], 1.0, "never"),
    (4, [12, 21, 55], 0.0, False),
    (4, [12, 21, 55], 2.0, "never"),
    (2, [9], -1.0, False),
    (5, [7, 22], 0.5, True),
]


@torch.no_grad()
def search(model, prompt: list, choice: tuple) -> list:
    beams, ends, penalty, early = choice
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=NEW_TOKENS,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    results = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        new = row[len(prompt) :]
        stop = next((i for i, t in enumerate(new) if t in ends), None)
        if stop is not None:
            new = new[: stop + 1]
        results.append({"tokens": new, "score": float(f"{score:.9g}"), "ended": stop is not None})
    return results


def cases_of(name: str) -> list:
    folder = MODELS / name
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.float64)
    ]
    generator = torch.Generator().manual_seed(1)
    cases = []
    for choice in CHOICES:
        for _ in range(PROMPTS):
            length = int(torch.randint(1, 9, (1,), generator=generator))
            prompt = torch.randint(3, 64, (length,), generator=generator).tolist()
            narrow, wide = (search(model, prompt, choice) for model in models)
            if [b["tokens"] for b in narrow] != [b["tokens"] for b in wide]:
                continue
            beams, ends, penalty, early = choice
            cases.append(
                {
                    "model": name,
                    "prompt": prompt,
                    "beams": beams,
                    "ends": ends,
                    "length_penalty": penalty,
                    "early_stopping": str(early).lower(),
                    "new_tokens": NEW_TOKENS,
                    "results": narrow,
                }
            )
    return cases


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = [case for name in ("llama", "gpt2", "qwen3") for case in cases_of(name)]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (HERE / "data" / "beams.json").write_text(f"[\n{lines}\n]\n")
    ended = sum(beam["ended"] for case in cases for beam in case["results"])
    print(f"{len(cases)} cases, {ended} beams ended by a token")


if __name__ == "__main__":
    main()
