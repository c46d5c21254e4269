"""The sentence, from records made by hand as NCCL's Flight Recorder writes them."""

import json
import pickle
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from torchtitan.commands.doctor import main
from torchtitan.config import resolve
from torchtitan.health import hang_watch
from torchtitan.health.diagnose import diagnose
from torchtitan.health.rank_dumps import Dumps, read_crashes, read_dumps
from torchtitan.tools.launch import torchrun
from torchtitan.train.callbacks import Callback, CallbackStates
from torchtitan.train.engine import Engine
from torchtitan.utils import activity
from torchtitan.utils.errors import UserError

DESCRIPTIONS = {"0": "default_pg", "1": "mesh_dp_shard", "3": "mesh_tp", "5": "mesh_pp"}


def groups(rank):
    """Of a rank; those of one axis have one name, as when NCCL splits them off."""
    ranks = {
        "0": "[0, 1, 2, 3]",
        "1": f"[{rank % 2}, {rank % 2 + 2}]",
        "3": "[0, 1]" if rank < 2 else "[2, 3]",
        "5": f"[{rank % 2}, {rank % 2 + 2}]",
    }
    return {
        name: {"name": name, "desc": DESCRIPTIONS[name], "ranks": ranks[name]} for name in ranks
    }


def entry(group, number, state="completed", op="all_reduce", size=(8,), created=0, **extra):
    p2p = "->" in op or "<-" in op
    return {
        "process_group": (group, DESCRIPTIONS[group]),
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [list(size)],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "time_created_ns": created,
        "is_p2p": p2p,
        "frames": [{"filename": "/code/run.py", "line": 10 + number, "name": "step"}],
        **extra,
    }


def state(
    rank,
    phase="running forward and backward",
    error=None,
    stack=("/code/run.py", 5, "sleep"),
    **extra,
):
    ask = {"rank": 0, "kind": "hang", "why": "nothing moved for 75 s", "time": 1e9}
    return {
        "ask": ask,
        "rank": rank,
        "world": 4,
        "degrees": {"dp_shard": 2, "tp": 2},
        "process": [100 + rank, "node"],
        "time": 1e9 + rank,
        "phase": phase,
        "step": 7,
        "seconds": 75.2,
        "error": error,
        "silent": {},
        "threads": {"MainThread": [stack]},
        **extra,
    }


def write(folder, records, states=()):
    for rank, entries in records.items():
        dump = {"version": "2.10", "pg_config": groups(rank), "entries": entries}
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    for one in states:
        (folder / f"state-{one['rank']}.json").write_text(json.dumps(one))


def sentence(folder, **options):
    dumps = read_dumps(folder)
    assert isinstance(dumps, Dumps)
    return diagnose(dumps, **options)


def test_the_one_that_all_others_wait_for_directly_or_not(tmp_path):
    """3 is missing in tp; 2, which is there, is missing in dp_shard, where 0 is; 1 waits for 3 in
    another.
    """
    records = {
        0: [entry("3", 4), entry("1", 9, "started", "_all_gather_base", created=30)],
        1: [entry("3", 4), entry("1", 9, "started", "_all_gather_base", created=20)],
        2: [entry("3", 4, "started", size=(2, 16), created=10), entry("1", 8)],
        3: [entry("3", 3), entry("1", 8)],
    }
    write(tmp_path, records, [state(r) for r in range(4)])
    assert sentence(tmp_path) == (
        "rank 3 did not enter all_reduce #4 of tp (BFloat16 [2, 16]; ranks 2-3), where "
        "rank 2 waits: it has been "
        "running forward and backward for 75 s in step 7, at /code/run.py:5 in sleep"
    )


def test_records_alone_are_enough(tmp_path):
    """As NCCL's watchdog leaves them."""
    write(tmp_path, {0: [entry("3", 4, "scheduled")], 1: [entry("3", 3)]})
    assert sentence(tmp_path).startswith(
        "rank 1 did not enter all_reduce #4 of tp (BFloat16 [8]; ranks 0-1)"
    )


