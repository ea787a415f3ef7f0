"""Strong scaling of the Transformer: one batch of 819,200 tokens on more and more nodes. All numbers are predicted.

    python -m translation.studies.strong_scaling --plot strong.svg

The predictions are shown with the numbers in the text of Cavdar et al. 2019, "Densifying Assumed-sparse Tensors" (arXiv
1905.04035), and of Dell EMC's articles about the same runs: the "big" Transformer of TensorFlow's official models on
Stampede2 and Zenith, with several processes on each node of two Intel Xeon processors, and 100 Gbit/s Omni-Path. Points
of their figures are not estimated. The predictions are

    dense, exchange  a bound: computation, followed by an all-reduce of the gradients (keras_ddl.cost_model)
    dense            the same, plus a cost per step that does not shrink with a process's share of the batch, such as
                     the wait for the slowest process; FITTED to the published weak scaling (the row says so)
    assumed sparse   like dense, but the gradient of the shared table is gathered from all processes instead of reduced:
                     vocabulary + source + target rows from each process, so it grows with their number

Efficiency is relative to the smallest number of nodes in the list. 16 is the smallest number whose memory holds the
batch, at 25,600 tokens per process, the largest number that fitted (Dell EMC). The speed of computation is assumed, see
--tokens-per-second. It changes the seconds, but hardly the efficiency of "dense", where it cancels out except in the
share of the exchange.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.cost_model import Cluster, Dimension, exchange, shared_memory
from translation.studies import rows
from translation.studies.table_bytes import PAPER, gathered_bytes

# (parameters, width), from table 3 of arXiv 1706.03762.
SIZES = {"base": (65e6, 512), "big": (213e6, 1024)}
BYTES = 4  # float32

# Published results: (nodes, processes per node, efficiency).
WEAK = (300, 4, 0.91)
STRONG = (200, 2, 0.65)
TIMES_ONE_NODE = (200, 121)  # nodes, and times faster than one node in reaching BLEU 27.5


@dataclass(frozen=True)
class Training:
    """The model and the machines. The options say where the defaults come from.

    Attributes:
        parameters, width, vocabulary: sizes of the model.
        tokens_per_second: speed of a node.
        link: bytes/s of a node's network, both ways at once.
        latency: seconds per message.
        copy: bytes/s at which a core copies memory.
    """

    parameters: float = SIZES["big"][0]
    width: int = SIZES["big"][1]
    vocabulary: int = PAPER["rows"]
    tokens_per_second: float = 1_100
    link: float = 12.5e9
    latency: float = 1e-6
    copy: float = 10e9

    def compute(self, nodes: int, tokens: float) -> float:
        """Returns the seconds in which `nodes` nodes compute a batch of `tokens`."""
        return tokens / nodes / self.tokens_per_second

    def reduced(self, nodes: int, processes: int, nbytes: float) -> float:
        """Returns the seconds of an all-reduce of `nbytes` among `processes` on each of `nodes`."""
        inside = shared_memory(processes, self.copy)
        return exchange(Cluster((inside, Dimension(nodes, self.link, self.latency))), nbytes)

    def dense(self, nodes: int, processes: int) -> float:
        """Returns the seconds of the exchange if all gradients are dense."""
        return self.reduced(nodes, processes, BYTES * self.parameters)

    def gathered(self, ranks: int, tokens: float) -> float:
        """Returns the bytes of the table's gradient on each rank after it is gathered from all ranks.

        TensorFlow 1 made the sum of a dense and a sparse gradient sparse. So each rank's gradient has a row for each
        entry of the vocabulary, from the projection, and one for each source token and each target token.
        """
        return gathered_bytes(ranks, self.vocabulary, self.width, 2 * tokens / ranks)

    def sparse(self, nodes: int, processes: int, tokens: float) -> float:
        """Returns a lower bound (the network's time) of the exchange's seconds if the table's gradient is gathered."""
        rest = BYTES * (self.parameters - self.vocabulary * self.width)
        received = self.gathered(nodes * processes, tokens) * (nodes - 1) / nodes
        return self.reduced(nodes, processes, rest) + received / self.link

    def fixed(self, efficiency: float, nodes: int, processes: int, tokens: float) -> float:
        """Returns the seconds of a step that neither computation nor the exchange explains.

        Args: efficiency: the share of the step in which a node computes its part of a batch of `tokens`.
        """
        compute = self.compute(nodes, tokens)
        return max(0.0, compute / efficiency - compute - self.dense(nodes, processes))


def predictions(training: Training, nodes: Sequence[int], tokens: int, weak_tokens: int) -> list[rows.Row]:
    """Returns the predicted rows. weak_tokens: tokens per process in the published weak scaling."""
    processes = STRONG[1]
    weak_nodes, weak_processes, efficiency = WEAK
    fixed = training.fixed(efficiency, weak_nodes, weak_processes, weak_nodes * weak_processes * weak_tokens)
    found = []
    for what, cost in (
        ("dense, exchange", lambda count: training.dense(count, processes)),
        ("dense", lambda count: fixed + training.dense(count, processes)),
        ("assumed sparse", lambda count: fixed + training.sparse(count, processes, tokens)),
    ):
        first = None
        for count in nodes:
            seconds = training.compute(count, tokens) + cost(count)
            first = first or (count, seconds)
            table = training.vocabulary * training.width * BYTES
            if what == "assumed sparse":
                table = training.gathered(count * processes, tokens)
            row = {
                "how": "predicted",
                "what": what,
                "nodes": count,
                "tokens/process": round(tokens / count / processes),
                "step s": seconds,
                "times": first[1] / seconds,
                "efficiency %": 100 * first[1] / seconds * first[0] / count,
                "error %": None,
                "table MB": table / 1e6,
            }
            if what != "assumed sparse" and count == STRONG[0]:
                row["error %"] = row["efficiency %"] / STRONG[2] - 100
            found.append(row)
    return found


def published(tokens: int, weak_tokens: int) -> list[rows.Row]:
    """Returns the published rows."""
    nodes, processes, efficiency = STRONG
    weak_nodes, _, weak_efficiency = WEAK
    strong = {"nodes": nodes, "tokens/process": round(tokens / nodes / processes), "efficiency %": 100 * efficiency}
    weak = {"nodes": weak_nodes, "tokens/process": weak_tokens, "efficiency %": 100 * weak_efficiency}
    solution = {"nodes": TIMES_ONE_NODE[0], "times": float(TIMES_ONE_NODE[1])}
    return [
        {"how": "published", "what": "dense", **strong, "note": "strong scaling, abstract: up to 65 %, 400 processes"},
        {"how": "published", "what": "dense, weak scaling", **weak, "note": "abstract: 1200 processes; FITTED to this"},
        {"how": "published", "what": "time to BLEU 27.5", **solution, "note": "Dell EMC: a month on 1 node, 6 hours"},
    ]


def draw(figure: Any, found: Sequence[rows.Row]) -> None:
    """Draws the speed-up and the efficiency against the nodes."""
    colors = {"dense, exchange": "tab:gray", "dense": "tab:orange", "assumed sparse": "tab:red"}
    left, right = figure.subplots(1, 2)
    for axes, column in ((left, "times"), (right, "efficiency %")):
        for what, color in colors.items():
            mine = [row for row in found if row["how"] == "predicted" and row["what"] == what]
            look = rows.LOOKS["predicted"] | {"color": color}
            axes.plot([row["nodes"] for row in mine], [row[column] for row in mine], label=f"predicted: {what}", **look)
        axes.set(xscale="log", xlabel="nodes")
        ticks = sorted({row["nodes"] for row in found if row["how"] == "predicted"})
        axes.set_xticks(ticks, map(str, ticks), fontsize="small")
        axes.grid(alpha=0.3)
    left.plot(ticks, [count / ticks[0] for count in ticks], color="black", linewidth=0.7, label="ideal")
    left.set(yscale="log", ylabel=f"times the tokens/s of {ticks[0]} nodes")
    marks = [2**power for power in range(20) if 2**power <= ticks[-1] / ticks[0]]
    left.set_yticks(marks, map(str, marks))
    left.legend(handles=left.lines[-1:])
    nodes, _, efficiency = STRONG
    right.plot([nodes], [100 * efficiency], label="published: dense", **rows.LOOKS["published"])
    right.set(ylim=(0, 105), ylabel="efficiency, %")
    right.legend()
    for axes in (left, right):
        axes.minorticks_off()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        parents=[rows.options("strong_scaling")],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, default = result.add_argument, Training()
    add("--nodes", type=int, nargs="+", default=[16, 32, 64, 128, 200, 256], metavar="N")
    add("--tokens", type=int, default=819_200, help="tokens in the batch (default: the published %(default)s)")
    add("--size", choices=SIZES, default="big", help="size of the Transformer (default: %(default)s)")
    add(
        "--tokens-per-second",
        type=float,
        default=default.tokens_per_second,
        help="speed of a node. ASSUMED (default: %(default)s), because none is published: 6 operations per parameter "
        "and token, at a third of Intel's 4.3 Tflop/s for two Xeon 8160 with AVX-512 at 1.4 GHz",
    )
    add(
        "--weak-tokens",
        type=int,
        default=5_000,
        help="tokens per process in the published weak scaling (default: %(default)s). This agrees with its 82 times "
        "as much memory at 64 processes: 64 (1 + 2 tokens / vocabulary) is 82 at 4,770",
    )
    add("--link", type=float, default=default.link, help="bytes/s of a node's network (default: 100 Gbit/s)")
    add("--latency", type=float, default=default.latency, help="seconds per message (default: %(default)s)")
    add("--copy", type=float, default=default.copy, help="bytes/s at which a core copies memory (default: %(default)g)")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = rows.parse(parser(), arguments)
    parameters, width = SIZES[chosen.size]
    training = Training(
        parameters,
        width,
        tokens_per_second=chosen.tokens_per_second,
        link=chosen.link,
        latency=chosen.latency,
        copy=chosen.copy,
    )
    found = predictions(training, sorted(chosen.nodes), chosen.tokens, chosen.weak_tokens)
    rows.show(found + published(chosen.tokens, chosen.weak_tokens), chosen, draw)


if __name__ == "__main__":
    main()
