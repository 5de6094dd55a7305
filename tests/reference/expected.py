"""Numbers of one model in one folder: logits, log-probabilities, greedy, beams."""

import json

import torch

NEW_TOKENS = 32
BEAMS = 3
BEAM_NEW_TOKENS = 10
# Prompts are drawn until nothing in their continuation hangs on rounding.
MIN_MARGIN = 0.02
MIN_BEAM_GAP = 0.01
MIN_DISTINCT = 4
# Cached and stateless runs sum in different orders; closer logits are a tie.
TIE_MARGIN = 1e-3


@torch.no_grad()
def all_logits(model, tokens) -> torch.Tensor:
    """[T, vocabulary] float32, one forward over everything, no cache."""
    out = model(torch.tensor([tokens]), use_cache=False)
    return out.logits[0].float()


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double(), dim=-1)


def greedy(model, tokens, count: int) -> dict:
    """Greedy tokens (end tokens are tokens like any other) from transformers'
    generate(); log-probabilities and margins from one forward over all."""
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    chosen = out[len(tokens) :]
    if len(chosen) != count:
        raise RuntimeError(f"generate() gave {len(chosen)} tokens, not {count}")
    return follow(model, tokens, chosen)


def follow(model, tokens, chosen: list[int]) -> dict:
    """The numbers along given continuation `chosen`, which must be greedy except
    where two logits are as good as equal."""
    logits = all_logits(model, tokens + chosen)[len(tokens) - 1 : -1]
    top = logits.topk(2, dim=-1).values
    logp = log_probs(logits)
    margins = (top[:, 0] - top[:, 1]).tolist()
    differs = [i for i, t in enumerate(logits.argmax(-1).tolist()) if t != chosen[i]]
    if any(margins[i] > TIE_MARGIN for i in differs):
        raise RuntimeError(f"cached and stateless greedy differ at {differs}")
    return {
        "tokens": chosen,
        "log_probs": [logp[i, t].item() for i, t in enumerate(chosen)],
        "margins": margins,
    }


def numbers_of_prompt(model, name: str, tokens, positions, count=NEW_TOKENS) -> dict:
    logits = all_logits(model, tokens)
    logp = log_probs(logits)
    return {
        "name": name,
        "tokens": tokens,
        "log_probs": [logp[i, t].item() for i, t in enumerate(tokens[1:])],
        "logits": [
            {"position": p, "values": logits[p].tolist()}
            for p in sorted({*positions, len(tokens) - 1})
        ],
        "greedy": greedy(model, tokens, count),
    }


@torch.no_grad()
def memory_of_prompt(model, name: str, tokens, layer: int) -> dict:
    """What a layer of linear attention remembers after `tokens`: the state
    [value heads, key size, value size] and the last inputs of the convolution
    [channels, kernel - 1], newest last, before the convolution."""
    cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    taps = model.config.linear_conv_kernel_dim - 1
    conv = cache.get_conv_state(layer, state_idx=0)[0, :, -taps:]
    state = cache.get_recurrent_state(layer, state_idx=0)[0]
    return {
        "prompt": name,
        "layer": layer,
        "conv": conv.tolist(),
        "state": state.tolist(),
    }


def beam_search(model, tokens) -> tuple[list, float]:
    """Plain beam search without cache, end token or length penalty.

    Returns the beams, best first, and the smallest gap between two candidates
    whose order decides something."""
    beams, gap = [([], 0.0)], float("inf")
    for _ in range(BEAM_NEW_TOKENS):
        candidates = []
        for new, score in beams:
            logp = log_probs(all_logits(model, tokens + new)[-1])
            top = logp.topk(BEAMS + 1)
            candidates += [
                (new + [t], score + p)
                for p, t in zip(top.values.tolist(), top.indices.tolist())
            ]
        candidates.sort(key=lambda c: -c[1])
        beams = candidates[:BEAMS]
        for better, worse in zip(candidates[:BEAMS], candidates[1:]):
            gap = min(gap, better[1] - worse[1])
    return beams, gap


def beams_of_prompt(model, name: str, tokens) -> dict:
    """The same from transformers' generate(), which must agree."""
    beams, gap = beam_search(model, tokens)
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        max_new_tokens=BEAM_NEW_TOKENS,
        length_penalty=0.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    theirs = [row[len(tokens) :].tolist() for row in out.sequences]
    if theirs != [new for new, _ in beams]:
        raise RuntimeError(f"generate(num_beams={BEAMS}) differs from plain beams")
    for score, (_, ours) in zip(out.sequences_scores.tolist(), beams):
        if abs(score - ours) > 1e-3:
            raise RuntimeError(f"beam score {score} differs from {ours}")
    return {
        "prompt": name,
        "beams": BEAMS,
        "new_tokens": BEAM_NEW_TOKENS,
        "smallest_gap": gap,
        "results": [{"tokens": new, "score": score} for new, score in beams],
    }


def is_robust(entry: dict) -> bool:
    tokens, margins = entry["greedy"]["tokens"], entry["greedy"]["margins"]
    return min(margins) > MIN_MARGIN and len(set(tokens)) >= MIN_DISTINCT


def _rounded(value):
    """9 digits: enough to tell every float32 from its neighbours."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return value


def write_json(path, data: dict) -> None:
    """One line for each element of a top-level list, so that diffs stay small."""
    data, lines = _rounded(data), []
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            inner = ",\n".join(json.dumps(v, separators=(",", ":")) for v in value)
            lines.append(f"{json.dumps(key)}: [\n{inner}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
