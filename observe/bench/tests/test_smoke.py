"""keras-ddl bench in one process."""

from pathlib import Path

from launch.launching import run


def test_bench_alone_says_so(tmp_path: Path) -> None:
    ended = run(["bench", "-e", "1K", "-n", "2", "-w", "1"], tmp_path)
    assert ended.status == 0 and "-np 2 starts two" in ended.out, ended
