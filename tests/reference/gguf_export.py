"""Writes a tiny model as GGUF in the layout of llama.cpp's converter."""

import gguf
import numpy as np
import torch

LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GPT2_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    layer, part = stem.split(".", 2)[2].split(".", 1)
    return f"blk.{layer}.{(LLAMA_NAMES | GPT2_NAMES)[part]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from halves (i, i + D/2) to neighbours (2i, 2i + 1), as
    convert_hf_to_gguf.py does for llama. `heads` is that of the tensor itself."""
    half = weight.shape[0] // heads // 2
    parts = weight.reshape(heads, 2, half, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def to_gguf_layout(config: dict, name: str, weight: torch.Tensor) -> np.ndarray:
    array = weight.numpy()
    if config["model_type"] == "gpt2" and array.ndim == 2 and ".h." in name:
        return np.ascontiguousarray(array.T)  # gpt2 stores [in, out]
    if config["model_type"] == "llama" and ".q_proj." in name:
        return permute(array, config["num_attention_heads"])
    if config["model_type"] == "llama" and ".k_proj." in name:
        return permute(array, config["num_key_value_heads"])
    return array


def rope_factors(config: dict) -> np.ndarray:
    """What llama.cpp divides the frequencies by (llama3 scaling); it is a tensor
    in the file, and no key says that the model is scaled."""
    scaling = config["rope_scaling"]
    dims = config["hidden_size"] // config["num_attention_heads"]
    original = scaling["original_max_position_embeddings"]
    low = original / scaling["low_freq_factor"]
    high = original / scaling["high_freq_factor"]
    factors = []
    for i in range(0, dims, 2):
        length = 2 * np.pi * config["rope_theta"] ** (i / dims)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / length - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _add_metadata(writer: gguf.GGUFWriter, config: dict) -> None:
    def of(*keys):
        return next(config[k] for k in keys if k in config)

    heads = of("num_attention_heads", "n_head")
    width = of("hidden_size", "n_embd")
    writer.add_context_length(of("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(width)
    writer.add_block_count(of("num_hidden_layers", "n_layer"))
    writer.add_head_count(heads)
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gpt2":
        writer.add_feed_forward_length(4 * width)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(width // heads)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    writer.add_token_merges(tokenizer["merges"])
    writer.add_bos_token_id(tokenizer["bos"])
    writer.add_eos_token_id(tokenizer["eos"])
    writer.add_eot_token_id(tokenizer["eot"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer["chat_template"])


def write_gguf(path, config: dict, weights: dict, kind: str, tokenizer=None) -> None:
    """Matrices in `kind` (F32, F16, BF16, Q8_0), everything else in F32."""
    kind = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_name(f"tiny {config['model_type']}")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}" if kind else "ALL_F32"])
    _add_metadata(writer, config)
    if tokenizer:
        _add_tokenizer(writer, tokenizer)
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    for name, weight in weights.items():
        array = to_gguf_layout(config, name, weight)
        used = kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        if name == "transformer.wpe.weight":  # the converter keeps it in F32
            used = gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            gguf_name(name), gguf.quants.quantize(array, used), raw_dtype=used
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_stored(weights: dict, kind: str) -> dict:
    """The weights as they come out of the file again, in float32."""
    kind = gguf.GGMLQuantizationType[kind]
    if kind == gguf.GGMLQuantizationType.F32:
        return weights
    return {
        name: weight
        if weight.dim() == 1
        else torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        )
        for name, weight in weights.items()
    }
