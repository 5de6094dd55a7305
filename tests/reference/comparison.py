"""Compares numbers made anew with the committed ones."""

# float32 sums in another order (another CPU): two or three layers of width 32.
TINY_TOLERANCE = 1e-4
# The same over 30 layers of width 576 and up to 700 tokens.
SMOLLM2_TOLERANCE = 5e-4


def differences(ours, theirs, tolerance: float, path: str = "") -> list[str]:
    """One line for each place where the two differ; `ours` is committed."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: keys {sorted(ours)} but now {sorted(theirs)}"]
        return [
            line
            for key in ours
            for line in differences(ours[key], theirs[key], tolerance, f"{path}.{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} elements but now {len(theirs)}"]
        return [
            line
            for i, (a, b) in enumerate(zip(ours, theirs))
            for line in differences(a, b, tolerance, f"{path}[{i}]")
        ]
    if isinstance(ours, float) or isinstance(theirs, float):
        close = abs(ours - theirs) <= tolerance  # false for NaN
        return [] if close else [f"{path}: {ours} but now {theirs}"]
    return [] if ours == theirs else [f"{path}: {ours!r} but now {theirs!r}"]


def up_to_first_unclear(ours: dict, theirs: dict, clear_margin: float) -> None:
    """Cuts two greedy continuations, in place, where they part, if the margin
    there was too small to count; what follows has nothing in common."""
    pairs = zip(ours["tokens"], theirs["tokens"])
    for i, (a, b) in enumerate(pairs):
        if a != b:
            if ours["margins"][i] <= clear_margin:
                for side in (ours, theirs):
                    side.pop("text", None)
                    for key in ("tokens", "log_probs", "margins"):
                        del side[key][i:]
            return