@pytest.mark.parametrize(("op", "size"), [("all_gather", (8,)), ("all_reduce", (16,))])
def test_another_collective_or_size(tmp_path, op, size):
    records = {r: [entry("0", 1), entry("0", 2, "started")] for r in range(4)}
    records[2][1] = entry("0", 2, "started", op, size)
    write(tmp_path, records)
    assert sentence(tmp_path) == (
        f"rank 2 entered {op} #2 of all ranks (BFloat16 [{size[0]}]; ranks 0-3), at "
        "/code/run.py:12 in step, "
        "where ranks 0-1, 3 entered all_reduce (BFloat16 [8]), at /code/run.py:12 in step"
    )


def test_gathered_parts_may_differ_where_the_operation_allows_it(tmp_path):
    records = {r: [entry("0", 1, op="all_to_all", size=(r + 1,))] for r in range(4)}
    write(tmp_path, records, [state(r) for r in range(4)])
    assert sentence(tmp_path).startswith("no rank waits for another")


def exchanges(*splits, ranks=(0, 1)):
    """As a rank writes its last ones."""
    return [
        {"number": n, "ranks": ranks, "sent": sent, "expected": expected}
        for n, (sent, expected) in splits
    ]


def test_rows_that_their_receiver_does_not_expect(tmp_path):
    """The first mismatch counts; with CUDA the host of a rank may be ahead of it."""
    records = {r: [entry("3", 4, "started", "all_to_all", (9, 64))] for r in range(2)}
    ahead = exchanges((7, ([4, 5], [4, 3])), (8, ([4, 3], [4, 5])))
    others = exchanges((7, ([3, 8], [3, 8])), ranks=(2, 3))
    late = exchanges((7, ([3, 6], [3, 6])))
    write(
        tmp_path,
        records,
        [state(0, exchanges=ahead), state(1, exchanges=late), state(2, exchanges=others), state(3)],
    )
    assert sentence(tmp_path) == (
        "rank 0 sends 5 rows to rank 1, which expects 3, in exchange #7 of experts' "
        "rows among ranks 0-1; rank 1 "
        "has been running forward and backward for 75 s in step 7, at /code/run.py:5 in sleep"
    )


def test_splits_of_the_collective_that_hangs(tmp_path):
    """Of a record that also holds the counts and later exchanges."""
    kinds = [
        ("all_to_all", (8,)),
        ("all_to_all", (9, 64)),
        ("all_reduce", (4, 4)),
        ("all_to_all", (7, 64)),
    ]
    record = [
        entry("3", n, "started", op, size, created=n) for n, (op, size) in enumerate(kinds, 4)
    ]
    noted = exchanges((7, ([4, 5], [4, 3])), (8, ([4, 3], [4, 5])))
    write(tmp_path, {0: record, 1: record[:1]}, [state(0, exchanges=noted), state(1)])
    assert sentence(tmp_path).startswith(
        "rank 1 did not enter all_to_all #5 of tp (BFloat16 [9, 64]; ranks 0-1), where "
        "rank 0 waits (rank 0 sends 4, 5 "
        "rows to these ranks and expects 4, 3 from them): it has been running"
    )


def test_a_rank_that_died_of_rows_it_did_not_expect(tmp_path):
    """gloo aborts it; the other loses the connection, and its half of the splits is known."""
    lost = {
        "type": "RuntimeError",
        "text": "Connection closed",
        "cause": False,
        "frames": [["/code/a.py", 3, "f"]],
    }
    noted = exchanges((7, ([4, 5], [4, 3])))
    silent = {"1": "is gone (process 5 on b)"}
    write(
        tmp_path,
        {0: [entry("3", 5, op="all_to_all", size=(9, 64))]},
        [state(0, error=lost, exchanges=noted, silent=silent), state(2), state(3)],
    )
    assert sentence(tmp_path, exits={1: -6}) == (
        "rank 1 was killed by SIGABRT; rank 0 lost the connection in step 7, at "
        "/code/a.py:3 in f, in all_to_all #5 of "
        "tp (BFloat16 [9, 64]; ranks 0-1), where it sends 4, 5 rows to these ranks and "
        "expects 4, 3 from them"
    )


