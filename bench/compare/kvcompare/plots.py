"""Line plots as SVG: nothing but text, the same for the same numbers."""

import math
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 200, 36, 48  # margins; the legend is on the right
# Okabe and Ito: told apart by people who see colours differently.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
DASHES = ["", "6 3", "2 3"]  # when the colours are used up
TICKS = 6  # about


def ticks(least: float, most: float) -> list[float]:
    """Round numbers from `least` or below to `most` or above."""
    span = most - least or abs(most) or 1.0
    rough = span / TICKS
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * (1 - 1e-9))
    first, last = math.floor(least / step), math.ceil(most / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def label(value: float) -> str:
    return f"{value:g}"


class Axes:
    """Where values stand; both axes begin at a tick."""

    def __init__(self, series: dict[str, list[tuple[float, float]]]):
        points = [point for line in series.values() for point in line]
        self.x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points))
        self.y_ticks = ticks(0.0, max(y for _, y in points))  # from 0: no exaggeration

    def x(self, value: float) -> float:
        first, last = self.x_ticks[0], self.x_ticks[-1]
        return LEFT + (value - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        first, last = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (value - first) / (last - first) * (HEIGHT - TOP - BOTTOM)


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(content)}</text>'


def grid(axes: Axes) -> list[str]:
    parts = []
    for value in axes.x_ticks:
        x = axes.x(value)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(text(x, HEIGHT - BOTTOM + 16, label(value), 'text-anchor="middle"'))
    for value in axes.y_ticks:
        y = axes.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y + 4, label(value), 'text-anchor="end"'))
    return parts


def curve(axes: Axes, index: int, name: str, points: list[tuple[float, float]]) -> list[str]:
    colour = COLOURS[index % len(COLOURS)]
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    path = "M" + "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in sorted(points))
    y = TOP + 8 + 18 * index
    x = WIDTH - RIGHT + 12
    parts = [f'<path d="{path}" {style}/>', f'<path d="M{x} {y}h24" {style}/>']
    if len(points) <= 20:  # else they hide the line
        parts += [
            f'<circle cx="{axes.x(px):.1f}" cy="{axes.y(py):.1f}" r="3" fill="{colour}"/>'
            for px, py in points
        ]
    return parts + [text(x + 30, y + 4, name)]


def line_plot(title: str, x_name: str, y_name: str, series: dict) -> str:
    """`series`: name -> [(x, y), ...], at least one point in all."""
    axes = Axes(series)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, title, 'font-size="14" font-weight="bold"'),
        *grid(axes),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, 'text-anchor="middle"'),
        text(16, middle, y_name, f'text-anchor="middle" transform="rotate(-90 16 {middle:.1f})"'),
    ]
    for index, (name, points) in enumerate(series.items()):
        parts += curve(axes, index, name, points)
    return "\n".join([*parts, "</svg>"]) + "\n"
