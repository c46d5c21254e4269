"""A byte order mark, which Windows' editors write: every file that people write or bring reads as
without it.
"""

import argparse
import os
import shutil

import pytest

from tests.chats import CHATML, CHATS, write_tokenizer
from tests.config_loading import load, problems
from tests.hf_folders import write_tiktoken
from tests.run_folders import write_run
from torchtitan.checkpoint.hf.tokenizer import write_tokenizer as export
from torchtitan.commands.generate import _prompts
from torchtitan.config import resolve
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.parallel.pipeline.schedules import schedule_file
from torchtitan.telemetry.history import History
from torchtitan.telemetry.trackers.jsonl import JsonlSink
from torchtitan.tools.launch.slurm_script import read_runs
from torchtitan.tools.planner.hardware import load_hardware
from torchtitan.tools.planner.measurements import read_run
from torchtitan.tools.reports.folder import read_folder
from torchtitan.utils.files import BOM, text_of
from torchtitan.utils.formats import read_json_object

TEXTS = {
    "base.toml": '[job]\ndescription = "ä"\n',
    "run.toml": 'extends = "base.toml"\n[training]\r\nsteps = 7\r\n',
    "runs.txt": "--training.steps 5\n",
    "prompts.txt": "Hello\r\n\r\nyou\u2028there\r\n",
    "schedule.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "config.json": '{"model_type": "llama"}',
    "metrics.jsonl": '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n',
}


def write_texts(folder):
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_bytes(text.encode())


def prompts(folder):
    return _prompts(argparse.Namespace(prompt=[], prompts_file=folder / "prompts.txt"))


def pipeline(folder):
    file = folder / "schedule.csv"
    flags = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]
    flags += [f"--parallelism.pipeline_parallel_schedule_csv={file}"]
    return schedule_file(resolve(flags, 2).config)


def later_steps_dropped(folder):
    JsonlSink(folder / "metrics.jsonl", History()).follow(1)
    return (folder / "metrics.jsonl").read_text()


def conversations(folder):
    chat = Chat(build_tokenizer(str(folder)), "key")
    return [chat.encode(chat.document(messages)).tolist() for messages in CHATS]


def exported(folder):
    out = folder / "out"
    out.mkdir()
    export(build_tokenizer(str(folder)), out, 64)
    return {file.name: file.read_bytes() for file in out.iterdir()}


def ids(folder):
    tokenizer = build_tokenizer(str(folder))
    return tokenizer.encode_document("Hello, ä"), tokenizer.vocab_size


def write_ranks(folder):
    folder.mkdir()
    write_tiktoken(folder)


def write_chat(folder):
    write_tokenizer(folder, CHATML)


def run(folder):
    found = read_folder(folder)
    return found.config, found.total_steps, found.state, found.starts


def write_hardware(folder):
    folder.mkdir()
    shutil.copy("torchtitan/tools/planner/hardware.toml", folder)


def write_finished(folder):
    write_run(folder, 60, config="[training]\nsteps = 60\n", rich=False)


def measured(folder):
    about = read_run(folder)
    return about.world, about.step_s


READERS = {
    "configuration": (write_texts, lambda folder: load("--config", str(folder / "run.toml"))),
    "lines of runs": (
        write_texts,
        lambda folder: [run.flags for run in read_runs(folder / "runs.txt", "out")],
    ),
    "prompts": (write_texts, prompts),
    "pipeline schedule": (write_texts, pipeline),
    "JSON": (write_texts, lambda folder: read_json_object(folder / "config.json")),
    "metrics to resume": (write_texts, later_steps_dropped),
    "hardware": (write_hardware, lambda folder: load_hardware(folder / "hardware.toml")),
    "tokenizer.json": (write_chat, ids),
    "chat template": (write_chat, conversations),
    "export": (write_chat, exported),
    "tiktoken": (write_ranks, ids),
    "run": (write_finished, run),
    "run beside a plan": (write_finished, measured),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_mark_is_read_over(tmp_path, reader):
    write, read = READERS[reader]
    write(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "marked", copy_function=shutil.copy2)
    for file in (tmp_path / "marked").iterdir():
        before = file.stat()
        file.write_bytes(BOM + file.read_bytes())
        os.utime(file, (before.st_atime, before.st_mtime))
    expected = repr(read(tmp_path / "plain")).replace("/plain", "/marked")
    assert repr(read(tmp_path / "marked")) == expected


def test_only_the_first_mark_is_one():
    assert text_of(BOM + BOM + b"a") == "\ufeffa"
    assert text_of(b"a" + BOM) == "a\ufeff"


def test_utf_16_is_named(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\n", encoding="utf-16")
    (problem,) = problems("--config", str(file))
    assert "it is UTF-16; save it as UTF-8" in problem