def test_a_receive_whose_send_never_comes(tmp_path):
    """Names in records are ranks of the group; 2 is rank 1 of its pipeline."""
    write(
        tmp_path, {0: [], 2: [entry("5", 3, "started", "recv 1<-0")]}, [state(r) for r in range(4)]
    )
    assert sentence(tmp_path).startswith(
        "rank 0 did not enter recv 1<-0 #3 of pp (BFloat16 [8]; ranks 0, 2), where"
    )


def test_the_other_end_of_a_send_is_not_the_cause_if_it_is_there(tmp_path):
    records = {
        0: [entry("5", 3, "started", "send 0->1")],
        2: [entry("5", 3, "started", "recv 1<-0")],
    }
    write(tmp_path, records, [state(r) for r in range(4)])
    assert sentence(tmp_path).startswith("no rank waits for another")


def test_two_receives_wait_for_each_other(tmp_path):
    wait = ("/site-packages/torch/distributed/distributed_c10d.py", 9, "recv")
    records = {
        0: [entry("5", 3, "started", "recv 0<-1")],
        2: [entry("5", 3, "started", "recv 1<-0")],
    }
    write(tmp_path, records, [state(r, stack=wait) for r in range(4)])
    assert sentence(tmp_path).startswith(
        "the ranks wait for each other, because they called collectives in different orders: rank 0"
    )


