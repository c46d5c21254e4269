"""The GPU benchmark on the CPU: every stage, its runner, its tables, and the wheels it bundles."""

import importlib
import json
import os
import re
import struct
import subprocess
import sys
import time
import zipfile
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.rehearsal.fake import fake_cluster

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks/gpu"))
bench, expected, fakes, load, rates, speeds, stages, tables, gpu, gpu_wheels = map(
    importlib.import_module,
    (
        *("_gpu_bench", "_gpu_expected", "_gpu_fake", "_gpu_load", "_gpu_rates", "_gpu_speed"),
        *("_gpu_stages", "_gpu_tables", "gpu", "gpu_wheels"),
    ),
)

SOME = "70b_of_64"
"""It trains on a fake process group. The rest are in the longest tier."""


@pytest.mark.e2e
@pytest.mark.parametrize(
    "names", [SOME, pytest.param("*", marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_dry_run(tmp_path, names):
    """Every stage has figures, within the limits that a GPU has to keep."""
    command = [
        sys.executable,
        "benchmarks/gpu/gpu.py",
        "--dry-run",
        f"--out={tmp_path}",
        f"--stages={names}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == [stage.name for stage in gpu.chosen(names)]
    for line in lines:
        assert line["ok"], line
        assert line["figures"]
        assert (line["dry"], line["machine"]["device"]) == (True, "CPU")
    figures = {line["stage"]: line["figures"] for line in lines}
    speed = figures["70b_of_64"]
    assert speed["tokens_per_second"] * speed["step_s"] == pytest.approx(
        4 * 64 / 8
    )  # local rows x length / tp
    assert speed["kernels"]
    assert speed["step_s_min"] <= speed["step_s"] <= speed["step_s_max"]
    assert 0 < speed["update_ms"] < 1e3 * speed["step_s"]
    assert speed["upper_bound"]
    assert not speed["skipped_steps"]
    if names == "*":
        assert figures["groups"]["recorded"] >= 2
    with zipfile.ZipFile(tmp_path / "details.zip") as archive:
        assert "70b_of_64/trace.json.gz" in archive.namelist()


def test_collectives_of_the_fake_group_copy():
    """Their outputs are defined in every release of torch, and zero where nothing arrives."""
    rows = torch.arange(8.0).view(4, 2) + 1
    with fake_cluster(4, 0), fakes.copying_collectives():
        world = dist.group.WORLD
        more, fewer = ([2, 2, 1, 1], [1, 0, 0, 0])
        exchanged = [funcol.all_to_all_single(rows, n, [1] * 4, world) for n in (more, fewer)]
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(rows, "sum", 4, world.group_name)
        into = torch.full((2,), torch.nan)
        dist.reduce_scatter_tensor(into, rows.flatten(), async_op=True).wait()
        assert torch.equal(exchanged[0], torch.cat([rows, torch.zeros(2, 2)]))
        assert torch.equal(exchanged[1], rows[:1])
        assert torch.equal(reduced, rows[:1])
        assert torch.equal(into, rows[0])


# ---- the runner


def _hang(_):
    pid = os.fork()
    if pid == 0:
        time.sleep(100)
    os.write(1, f"before the end\nstarted {pid}\n".encode())
    time.sleep(100)


def _fail(_):
    raise ValueError("the first line\nthe last line")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("run", "line"),
    [
        (lambda _: {"a": 1}, {"ok": True, "figures": {"a": 1}}),
        (_hang, {"ok": False, "error": "killed after 1 s"}),
        (_fail, {"ok": False, "error": "the last line"}),
        (lambda _: os._exit(3), {"ok": False, "error": "ended with exit status 3"}),
        (lambda _: bench.within({"x": 2.0}, {"x": 1}), {"ok": False, "error": "x is 2, beyond 1"}),
        (
            lambda _: bench.within({"x": float("nan")}, {"x": 1}),
            {"ok": False, "error": "x is nan, beyond 1"},
        ),
    ],
    ids=["figures", "hang", "fail", "exit", "beyond", "nan"],
)
def test_a_stage_ends_in_one_line(tmp_path, monkeypatch, run, line):
    stage = stages.Stage("made", 60, run)
    monkeypatch.setitem(stages.STAGES, "made", stage)
    join = BaseProcess.join

    def join_once_it_hangs(process, seconds=None):
        deadline = time.monotonic() + 60
        log = tmp_path / "log.txt"
        while run is _hang and seconds and not (log.exists() and "started" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        join(process, seconds)

    monkeypatch.setattr(BaseProcess, "join", join_once_it_hangs)
    where = bench.Bench(True, tmp_path / "work", tmp_path / "kept", tmp_path)
    monkeypatch.setattr(gpu, "machine", dict)  # would import torch
    found = gpu.run_stage(stage, where, 1.0 if run is _hang else 60.0, tmp_path)
    assert found | line == found
    if run is _hang:
        assert found["tail"][0] == "before the end"
        started = Path("/proc", found["tail"][1].split()[1], "stat")
        deadline = time.monotonic() + 10
        while (
            started.exists()
            and started.read_text().split()[2] != "Z"
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert not started.exists() or started.read_text().split()[2] == "Z"


def test_an_unknown_stage_is_refused():
    with pytest.raises(SystemExit, match="no stage '9b'"):
        gpu.chosen("groups,9b")


# ---- the tables


def result(stage, **more):
    machine = {"device": "NVIDIA H200", "torch": "2.11.0"}
    made = {
        "stage": stage,
        "ok": True,
        "dry": False,
        "seconds": 1.0,
        "date": "2030-01-02T03:04:05+00:00",
    }
    return made | {"command": "python benchmarks/gpu/gpu.py --out x", "machine": machine} | more


def speed_result(stage, rate):
    model, _, variant = stage.partition("_float8")
    flags = [*speeds.MODELS[model], *speeds.VARIANTS[f"float8{variant}" if variant else ""]]
    figures = {
        "flags": flags,
        "world": 1,
        "tokens_per_second": rate,
        "mfu": 50.25,
        "peak_reserved_gib": 60.0,
        "upper_bound": False,
        "mfu_without_update": 54.5,
        "step_s": 0.5,
        "step_s_min": 0.25,
        "step_s_max": 1.0,
        "update_ms": 20.0,
        "head_flops_pct": 33.0,
        "alloc_retries": 0,
        "gpu": {
            "timed": {
                "samples": 2,
                "clocks.sm": [1200.0, 1300.0, 1400.0],
                "slowed_by": ["power limit"],
            }
        },
    }
    kernel = {"kernel": "gemm", "calls": 3, "ms": 2.0, "pct": 61.0}
    kinds = {"products": 300.0, "copies": 120.0}
    figures |= {"skipped_steps": 0, "kernels": [kernel], "kernels_ms": kinds}
    return result(stage, figures=figures)


def test_tables(tmp_path):
    """Measured, planned and wanted stand side by side; nothing is left out, and a dry run never
    counts.
    """
    page = tmp_path / "page.md"
    file = tmp_path / "results.jsonl"
    page.write_text(f"before\n{tables.BEGIN}\n{tables.NOTHING}\n{tables.END}\nafter\n")
    lines = [
        speed_result("8b_layers_float8_rowwise", 15000.0),
        speed_result("8b_layers", 10000.0),
        result("ring", ok=False, error="out is 0.5", figures={"out": 0.5, "limits": {"out": 0.01}}),
        result("groups", figures={"split": "a | b"}),
        result("1b", dry=True, figures={"tokens_per_second": 1.0}),
        result("ranks_tp", ok=False, skipped="NCCL 2.28 refuses"),
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables.write_tables([file], page=page)
    text = page.read_text()
    assert text.startswith(
        f"before\n{tables.BEGIN}\n- 2030-01-02: NVIDIA H200, torch 2.11.0; `python "
        "benchmarks/gpu/gpu.py"
    )
    assert text.endswith(f"{tables.END}\nafter\n")
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    rows = {row[0]: row[1:] for row in cells if len(row) == 7}
    (shares,) = (row for row in cells if row[0] == "`8b_layers`" and len(row) == 9)
    assert re.fullmatch(r"300.0 \(7\d\d.\d\)", shares[3])
    assert shares[1].startswith("0.0 (")
    assert shares[-1].startswith("80.0 (")  # of half a second
    rate, planned, mfu, goal, memory, planned_memory = rows["`8b_layers`"]
    assert (rate, mfu, goal, memory) == ("10,000", "50.2", "55 %", "60.0")
    assert 5_000 < float(planned.replace(",", "")) < 50_000
    assert 45 < float(planned_memory) < 80
    assert rows["`8b_layers_float8_rowwise`"][3] == "1.50 x bf16, goal 1.35 x"
    assert "0.500 (0.250 to 1.000) | 20.0 | 54.5 | 33 | 1200 to 1400 of ?" in text
    assert "| power limit |" in text
    assert "| `ring` | out | 0.5 **beyond** | 0.01 |" in text
    assert "| `groups` | split a \\| b |" in text
    assert "| `ranks_tp` | NCCL 2.28 refuses |" in text
    assert "`1b`" not in text
    tables.write_tables([], page=page)
    assert page.read_text() == f"before\n{tables.BEGIN}\n{tables.NOTHING}\n{tables.END}\nafter\n"


def test_expected_tables_have_every_stage_that_trains():
    """`gpu.py --expected` prints them."""
    printed = tables.expected_tables()
    assert all(f"`{stage.name}`" in printed for stage in stages.STAGES.values() if stage.flags)
    assert "all-gather, GB/s" in printed
    for name in tables.LINE_BY_LINE:
        assert f"| a step of `{name}` |" in printed


@pytest.mark.parametrize(
    ("stage", "layers", "rows", "shards"), [("8b_layers", 8, 4, 1), ("8b_of_8", 32, 1, 8)]
)
def test_a_planned_step_line_by_line(stage, layers, rows, shards):
    """FLOPs and bytes of an 8B by hand, and seconds that add up to the plan's step."""
    hw = find_hardware("h100-sxm")
    flags, world = stages.STAGES[stage].flags, stages.STAGES[stage].world
    plan, faster = (tables._plan(flags, world, rates) for rates in (hw, expected.with_cudnn(hw)))
    lines = {line.name: line for line in expected.lines_of(plan)}
    assert sum(line.seconds for line in lines.values()) == pytest.approx(plan.time.seconds)
    assert all(line.seconds > 0 for line in lines.values())
    seq_len, d, kv, f, vocab = 8192, 4096, 1024, 14336, 128256
    matrices = 2 * d * d + 2 * d * kv + 3 * d * f
    head, tokens = d * vocab, rows * seq_len
    # norms and additions, rotations, attention, and the gate's product
    moved = 2 * (9 * d + 2 * (d + kv) + 2 * (d + kv) + 3 * f)
    mixed = 2 * seq_len * d  # half of 4 x length x width
    params = layers * (matrices + 2 * d) + 2 * head + d
    sizes = {
        "matrix products, forward": 2 * layers * tokens * matrices,
        "matrix products, backward": 4 * layers * tokens * matrices,
        "attention, forward": layers * tokens * mixed,
        "attention, backward": 2.5 * layers * tokens * mixed,
        "pointwise, forward": layers * tokens * moved,
        "pointwise, backward": 2 * layers * tokens * moved,
        "loss": 12 * tokens * vocab,
        "embedding": 3 * 2 * tokens * d,
        "head's matrix products, forward": 2 * tokens * head,
        "head's matrix products, backward": 4 * tokens * head,
        "optimizer": 40 * params / shards,
    }
    assert {name: lines[name].size for name in sizes} == pytest.approx(sizes)
    chunks = plan.config.training.loss_chunks
    assert {name: line.calls for name, line in lines.items() if line.calls} == {
        "matrix products, forward": 7 * layers * rows,
        "matrix products, backward": 14 * layers * rows,
        "attention, forward": layers * rows,
        "attention, backward": layers * rows,
        "head's matrix products, forward": chunks * rows,
        "head's matrix products, backward": 2 * chunks * rows,
    }
    assert expected.kinds_of(plan)["update"] == 1e3 * lines["optimizer"].seconds
    for line in expected.lines_of(faster):
        way = line.name.removeprefix("attention, ")
        if way in expected.CUDNN:
            assert line.size / line.seconds == pytest.approx(expected.CUDNN[way])
        else:
            assert line.seconds == pytest.approx(lines[line.name].seconds)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("triton_red_fused__fused_rms_norm_1", "pointwise, loss"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "update"),
        ("void at::native::multi_tensor_apply_kernel<CopyFunctor>", "copies"),
        ("ncclDevKernel_AllGather_RING_LL", "NCCL"),
        ("void at::native::embedding_backward_kernel", "other kernels"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert expected.kind_of(kernel) == kind


# ---- rates and load


def test_the_load_of_a_gpu_is_watched_to_the_end_of_the_body(tmp_path, monkeypatch):
    done = tmp_path / "done"
    busy = "1320, 1980, 699.5, 700.00, 71, 0x0000000000000004"
    idle = "345, 1980, 70.1, 700.00, 33, 0x0000000000000001"
    monkeypatch.setenv("PATH", str(tmp_path))
    with load.watch() as rows:
        pass
    assert load.summary(rows) == {"samples": 0, "slowed_by": []}
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho {idle}; echo {busy}; : > {done}; while :; do :; done\n")
    script.chmod(0o755)
    with load.watch() as rows:
        deadline = time.monotonic() + 30
        while not done.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    found = load.summary(rows)
    assert found["samples"] == 2
    assert found["clocks.sm"] == [345, 832.5, 1320]
    assert found["power.limit"] == 700
    assert found["slowed_by"] == ["power limit"]


MEASURE = rates.measure


def _damaged():
    """Be a rank; of an all-to-all, rank 1 spoils the end of what it receives."""
    exchange = dist.all_to_all_single

    def damage(out, source):
        exchange(out, source)
        out[-1] += dist.get_rank()

    dist.all_to_all_single = damage
    return MEASURE()


@pytest.mark.e2e
def test_rates_are_measured_and_collectives_checked(tmp_path, monkeypatch):
    here = bench.Bench(True, tmp_path, tmp_path, tmp_path)
    found = rates.rates(here, 2)
    assert found.keys() == {"bfloat16", "float32", "memory", *rates.COLLECTIVES}
    assert all(0 < value < float("inf") for value in found.values())
    monkeypatch.setattr(rates, "measure", _damaged)
    with pytest.raises(bench.Beyond, match="wrong numbers on rank 1: all-to-all"):
        rates.rates(here, 2)


def test_expected_rates():
    """By hand, from the constants of the table."""
    hw = find_hardware("h100-sxm")
    found = rates.expected_rates(hw, 8)
    start = (1 + 8192**2 / hw.gemm_ramp) * hw.gemm_start
    flops = 2 * (8192**3 + hw.gemm_ramp * min(8192, hw.gemm_split))
    for name, rate in {"bfloat16": 989e12 * hw.gemm_bf16, "float8": 1979e12 * hw.gemm_fp8}.items():
        assert found[name] == pytest.approx(2 * 8192**3 / (flops / rate + start))
    assert found["memory"] == pytest.approx(3.35e12 * 0.8)
    ring = 2**28 * 7 / 8
    link = 450e9 * hw.link_efficiency
    assert found["all-gather"] == pytest.approx(ring / (ring / link + hw.collective))
    assert set(rates.COLLECTIVES) < set(found)
    assert not set(rates.COLLECTIVES) & set(rates.expected_rates(hw, 1))
    assert "float8" not in rates.expected_rates(find_hardware("a100"), 8)


# ---- the wheels


def test_missing_and_older_packages_are_unpacked(tmp_path):
    for name in ("surely_missing-1.0", "numpy-0.1", "psutil-999.0"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}/__init__.py", "")
    target = gpu_wheels.unpack_missing(tmp_path, tmp_path / "made")
    assert sorted(path.name for path in target.iterdir()) == ["psutil", "surely_missing"]
    assert gpu_wheels.unpack_missing(tmp_path / "none", tmp_path / "other") is None


def test_wheels_are_pinned():
    pins = (ROOT / "requirements/run.txt").read_text()
    for name in gpu_wheels.PACKAGES:
        assert f"\n{name}==" in pins


def test_code_for_other_gpus_is_dropped():
    """Machine code of one architecture stays; other machine code and PTX become zeros of the same
    size.
    """

    def entry(kind, architecture, code):
        header = struct.pack("<HHIQ12xI", kind, 0, 64, len(code), architecture)
        return header.ljust(64, b"\0") + code

    entries = [entry(2, 80, b"old"), entry(2, 90, b"hopper"), entry(1, 90, b"ptx")]
    body = b"".join(entries)
    header = gpu_wheels.FAT_BINARY + struct.pack("<HHQ", 1, 16, len(body))
    library = bytearray(b"ELF" + gpu_wheels.FAT_BINARY + b"chance" * 4 + header + body + b"rest")
    before = bytes(library)
    assert gpu_wheels.keep_one_architecture(library, 90) == (6, 6)
    assert bytes(library) == before.replace(b"old", b"\0" * 3).replace(b"ptx", b"\0" * 3)
