"""Makes the tiny models of each family and what transformers computes with them.

usage: make_models.py [FOLDER]     (default: data/ beside this file)
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import byte_tokenizer
import expected
from gguf_export import as_stored, write_gguf
from tiny_models import MODELS, TinyModel, make_weights

DATA = Path(__file__).resolve().parent / "data"
Q8_MODEL = "llama"  # also written as Q8_0, with numbers of its own
BATCHES = [[0, -1], [1, 3, -1], [-1, 2, 0, -1]]  # prompts by index


def prepare() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def write_folder(model: TinyModel, folder: Path) -> dict:
    """Everything but the numbers. Returns the weights in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps(model.generation, indent=2) + "\n"
    )
    config = AutoConfig.for_model(**model.config)
    skeleton = AutoModelForCausalLM.from_config(config)
    shapes = {n: p.shape for n, p in skeleton.named_parameters()}
    weights = make_weights(model, shapes)
    _write_safetensors(model, folder, weights | make_weights(model, model.beside))
    tokenizer = None
    if model.byte_tokenizer:
        tokenizer = byte_tokenizer.make_tokenizer()
        byte_tokenizer.write_tokenizer(folder, tokenizer)
    if model.gguf and not model.hybrid:
        write_gguf(folder / "model.gguf", model.config, weights, model.gguf, tokenizer)
    if model.name == Q8_MODEL:
        write_gguf(folder / "model-q8_0.gguf", model.config, weights, "Q8_0")
    return weights


def _save(tensors: dict, path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _write_safetensors(model: TinyModel, folder: Path, weights: dict) -> None:
    stored = {
        n if n in model.beside else n.replace("model.", model.root, 1): w.to(
            model.stored
        ).contiguous()
        for n, w in weights.items()
    }
    if model.shards == 1:
        _save(stored, folder / "model.safetensors")
        return
    names, place = sorted(stored), {}
    for i in range(model.shards):
        file = f"model-{i + 1:05}-of-{model.shards:05}.safetensors"
        part = names[i :: model.shards]  # a layer's tensors lie in several shards
        _save({n: stored[n] for n in part}, folder / file)
        place |= {n: file for n in part}
    size = sum(w.numel() * w.element_size() for w in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1) + "\n"
    )


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def load_with(folder: Path, weights: dict):
    """The model of a folder with other weights."""
    model = load(folder)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or any("lm_head" not in name for name in missing):
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    return model


def _draw_prompt(model: TinyModel, length: int, attempt: int) -> list[int]:
    seed = zlib.crc32(f"{model.name}/prompt/{length}/{attempt}".encode())
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.integers(0, model.text["vocab_size"], size=length).tolist()


def draw_prompts(model: TinyModel, loaded) -> dict:
    """Prompts by name whose continuation does not hang on rounding."""
    prompts = {}
    for length in model.lengths:
        name = f"length_{length}"
        for attempt in range(1000):
            tokens = _draw_prompt(model, length, attempt)
            entry = expected.numbers_of_prompt(loaded, name, tokens, ())
            if not expected.is_robust(entry):
                continue
            if model.beam and length == 5:
                gap = expected.beam_search(loaded, tokens)[1]
                if gap < expected.MIN_BEAM_GAP:
                    continue
            prompts[name] = tokens
            break
        else:
            raise RuntimeError(f"{model.name}: no robust prompt of length {length}")
    return prompts


def numbers(model: TinyModel, loaded, prompts: dict) -> dict:
    """The content of expected.json (README.md describes it)."""
    longest = max(prompts, key=lambda n: len(prompts[n]))
    names = list(prompts)
    result = {
        "model": model.name,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "prompts": [
            expected.numbers_of_prompt(
                loaded, n, t, model.positions if n == longest else ()
            )
            for n, t in prompts.items()
        ],
        "batches": [[names[i] for i in batch] for batch in BATCHES],
    }
    if model.beam:
        result["beam"] = [
            expected.beams_of_prompt(loaded, "length_5", prompts["length_5"])
        ]
    if model.hybrid:
        types = loaded.config.layer_types
        layer = max(i for i, t in enumerate(types) if t == "linear_attention")
        result["memory"] = [
            expected.memory_of_prompt(loaded, n, prompts[n], layer)
            for n in ("length_2", "length_17")
        ]
    return result


def check_gguf(folder: Path, file: str, weights: dict) -> None:
    """transformers' own GGUF reader must give the same weights. (What it makes of
    the metadata is not asked: it drops llama's biases and gpt2's sizes.)"""
    config = AutoConfig.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, config=config
    )
    for name, value in loaded.state_dict().items():
        if name in weights and not torch.equal(value, weights[name]):
            raise RuntimeError(f"{folder / file}: {name} differs")


def make(model: TinyModel, folder: Path) -> None:
    weights = write_folder(model, folder)
    loaded = load(folder)
    for name, value in loaded.state_dict().items():
        if name in weights and not torch.equal(value, weights[name]):
            raise RuntimeError(f"{folder}: {name} was not loaded")
    prompts = draw_prompts(model, loaded)
    expected.write_json(folder / "expected.json", numbers(model, loaded, prompts))
    if model.byte_tokenizer:
        expected.write_json(
            folder / "tokenizer_expected.json", byte_tokenizer.tokenizer_numbers(folder)
        )
    if model.hybrid:
        print(f"{model.name}: hybrid_gguf.py makes its GGUF")
    elif model.gguf:
        check_gguf(folder, "model.gguf", weights)
    if model.name == Q8_MODEL:
        rounded = as_stored(weights, "Q8_0")
        check_gguf(folder, "model-q8_0.gguf", rounded)
        other = load_with(folder, rounded)
        prompts = draw_prompts(model, other)
        expected.write_json(
            folder / "expected-q8_0.json", numbers(model, other, prompts)
        )


def main() -> None:
    prepare()
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    for model in MODELS:
        make(model, target / model.name)
        size = sum(f.stat().st_size for f in (target / model.name).iterdir())
        print(f"{model.name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
