"""Turns the hybrid tiny models into GGUF with llama.cpp's own converter.

usage: hybrid_gguf.py LLAMA_CPP [FOLDER]     (default: data/ beside this file)

LLAMA_CPP is a folder with llama.cpp's sources; README.md says which were used.
The models have no tokenizer, so the step that reads one is left out.
"""

import sys
from pathlib import Path

import numpy as np
import torch

OUTPUT_TYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
PARTS = {
    "attn_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# -exp(A_log) by another exp than the converter's.
DECAY_TOLERANCE = 1e-6


def convert(folder: Path, kind: str, drafts: bool) -> None:
    import convert_hf_to_gguf
    from conversion.qwen import Qwen3_5TextModel

    Qwen3_5TextModel.set_vocab = Qwen3_5TextModel._set_vocab_none
    out = str(folder / "model.gguf")
    sys.argv = ["", str(folder), "--outfile", out, "--outtype", OUTPUT_TYPE[kind]]
    Qwen3_5TextModel.no_mtp = False  # what the last call left
    if not drafts:
        sys.argv.append("--no-mtp")
    convert_hf_to_gguf.main()


def _own_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, layer, part = name.split(".", 2)
    if part == "ssm_a":
        return f"model.layers.{layer}.linear_attn.A_log"
    if part == "ssm_dt.bias":
        return f"model.layers.{layer}.linear_attn.dt_bias"
    stem, kind = part.rsplit(".", 1)
    return f"model.layers.{layer}.{PARTS[stem].removesuffix('.weight')}.{kind}"


def _grouped(config: dict, size: int) -> np.ndarray:
    """Where the value of each row of the value heads lies in the file."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each = values // keys
    heads = [(h % each) * keys + h // each for h in range(values)]
    return np.concatenate([np.arange(h * size, (h + 1) * size) for h in heads])


def _as_transformers(config: dict, name: str, array: np.ndarray) -> np.ndarray:
    """What transformers calls `name`, from what the file holds for it."""
    size = config["linear_value_head_dim"]
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith("A_log"):
        return np.log(-array[_grouped(config, 1)])
    if name.endswith("dt_bias") or "in_proj_a" in name or "in_proj_b" in name:
        return array[_grouped(config, 1)]
    if "in_proj_z" in name:
        return array[_grouped(config, size)]
    if "out_proj" in name:
        return array[:, _grouped(config, size)]
    if "in_proj_qkv" in name or "conv1d" in name:
        rows = first + _grouped(config, size)
        array = np.concatenate([array[:first], array[rows]])
        return array[:, None, :] if "conv1d" in name else array
    if "norm" in name and "linear_attn" not in name:
        return array - np.float32(1)
    return array


def differences(folder: Path, config: dict, weights: dict) -> list[str]:
    """Between model.gguf and the weights; one line each. Rounding apart: 1 + w
    does not give all of w back."""
    import gguf

    found, left = [], set(weights)
    own_layers = config["num_hidden_layers"]
    for tensor in gguf.GGUFReader(folder / "model.gguf").tensors:
        if tensor.name.startswith(f"blk.{own_layers}."):
            continue  # the layer that drafts
        name = _own_name(tensor.name)
        left.discard(name)
        stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        array = _as_transformers(config, name, stored)
        rounded = name.endswith("A_log") or "norm" in name
        tolerance = DECAY_TOLERANCE if rounded else 0.0
        if not torch.allclose(
            torch.from_numpy(np.array(array)),
            weights[name],
            rtol=0.0,
            atol=tolerance,
        ):
            found.append(f"{name} differs")
    return found + [f"{name} is missing" for name in sorted(left)]


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    from tiny_models import MODELS

    here = Path(__file__).resolve().parent
    sys.path.insert(0, sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else here / "data"
    for model in MODELS:
        if model.hybrid:
            convert(target / model.name, model.gguf, bool(model.beside))
    return 0


if __name__ == "__main__":
    sys.exit(main())
