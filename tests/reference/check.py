"""Makes the reference numbers anew and compares them with the committed ones.

usage: check.py [SMOLLM2.gguf]     (without it SmolLM2 is left out, and it says so)

Exit status 0 if all agree, 1 if something differs, 2 if the versions are not
those of requirements.txt.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import byte_tokenizer
import hybrid_gguf
import make_models
import make_smollm2
from comparison import (
    SMOLLM2_TOLERANCE,
    TINY_TOLERANCE,
    differences,
    up_to_first_unclear,
)
from gguf_export import as_stored
from tiny_models import MODELS, TinyModel

HERE = Path(__file__).resolve().parent
MOST_LINES = 20  # of differences shown for each file


def wrong_versions() -> list[str]:
    wrong = []
    for line in (HERE / "requirements.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, wanted = line.split("==")
        try:
            found = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != wanted:
            wrong.append(f"{name} must be {wanted} but is {found}")
    return wrong


def report(what: str, lines: list[str]) -> bool:
    print(f"{what}: {'same' if not lines else f'{len(lines)} differences'}")
    for line in lines[:MOST_LINES]:
        print(f"  {line}")
    return not lines


def committed_prompts(data: dict) -> dict:
    return {p["name"]: p["tokens"] for p in data["prompts"]}


def check_files(model: TinyModel, made: Path) -> list[str]:
    """Configurations and weights must be the same bytes."""
    folder = make_models.DATA / model.name
    ours = {f.name for f in folder.iterdir() if "expected" not in f.name}
    if model.hybrid:  # llama.cpp's converter is not at hand
        ours.remove("model.gguf")
    theirs = {f.name for f in made.iterdir()}
    if ours != theirs:
        return [f"files {sorted(ours)} but now {sorted(theirs)}"]
    return [
        f"{name}: other bytes"
        for name in sorted(ours)
        if (folder / name).read_bytes() != (made / name).read_bytes()
    ]


def check_tiny(model: TinyModel, scratch: Path) -> bool:
    folder = make_models.DATA / model.name
    made = scratch / model.name
    weights = make_models.write_folder(model, made)
    same = report(f"{model.name}, files", check_files(model, made))

    def compare(file: str, loaded) -> bool:
        ours = json.loads((folder / file).read_text())
        theirs = make_models.numbers(model, loaded, committed_prompts(ours))
        return report(
            f"{model.name}, {file}", differences(ours, theirs, TINY_TOLERANCE)
        )

    same &= compare("expected.json", make_models.load(folder))
    if model.hybrid:
        found = hybrid_gguf.differences(folder, model.text, weights)
        same &= report(f"{model.name}, model.gguf", found)
    elif model.gguf:
        make_models.check_gguf(folder, "model.gguf", weights)
    if model.name == make_models.Q8_MODEL:
        rounded = as_stored(weights, "Q8_0")
        make_models.check_gguf(folder, "model-q8_0.gguf", rounded)
        same &= compare(
            "expected-q8_0.json", make_models.load_with(folder, rounded)
        )
    if model.byte_tokenizer:
        ours = json.loads((folder / "tokenizer_expected.json").read_text())
        theirs = byte_tokenizer.tokenizer_numbers(folder)
        same &= report(f"{model.name}, tokenizer", differences(ours, theirs, 0))
    return same


def check_smollm2(path: str) -> bool:
    ours = json.loads((make_models.DATA / "smollm2.json").read_text())
    theirs = make_smollm2.numbers(path)
    for a, b in zip(ours["prompts"], theirs["prompts"]):
        up_to_first_unclear(a["greedy"], b["greedy"], ours["clear_margin"])
    for data in (ours, theirs):
        del data["unclear_steps"]  # depends on where texts part
    return report("smollm2.json", differences(ours, theirs, SMOLLM2_TOLERANCE))


def main() -> int:
    if len(sys.argv) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    if wrong := wrong_versions():
        print("check.py: error: " + "; ".join(wrong), file=sys.stderr)
        return 2
    make_models.prepare()
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        for model in MODELS:
            same &= check_tiny(model, Path(scratch))
    if len(sys.argv) == 2:
        same &= check_smollm2(sys.argv[1])
    else:
        print("smollm2.json: left out, no GGUF file named")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