def test_groups_entered_in_different_order(tmp_path):
    wait = ("/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
    records = {
        0: [entry("3", 1, "started")],
        1: [entry("1", 1, "started")],
        3: [entry("0", 1, "started")],
    }
    records[2] = [entry("1", 1, "started")]
    write(tmp_path, records, [state(r, stack=wait) for r in range(4)])
    assert sentence(tmp_path).startswith(
        "the ranks wait for each other, because they called collectives in different orders: rank 0"
    )


def test_a_rank_that_is_ahead_on_one_axis_is_still_found_by_its_stack(tmp_path):
    """1 sleeps, but has begun to gather with 3, which waits for 2, which waits for 0, which waits
    for 1.
    """
    wait = ("/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
    records = {
        0: [entry("3", 1, "started", created=5)],
        1: [entry("1", 1, "started", "_all_gather_base")],
        2: [entry("1", 1, "started", created=7)],
        3: [entry("3", 1, "started", created=6)],
    }
    write(tmp_path, records, [state(1), *(state(r, stack=wait) for r in (0, 2, 3))])
    assert sentence(tmp_path).startswith(
        "rank 1 did not enter all_reduce #1 of tp (BFloat16 [8]; ranks 0-1), where"
    )


def test_the_first_exception_that_follows_from_no_other(tmp_path):
    errors = [
        ("RuntimeError", "Connection closed", False),
        ("ValueError", "boom", True),
        ("KeyError", "'x'", True),
    ]
    made = [
        {"type": t, "text": x, "cause": c, "frames": [["/code/a.py", 3, "f"]]} for t, x, c in errors
    ]
    write(tmp_path, {}, [state(r, error=error) for r, error in enumerate(made)])
    assert sentence(tmp_path) == "rank 1 raised ValueError: boom, in step 7, at /code/a.py:3 in f"


def test_ranks_without_an_answer(tmp_path):
    records = {0: [entry("3", 4, "started")]}
    write(
        tmp_path,
        records,
        [state(0, silent={"1": "gave no answer (process 5 on b)"}), state(2), state(3)],
    )
    assert sentence(tmp_path).startswith(
        "rank 1 gave no answer (process 5 on b), and did not enter all_reduce #4 of tp "
        "(BFloat16 [8]; ranks 0-1), where"
    )
    assert sentence(tmp_path, exits={1: -9, 0: 1}).startswith(
        "rank 1 was killed by SIGKILL (by hand, or out of"
    )


def test_what_an_earlier_case_left_is_not_read(tmp_path):
    write(
        tmp_path,
        {},
        [state(0), state(1, ask={"rank": 1, "kind": "signal", "why": "SIGUSR2", "time": 5.0})],
    )
    dumps = read_dumps(tmp_path)
    assert sorted(dumps.by_rank) == [0]
    assert sorted(dumps.silent) == [1, 2, 3]
    assert read_dumps(tmp_path, since=2e9) is None


@pytest.mark.parametrize(
    "dump",
    [
        b"",
        b"\x80\x04cut",
        pickle.dumps([1, 2]),
        pickle.dumps({"pg_config": [1]}),
        pickle.dumps(
            {
                "pg_config": {"0": {"ranks": "__import__('os').mkdir('ran')", "desc": ""}},
                "entries": 1,
            }
        ),
        pickle.dumps({"pg_config": {"0": {"ranks": "[" * 100_000, "desc": ""}}, "entries": [{}]}),
        b"cos\nmkdir\n(Vran\ntR.",
    ],
)
def test_a_dump_that_is_none_is_skipped_and_not_run(tmp_path, monkeypatch, dump):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {0: [entry("3", 4, "started")]}, [state(r) for r in range(4)])
    (tmp_path / "rank_1").write_bytes(dump)
    dumps = read_dumps(tmp_path)
    assert dumps.by_rank[0].collectives
    assert not dumps.by_rank[1].collectives
    assert not (tmp_path / "ran").exists()


def test_the_tool_reads_a_dump_folder(tmp_path, capsys):
    (tmp_path / "comm_traces").mkdir()
    write(
        tmp_path / "comm_traces",
        {0: [entry("3", 4, "started")], 1: []},
        [state(r) for r in range(4)],
    )
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 1 did not enter all_reduce #4 of tp")
    assert len(lines) == 5
    with pytest.raises(UserError, match="no rank has written anything here"):
        main([str(tmp_path / "elsewhere")])


@pytest.mark.parametrize(
    "state", ["garbage", "[]", "{}", '{"rank": 1}', "[" * 100_000, '{"rank": 0, "ask": 3}']
)
def test_doctor_on_damaged_reports(tmp_path, state):
    (tmp_path / "state-0.json").write_text(state)
    with pytest.raises(UserError, match="a report is damaged"):
        main([str(tmp_path)])


def test_a_kill_that_torchrun_sent_itself_is_not_the_cause(tmp_path):
    """30 seconds after another rank failed; a kill before that is."""
    config = resolve([f"--job.dump_folder={tmp_path}"], 2).config

    def failures(seconds):
        return {
            0: SimpleNamespace(exitcode=1, pid=1, timestamp=1000),
            1: SimpleNamespace(exitcode=-9, pid=2, timestamp=1000 + seconds),
        }

    with mock.patch.object(torchrun, "read_dumps") as read:
        nothing = {"error": None, "exchanges": [], "collectives": [], "state": {}, "phase": ""}
        dump = SimpleNamespace(pid=1, blocked=False, **nothing)
        read.side_effect = lambda *_: Dumps(
            2, "", {0: dump}, {1: "is stopped (process 2): SIGCONT resumes it"}
        )
        told = torchrun._cause(config, 0, failures(30))
        assert told == "rank 1 is stopped (process 2): SIGCONT resumes it"
        assert "rank 1 was killed by SIGKILL" in torchrun._cause(config, 0, failures(1))


IN_STEP = ", at /code/run.py:25 in step, and did not"
ABORTED = """Fatal Python error: Aborted

{first} 0x00007fcdc27fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/code/reader.py", line 3 in put

Thread 0x00007fcdfbc60b80 (most recent call first):
  File "/code/.venv/lib/python3.11/site-packages/{main}", line 9 in all_reduce
  File "/code/run.py", line 25 in step
"""


@pytest.mark.parametrize(
    ("first", "main", "code", "expected"),
    [
        (
            "Thread",  # of C++, so none is called current
            "torch/distributed/x.py",
            -6,
            "rank 0 was killed by SIGABRT in a collective, as gloo does if ranks exchange tensors "
            "of different sizes: rank 0 was at /code/run.py:25 in step, and rank 1 entered "
            "all_reduce #4 of tp (BFloat16 [8]; ranks 0-1), at /code/run.py:14 in step, then "
            "all_reduce #5 of tp (BFloat16 [1]; ranks 0-1), at /code/run.py:15 in step",
        ),
        # a library's own thread
        ("Thread", "tokens/x.py", -6, f"rank 0 was killed by SIGABRT{IN_STEP}"),
        (
            "Current thread",
            "torch/distributed/x.py",
            -6,
            "rank 0 was killed by SIGABRT, at /code/reader.py:3 in put, and",
        ),
        ("Thread", "torch/distributed/x.py", -11, f"rank 0 was killed by SIGSEGV{IN_STEP}"),
    ],
)
def test_a_crash_is_told_with_its_place(tmp_path, first, main, code, expected):
    (tmp_path / "crash-0.txt").write_text(ABORTED.format(first=first, main=main))
    calls = [entry("3", 4, created=1), entry("3", 5, "started", size=(1,), created=2)]
    write(tmp_path, {1: calls}, [state(1, world=2)])
    text = sentence(tmp_path, exits={0: code}, crashes=read_crashes(tmp_path))
    assert text.startswith(expected)


def test_an_error_is_placed_where_its_cause_was_raised():
    def allocate():
        raise MemoryError("70 TB")

    outer = UserError("out of memory")
    with pytest.raises(MemoryError) as raised:
        allocate()
    outer.__cause__ = raised.value
    assert hang_watch._error(outer)["frames"][0][2].endswith("allocate")


def test_an_error_of_all_ranks_is_nobodys(tmp_path):
    error = {"type": "NonFiniteError", "text": "step 7: loss nan.", "frames": [], "cause": True}
    states = [state(rank, error=error | {"on_all_ranks": True}) for rank in (2, 3)]
    write(tmp_path, {}, states)
    assert sentence(tmp_path) == "step 7: loss nan"


class Noting(Callback):
    def before_update(self, run):
        self.activity = activity.current().activity


def test_a_callback_is_an_activity():
    callback = Noting()
    before = activity.current().activity
    Engine.notify(SimpleNamespace(callbacks=[callback]), "before_update")
    assert callback.activity == "calling before_update of Noting"
    assert activity.current().activity == before


def test_a_busy_store_is_not_gone():
    """A rank that only looks hung ends itself when the store is gone."""
    watch = object.__new__(hang_watch.Watch)
    watch._store_is_down = False
    for error in (dist.DistStoreError("wait timeout after 10000ms"), dist.DistNetworkError("")):
        assert not watch._store_is_down
        assert watch._on_store(mock.Mock(side_effect=error)) is None
    assert watch._store_is_down


def test_a_method_set_on_a_callback_is_called():
    calls = []
    callback = Callback()
    callback.before_update = calls.append
    callback.state_dict = lambda: {"seen": len(calls)}
    engine = SimpleNamespace(callbacks=[callback, Callback()])
    Engine.notify(engine, "before_update")
    assert calls == [engine]
    assert CallbackStates(engine.callbacks).state_dict() == {"Callback": {"seen": 1}}


def test_an_abort_without_any_python_is_explained_by_its_dump(tmp_path):
    """As NCCL's watchdog ends a rank. A hang of an earlier attempt left a state here."""
    config = resolve([f"--job.dump_folder={tmp_path}"], 2).config
    folder = tmp_path / config.comm.save_traces_folder
    folder.mkdir()
    write(folder, {}, [state(rank) for rank in range(4)])
    written = {}
    for rank, entries in enumerate(([entry("3", 4, "started")], [entry("3", 3)])):
        dump = {"version": "2.10", "pg_config": groups(rank), "entries": entries}
        written[str(folder / f"rank_{rank}")] = pickle.dumps(dump)
    child = (
        "import os, pathlib\n"
        f"for path, dump in {written!r}.items(): pathlib.Path(path).write_bytes(dump)\n"
        "os.abort()"
    )
    ended = subprocess.run([sys.executable, "-c", child], check=False)

    def cause(timestamp):
        failure = SimpleNamespace(exitcode=ended.returncode, pid=1, timestamp=timestamp)
        return torchrun._cause(config, 0, {0: failure})

    assert cause(time.time()).startswith("rank 1 did not enter all_reduce #4 of ")
    assert cause(time.time()).endswith("(rank 0 was killed by SIGABRT)")
    assert cause(time.time() + 1000) == "rank 0 was killed by SIGABRT"  # another attempt's dump
