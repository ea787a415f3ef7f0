"""Draws the results of 51 Keras programs under each strategy, from benchmarks/results.

python docs/pictures/scoreboard.py
"""

from pathlib import Path

from drawing import picture, text, write

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "scoreboard.md"
NAMES = {  # column of the table -> words in the picture
    "keras_ddl": "keras_ddl",
    "Mirrored": "tf.distribute, MirroredStrategy",
    "MultiWorker": "tf.distribute, MultiWorker...",
    "JAX": "keras.distribution on JAX",
    "torch DDP": "DDP, Keras on PyTorch",
}
VERDICTS = {  # word of the table -> colour, words in the legend
    "equal": ("#2f8f4e", "equal to one process"),
    "draws differ": ("#8fbf9b", "other random draws"),
    "wrong": ("#c0392b", "silently wrong"),
    "refused": ("#d9a13b", "refused"),
    "-": ("#b9c0c7", "not for this backend"),
}
LEFT, TOP, STEP, UNIT = 216, 40, 34, 9.6


def counts() -> dict[str, list[int]]:
    """Returns column -> the number of programs for each verdict, from the last rows of the table."""
    rows = [
        [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]
        for line in RESULTS.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    columns = next(row for row in rows if row[0] == "program")[1:]
    sums = {row[0]: [int(cell) for cell in row[1:]] for row in rows if row[0] in VERDICTS and row[1].isdecimal()}
    return {column: [sums[verdict][place] for verdict in VERDICTS] for place, column in enumerate(columns)}


def bar(row: int, column: str, numbers: list[int]) -> list[str]:
    x, y = float(LEFT), TOP + row * STEP
    parts = [text(LEFT - 10, y + 16, NAMES[column], "bold" if row == 0 else "", "end")]
    for number, (colour, _) in zip(numbers, VERDICTS.values()):
        if number:
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{number * UNIT:.1f}" height="24" fill="{colour}"/>')
            parts.append(text(x + number * UNIT / 2, y + 16, str(number), "on bold"))
        x += number * UNIT
    return parts


def draw() -> str:
    found = counts()
    programs = sum(next(iter(found.values())))
    title = f"{programs} Keras programs on two processes or devices, each compared with one process"
    parts = [text(14, 22, title, "bold", "start")]
    for row, (column, numbers) in enumerate(found.items()):
        parts += bar(row, column, numbers)
    x, y = 14.0, TOP + len(found) * STEP + 14
    for colour, words in VERDICTS.values():
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(x + 18, y, words, "small", "start"))
        x += 36 + 6.6 * len(words)
    return picture(round(LEFT + programs * UNIT + 16), y + 14, title, parts)


if __name__ == "__main__":
    write(__file__, draw())
