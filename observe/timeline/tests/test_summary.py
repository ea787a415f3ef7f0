"""keras-ddl trace summary, for made-up jobs with known times."""

import json

import pytest
from click.testing import CliRunner

from harness.made_timelines import Job
from keras_ddl import timeline
from keras_ddl.cli.main import group
from keras_ddl.errors import ConfigError
from keras_ddl.timeline import Collective, steps, waits
from keras_ddl.timeline.summary import summarize
from keras_ddl.timeline.words import sentences


def summary_of(job: Job, folder):
    return summarize(steps.read(job.write(folder / "job.json")))


def near(seconds: float):
    return pytest.approx(seconds, abs=3e-6)  # microseconds in files; floats near 1.8e9 s resolve 0.24 us


def test_parts_of_a_step_are_right_and_add_up(tmp_path):
    found = summary_of(Job(), tmp_path)
    # Rank 0 submits its last bucket 2 + 10 + 4 * 5 ms after the begin, rank 3 12 ms later; the bucket takes 3 ms.
    for each in found.ranks:
        late = each.rank == 3
        assert each.input == near(14e-3 if late else 2e-3)
        assert each.exposed == near(3e-3 if late else 15e-3)
        assert each.late_ranks == near(0 if late else 12e-3)
        assert each.between == pytest.approx(1e-3 * 39 / 40, abs=3e-6)  # the last step has no time after it
        assert each.compute == near(30.5e-3)
        assert each.step == near(each.input + each.exposed + each.between + each.compute)
    assert found.exposed == near(12e-3)


def test_exposed_includes_forward_sums_and_excludes_hidden_ones(tmp_path):
    found = summary_of(Job(statistics=True, slow_input=2e-3), tmp_path)
    assert [each.exposed for each in found.ranks] == [near(3e-3 + 3e-3)] * 4
    assert found.stragglers == [] and "No rank delays others much" in " ".join(sentences(found))


def test_traced_step_is_left_out_of_means_and_reported(tmp_path):
    found = summary_of(Job(tracing=4.0), tmp_path)
    assert found.unusual == 1 and found.step < 0.1
    assert "without 1 that took more than ten times as long" in sentences(found)[0]


def test_time_between_epochs_belongs_to_no_step(tmp_path):
    found = steps.read(Job(steps=10, per_epoch=5).write(tmp_path / "job.json"))
    assert [step.next == step.end for step in found[0].steps] == [False] * 4 + [True] + [False] * 4 + [True]


def test_hosts_are_put_on_one_clock(tmp_path):
    found = summary_of(Job(ahead={1: 5.0, 2: -0.25}), tmp_path)
    (straggler,) = found.stragglers
    assert straggler.rank == 3 and straggler.late == near(12e-3)
    assert "on 3 hosts" in sentences(found)[0]


def test_slowest_buckets_are_measured_from_their_last_submission(tmp_path):
    found = summary_of(Job(), tmp_path)
    assert [row.seconds for row in found.buckets] == [near(3e-3)] * 4
    assert [(row.bytes, row.steps) for row in found.buckets] == [(1_000_000, 40)] * 4
    assert [row.ranks_apart for row in found.buckets] == [near(12e-3)] * 4


def test_exposed_begins_after_the_last_submission_of_a_round():
    def collective(name, submitted, finished):
        return Collective(0, "all_reduce", name, 4, submitted, submitted, submitted, finished)

    one_round = [collective("m/sum_0", 1.0, 2.0), collective("m/sum_1", 3.0, 4.0), collective("rows", 0.0, 9.0)]
    assert waits.exposed(one_round) == [(3.0, 4.0)]
    two = [collective("m/sum_0", 1.0, 2.0), collective("m/after_1/sum_1", 3.0, 4.0)]
    assert waits.exposed(two) == [(1.0, 2.0), (3.0, 4.0)]
    needed = [collective("needed_rows", 0.0, 1.0), collective("m/sum_0", 3.0, 4.0)]
    assert waits.exposed(needed) == [(0.0, 1.0), (3.0, 4.0)]
    in_loop = [collective("m/while/sum_0#1", 1.0, 2.0), collective("m/while/sum_0#2", 3.0, 4.0)]
    assert waits.exposed(in_loop) == [(1.0, 2.0), (3.0, 4.0)]
    assert waits.exposed([collective("m/batch_1", 1.0, 2.0), collective("m/sum_0", 1.5, 3.0)]) == [(1.0, 3.0)]


def test_trace_reads_a_folder_a_merged_file_and_one_rank(tmp_path):
    path = Job(ranks=2, steps=3).write(tmp_path / "job.json")
    from_folder = steps.read(tmp_path)
    assert timeline.merge(path) == path
    assert steps.read(path) == from_folder == steps.read(tmp_path)
    assert [each.rank for each in steps.read(timeline.path_of_rank(path, 1))] == [1]


def test_trace_reports_missing_files(tmp_path):
    with pytest.raises(ConfigError, match="without any. Train with"):
        steps.read(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("no [{ timeline")
    with pytest.raises(ConfigError, match="must be a timeline"):
        steps.read(tmp_path / "text.json")
    Job(ranks=2, steps=0).write(tmp_path / "empty.json")
    with pytest.raises(ConfigError, match=r"without steps on rank\(s\) \[0, 1\]"):
        steps.read(tmp_path / "empty.json")
    Job(ranks=1, steps=1).write(tmp_path / "second.json")
    with pytest.raises(ConfigError, match="one job. .*empty.json, second.json"):
        steps.read(tmp_path)


def test_trace_summary_prints_sentences_and_tables_or_json(tmp_path):
    path = Job().write(tmp_path / "job.json")
    shown = CliRunner().invoke(group, ["trace", "summary", str(path), "--buckets", "2"])
    assert shown.exit_code == 0, shown.output
    assert "its input took 12 ms more" in shown.output
    assert "Where a step's time goes" in shown.output and shown.output.count("3f9a0c21/sum_") == 2
    shown = json.loads(CliRunner().invoke(group, ["trace", "summary", str(path), "--json"]).output)
    assert shown["stragglers"][0]["rank"] == 3 and shown["steps"] == 40 and len(shown["ranks"]) == 4
