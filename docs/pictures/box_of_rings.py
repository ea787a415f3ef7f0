"""Draws the ranks of two racks of two hosts, and the rings between them: `python docs/pictures/box_of_rings.py`."""

from drawing import picture, rectangle, text, write

RANKS, HOSTS_PER_RACK, RACKS = 4, 2, 2
WIDTH, HEIGHT = 830, 480
CELL_WIDTH, CELL_HEIGHT, GAP = 84, 34, 12
HOST_WIDTH = CELL_WIDTH + 2 * GAP
TOP, LEFT = 66, 104
SHARDS = ("#4e79a7", "#e08214", "#3f9b57", "#a65ba6")  # colours that most colour-blind people can tell apart


def host_left(host: int) -> float:
    return LEFT + host * (HOST_WIDTH + 56) + (host // HOSTS_PER_RACK) * 34


def row_top(local: int) -> float:
    return TOP + 34 + local * (CELL_HEIGHT + 24)


def hosts() -> list[str]:
    parts = []
    bottom = row_top(RANKS - 1) + CELL_HEIGHT + GAP + 8
    for rack in range(RACKS):
        x = host_left(rack * HOSTS_PER_RACK) - 30
        width = host_left(rack * HOSTS_PER_RACK + HOSTS_PER_RACK - 1) + HOST_WIDTH + 30 - x
        parts.append(rectangle(x, TOP - 34, width, bottom - TOP + 50, "frame", 'stroke-dasharray="5 4"'))
        parts.append(text(x + width / 2, TOP - 14, f"rack {rack}", "bold"))
    for host in range(HOSTS_PER_RACK * RACKS):
        x = host_left(host)
        parts.append(rectangle(x, TOP, HOST_WIDTH, bottom - TOP, "memory"))
        parts.append(text(x + HOST_WIDTH / 2, TOP + 20, f"host {host}"))
    return parts


def ranks() -> list[str]:
    parts = []
    for host in range(HOSTS_PER_RACK * RACKS):
        x = host_left(host)
        for local in range(RANKS):
            y = row_top(local)
            parts.append(rectangle(x + GAP, y, CELL_WIDTH, CELL_HEIGHT, "", f'fill="{SHARDS[local]}"'))
            parts.append(text(x + HOST_WIDTH / 2, y + 22, f"rank {host * RANKS + local}", "on"))
    return parts


def rings() -> list[str]:
    parts = []
    last = HOSTS_PER_RACK * RACKS - 1
    for local, colour in enumerate(SHARDS):
        y = row_top(local) + CELL_HEIGHT / 2
        tip = f'stroke="{colour}" marker-end="url(#tip{local})"'
        parts.append(
            f'<marker id="tip{local}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        )
        for host in range(last):
            begin, end = host_left(host) + GAP + CELL_WIDTH, host_left(host + 1) + GAP
            parts.append(f'<path class="ring" d="M{begin} {y} H{end - 1}" {tip}/>')
        # From the last host back to the first, below the row.
        below, right, left = y + CELL_HEIGHT / 2 + 11, host_left(last) + GAP + CELL_WIDTH, host_left(0) + GAP
        parts.append(
            f'<path class="ring" stroke-opacity="0.75" d="M{right} {y} h22 q8 0 8 8 V{below - 8} q0 8 -8 8 '
            f'H{left - 22} q-8 0 -8 -8 V{y + 8} q0 -8 8 -8 H{left - 1}" {tip}/>'
        )
        parts.append(text(30, y + 5, f"shard {local}", "small"))
    return parts


def caption() -> list[str]:
    y = row_top(RANKS - 1) + CELL_HEIGHT + 76
    lines = (
        ("1", "Inside a host, in shared memory: reduce-scatter. Rank l of the host then has shard l, N/L bytes."),
        ("2", "Between hosts, one ring per shard (or rings inside racks, then between them): all-reduce of N/L bytes."),
        ("3", "Inside a host, in shared memory: all-gather. Every rank has the whole sum of N bytes."),
    )
    parts = []
    for index, (number, words) in enumerate(lines):
        parts.append(text(60, y + index * 24, number, "bold"))
        parts.append(text(80, y + index * 24, words, anchor="start"))
    return parts


def draw() -> str:
    title = "Two racks of two hosts of four ranks: ranks of a host share memory, equal local ranks form rings"
    return picture(WIDTH, HEIGHT, title, [*hosts(), *rings(), *ranks(), *caption()])


if __name__ == "__main__":
    write(__file__, draw())
