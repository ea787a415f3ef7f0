"""A screen whose output tests read, output of ranks that is written to it, and samples of such output."""

from __future__ import annotations

from keras_ddl.launch.output.screen import RankOutput, Screen

# TensorFlow's startup output: notes, and an error.
PREFACE = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
ONEDNN = b"I0000 00:00:1795426935.%06d    6131 port.cc:153] oneDNN custom operations are on. You may see ...\n"
GUARD = b"2026-01-31 12:00:%02d.000000: I tensorflow/cpu_feature_guard.cc:210] This TensorFlow binary is optimized to\n"
CPU = b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate "
CPU += b"compiler flags.\n"
ERROR = b"E0000 00:00:1795426935.000001    6131 cuda_driver.cc:7] device 3 is on fire\n"
WARNING = b"/x/train.py:8: UserWarning: slow\n  warnings.warn(text)\n"


class Recorder:
    def __init__(self, terminal: bool = False):
        self.terminal = terminal
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def screen_of(num_ranks: int, terminal: bool = False):
    out, err = Recorder(terminal), Recorder(terminal)
    screen = Screen(out, err)
    return out, err, screen, [RankOutput(rank, screen) for rank in range(num_ranks)]
