"""Draws the layers of keras_ddl, which only import from earlier layers: `python docs/pictures/the_line.py`."""

from drawing import picture, rectangle, text, write

WIDTH, HEIGHT = 1030, 396
WIDE, HIGH, GAP = 148, 128, 22
TOP, LEFT = 34, 16
PER_ROW = 6
BANDS = (  # the colour of a layer's head shows its requirements
    ("#57606a", "needs neither TensorFlow nor Keras"),
    ("#2f6db3", "TensorFlow"),
    ("#b3541e", "TensorFlow and Keras"),
)

LAYERS = (
    ("native", 0, "native/core/ native/mpi/", "matched by name; in a / host shared memory, / between hosts rings"),
    (
        "topology",
        0,
        "keras_ddl/topology/ observe/cost_model/",
        "who shares a host; the / box of ranks; what an / all-reduce costs on it",
    ),
    ("communicator", 0, "keras_ddl/communicator/", "init, rank, size, split; / collectives on arrays / and objects"),
    ("launch", 0, "keras_ddl/launch/", "starts a process for / each device, reports / the first that fails"),
    ("ops", 1, "keras_ddl/ops/ native/tf/", "collectives on tensors, / in graphs as well, and / their gradients"),
    ("buckets", 1, "keras_ddl/gradients/", "sums in groups, those / that are ready first, / during backward"),
    ("cut", 1, "keras_ddl/cut/", "a step traced whole, as / in one process, is made / again for a rank's rows"),
    (
        "strategy",
        2,
        "keras_ddl/strategy/ keras_ddl/data/",
        "each rank's rows; has / Keras trace the step, / runs what was cut",
    ),
    ("export", 1, "keras_ddl/checkpoint/ export/", "weights into the base / graph, checked: a plain / SavedModel"),
    ("serving", 1, "serving/", "a server for trials, / with the interfaces of / TensorFlow Serving"),
    ("callbacks", 2, "keras_ddl/callbacks/", "checkpoints, resume, / warm-up: what a / strategy cannot know"),
    ("command line", 0, "keras_ddl/cli/", "keras-ddl run, bench, / export, serve, info; / nothing imports it"),
)


def corner(number: int) -> tuple[int, int]:
    row, column = divmod(number, PER_ROW)
    return LEFT + column * (WIDE + GAP), TOP + row * (HIGH + 46)


def layer(number: int) -> list[str]:
    name, band, paths, words = LAYERS[number]
    x, y = corner(number)
    head = f'<path d="M{x} {y + 28} v-22 q0 -6 6 -6 h{WIDE - 12} q6 0 6 6 v22 z" fill="{BANDS[band][0]}"/>'
    parts = [rectangle(x, y, WIDE, HIGH, "frame"), head, text(x + WIDE / 2, y + 19, f"{number + 1} {name}", "on bold")]
    lines = [(each, "path", 14) for each in paths.split()] + [(each, "small", 18) for each in words.split(" / ")]
    y += 32
    for words_of_line, kind, advance in lines:
        y += advance
        parts.append(text(x + WIDE / 2, y, words_of_line, kind))
    return parts


def arrows() -> list[str]:
    parts = [
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
    ]
    for number in range(len(LAYERS) - 1):
        (x, y), (next_x, next_y) = corner(number), corner(number + 1)
        way = f"M{x + WIDE} {y + HIGH / 2} H{next_x - 1}"
        if next_y > y:  # to the beginning of the next row
            middle = y + HIGH + 23
            way = f"M{x + WIDE / 2} {y + HIGH} V{middle} H{next_x + WIDE / 2} V{next_y - 1}"
        parts.append(f'<path class="way" d="{way}" marker-end="url(#tip)"/>')
    return parts


def caption() -> list[str]:
    line = "The layers of keras_ddl. Each imports only from those before it."
    parts = [text(LEFT, TOP - 14, line, "", "start")]
    x, y = LEFT, corner(PER_ROW)[1] + HIGH + 24
    for colour, words in BANDS:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(x + 18, y, words, "small", "start"))
        x += 50 + 6.4 * len(words)
    ways = "A gradient goes from 8 through 7, 6 and 5 to 1, and back. A weight goes from 8 through 11 to 9."
    return [*parts, text(LEFT, y + 24, ways, "", "start")]


def draw() -> str:
    title = "The layers of keras_ddl: " + ", ".join(name for name, *_ in LAYERS)
    boxes = [part for number in range(len(LAYERS)) for part in layer(number)]
    return picture(WIDTH, HEIGHT, title, [*arrows(), *boxes, *caption()])


if __name__ == "__main__":
    write(__file__, draw())
