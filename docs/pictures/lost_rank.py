"""Draws a step that loses a rank, and that the other ranks repeat: `python docs/pictures/lost_rank.py`."""

from drawing import picture, rectangle, text, write

WIDTH, HEIGHT = 940, 330
LEFT, TOP, ROW, HIGH = 84, 56, 78, 52
BLUE, ORANGE, GREY = "#2f6db3", "#b3541e", "#57606a"
COLUMNS = {"step 6": (0, 116), "step 7": (128, 140), "regroup": (286, 184), "step 7 again": (482, 176), "8": (670, 160)}


def bar(row: int, column: str, words: str, colour: str, part: float = 1.0) -> list[str]:
    x, width = COLUMNS[column]
    y = TOP + row * ROW
    drawn = rectangle(LEFT + x, y, width * part, HIGH, "", f'fill="{colour}"')
    lines = words.split(" / ")
    first = y + HIGH / 2 + 5 - 8 * (len(lines) - 1)
    middle = LEFT + x + width * part / 2
    return [drawn, *(text(middle, first + 16 * number, line, "on small") for number, line in enumerate(lines))]


def ranks() -> list[str]:
    parts = []
    for row in range(3):
        parts.append(text(LEFT - 12, TOP + row * ROW + HIGH / 2 + 5, f"rank {row}", "bold", "end"))
        parts += bar(row, "step 6", f"rows {8 * row} to {8 * row + 7}", BLUE)
    for row in (0, 2):
        parts += bar(row, "step 7", "a sum fails: / nothing is written", GREY)
        parts += bar(row, "regroup", "who is left? 0 and 2 / who has finished 7? none", ORANGE)
    parts += bar(1, "step 7", "SIGKILL", GREY, 0.5)
    for place, row in enumerate((0, 2)):
        rows = f"rows {12 * place} to {12 * place + 11}"
        parts += bar(row, "step 7 again", f"cut for 2 ranks / {rows}", BLUE)
        parts += bar(row, "8", rows, BLUE)
    return parts


def heads() -> list[str]:
    names = {
        "step 6": "step 6",
        "step 7": "step 7",
        "regroup": "regroup",
        "step 7 again": "step 7 again",
        "8": "step 8",
    }
    return [text(LEFT + x + width / 2, TOP - 14, names[name], "bold") for name, (x, width) in COLUMNS.items()]


def draw() -> str:
    lines = (
        "Batches of 24 rows, which every rank reads. Every rank has all weights. The traced step does not know",
        "how many ranks there are: it is cut again for those that are left, who share all rows of the batch.",
    )
    foot = [text(16, TOP + 3 * ROW + 12 + 18 * number, line, "small", "start") for number, line in enumerate(lines)]
    return picture(WIDTH, HEIGHT, "A step that loses a rank, and is made again", [*heads(), *ranks(), *foot])


if __name__ == "__main__":
    write(__file__, draw())
