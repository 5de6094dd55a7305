"""Markdown."""


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join(["---"] * len(header)) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """Three figures at least, and no more than can be trusted."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ranged(spread: dict | None) -> str:
    if spread is None:
        return "-"
    median, least, most = (number(spread[key]) for key in ("median", "min", "max"))
    return f"{median} ({least} to {most})"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"
