"""Makes low-rank adapters of the tiny models and what PEFT computes with them.

usage: make_adapters.py [FOLDER]     (default: data/adapters beside this file)

Each is a folder as PEFT writes it, with `expected.json`: the prompt, and the
log-probabilities and last logits of the model with the adapter. Needs peft
beside requirements.txt.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import peft
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import expected
import make_models
from tiny_models import MODELS, _uniform

DATA = make_models.DATA / "adapters"
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LENGTH = 17  # of the prompt: that of the model's own numbers
HALF_WIDTH = 0.35  # of A and B: logits move by about 1


@dataclass(frozen=True)
class TinyAdapter:
    name: str
    model: str
    lora: dict = field(default_factory=dict)


ADAPTERS = [
    TinyAdapter("llama_all", "llama", dict(r=4, lora_alpha=8, target_modules=LLAMA)),
    TinyAdapter(
        "llama_upper",
        "llama",
        dict(r=2, lora_alpha=3, use_rslora=True, layers_to_transform=[1],
             target_modules=["q_proj", "v_proj"]),
    ),
    TinyAdapter(
        "gpt2_all",
        "gpt2",
        dict(r=3, lora_alpha=6, target_modules=["c_attn", "c_proj", "c_fc"],
             fan_in_fan_out=True),
    ),
    TinyAdapter("qwen3_all", "qwen3", dict(r=5, lora_alpha=5, target_modules=LLAMA)),
    TinyAdapter(
        "qwen3_5_all", "qwen3_5", dict(r=3, lora_alpha=6, target_modules=LLAMA + DELTA)
    ),
    # Of the model with a tokenizer: the program's.
    TinyAdapter(
        "talker_all", "llama_rope3", dict(r=2, lora_alpha=4, target_modules=LLAMA)
    ),
    TinyAdapter(
        "talker_upper",
        "llama_rope3",
        dict(r=2, lora_alpha=4, layers_to_transform=[1, 2],
             target_modules=["q_proj", "o_proj", "down_proj"]),
    ),
]  # fmt: skip


def fill(model, adapter: TinyAdapter) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            seed = f"{adapter.name}/{name}"
            values = _uniform(seed, parameter.shape, HALF_WIDTH)
            parameter.data.copy_(values)


def tidy(folder: Path) -> None:
    """The same bytes on every machine, and no path of this one."""
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["base_model_name_or_path"] = None
    config["target_modules"] = sorted(config["target_modules"])
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def make(adapter: TinyAdapter, folder: Path) -> None:
    base = make_models.load(make_models.DATA / adapter.model)
    numbers = json.loads((make_models.DATA / adapter.model / "expected.json").read_text())
    tokens = next(
        p["tokens"] for p in numbers["prompts"] if len(p["tokens"]) >= LENGTH
    )
    config = LoraConfig(task_type="CAUSAL_LM", **adapter.lora)
    model = get_peft_model(base, config).eval()
    fill(model, adapter)
    model.save_pretrained(folder)
    tidy(folder)
    logits = expected.all_logits(model, tokens)
    with model.disable_adapter():
        moved = (logits - expected.all_logits(model, tokens)).abs().max().item()
    if moved < 0.1:
        raise RuntimeError(f"{adapter.name} moves logits by {moved} only")
    logp = expected.log_probs(logits)
    expected.write_json(
        folder / "expected.json",
        {
            "adapter": adapter.name,
            "model": adapter.model,
            "peft": peft.__version__,
            "tokens": tokens,
            "log_probs": [logp[i, t].item() for i, t in enumerate(tokens[1:])],
            "last_logits": logits[-1].tolist(),
        },
    )
    print(f"{adapter.name}: logits move by up to {moved:.2f}")


def main() -> None:
    make_models.prepare()
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    for adapter in ADAPTERS:
        make(adapter, target / adapter.name)
    assert {a.model for a in ADAPTERS} <= {m.name for m in MODELS}


if __name__ == "__main__":
    main()
