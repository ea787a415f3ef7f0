"""Draws four ranks as a mesh of 2 x 2, with their data and communication: `python docs/pictures/mesh.py`."""

from drawing import picture, rectangle, text, write

WIDTH, HEIGHT = 940, 430
LEFT, TOP, WIDE, HIGH, ACROSS, DOWN = 150, 84, 270, 96, 180, 62
BLUE, ORANGE = "#2f6db3", "#b3541e"


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """Returns a horizontal or vertical line with arrowheads at both ends."""
    along = (6, 0) if y1 == y2 else (0, 6)
    tips = []
    for x, y, sign in ((x1, y1, 1), (x2, y2, -1)):
        back, side = (sign * along[0], sign * along[1]), (along[1] * 0.8, along[0] * 0.8)
        tips.append(
            f'<path d="M{x} {y} L{x + back[0] + side[0]:g} {y + back[1] + side[1]:g} '
            f'L{x + back[0] - side[0]:g} {y + back[1] - side[1]:g} Z" fill="{colour}"/>'
        )
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{colour}" stroke-width="2.5"/>' + "".join(tips)


def box(data: int, model: int) -> list[str]:
    x, y = LEFT + model * (WIDE + ACROSS), TOP + data * (HIGH + DOWN)
    middle = x + WIDE / 2
    columns = f"{32 * model} to {32 * model + 31}"
    return [
        rectangle(x, y, WIDE, HIGH, "memory"),
        text(middle, y + 22, f"rank {2 * data + model}", "bold"),
        text(middle, y + 44, f"rows {8 * data} to {8 * data + 7} of the batch", "small"),
        text(middle, y + 63, f"up/kernel: columns {columns}", "small"),
        text(middle, y + 82, f"down/kernel: rows {columns}", "small"),
    ]


def draw() -> str:
    parts = [text(LEFT + m * (WIDE + ACROSS) + WIDE / 2, TOP - 18, f"model {m}", "bold") for m in range(2)]
    parts.append(text(LEFT + WIDE + ACROSS / 2, 30, "model axis: consecutive ranks, on one host", "bold"))
    for data in range(2):
        y = TOP + data * (HIGH + DOWN) + HIGH / 2
        parts.append(text(LEFT - 20, y + 5, f"batch {data}", "bold", "end"))
        parts.append(arrow(LEFT + WIDE + 8, y, LEFT + WIDE + ACROSS - 8, y, ORANGE))
        parts.append(text(LEFT + WIDE + ACROSS / 2, y - 12, "sums of activations", "small"))
        parts.append(text(LEFT + WIDE + ACROSS / 2, y + 22, "8 rows, in every layer", "small"))
        for model in range(2):
            parts += box(data, model)
    for model in range(2):
        x = LEFT + model * (WIDE + ACROSS) + WIDE / 2
        parts.append(arrow(x, TOP + HIGH + 6, x, TOP + HIGH + DOWN - 6, BLUE))
        parts.append(text(x + 14, TOP + HIGH + DOWN / 2 + 5, "sums of gradients of slices", "small", "start"))
    lines = (
        "A batch of 16 rows, and a kernel up [16, 64] before a kernel down [64, 16]. What a rank computes with its",
        "columns of up is what its rows of down need, so nothing travels between the two. One sum follows down, and",
        "one gives the gradient of what up was given.",
    )
    foot = TOP + 2 * HIGH + DOWN + 36
    parts += [text(16, foot + 18 * number, line, "small", "start") for number, line in enumerate(lines)]
    return picture(WIDTH, HEIGHT, "Four ranks as a mesh of two data ranks and two model ranks", parts)


if __name__ == "__main__":
    write(__file__, draw())
