"""`examples/notify.py`, against a server on this machine."""

import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples import notify
from tests.runs import arguments, train
from torchtitan.config import resolve
from torchtitan.train.callbacks import Callback
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.logging import event, logger

NOTIFY = [f"--experimental.custom_import={notify.__name__}", "--training.callbacks=notify"]


@contextmanager
def webhook():
    """A server's URL, and the messages it gets."""
    texts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", texts
        server.shutdown()


class Eventful(Callback):
    """Logs two events in step 1 and fails in step 2."""

    def after_step(self, run, result):
        if run.progress.step == 2:
            raise ValueError("boom")
        logger.warning("loss 9 is a spike", extra=event("spike", 1))
        logger.info("saved", extra=event("saved", 1))


def failing(argv):
    with webhook() as (url, texts), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINING_WEBHOOK", url)
        config = resolve(argv, 1).config
        trainer = Trainer(config, preflight(config), callbacks=[Eventful()])
        with pytest.raises(ValueError, match="boom") as error:
            trainer.train()
        trainer.close(error.value)
        return texts


def unreachable(argv):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    train(argv)
    return lines


def test_start_events_and_failure_are_sent(ranks, tmp_path):
    (texts,) = ranks(1, failing, arguments(tmp_path, *NOTIFY, steps=3))
    assert sorted(texts) == [
        "out: failed: boom after step 2", "out: loss 9 is a spike", "out: started after step 0"
    ]  # fmt: skip


def test_without_a_webhook_the_run_trains(ranks, tmp_path):
    (lines,) = ranks(1, unreachable, arguments(tmp_path, *NOTIFY, steps=1))
    assert lines.count("notify: TRAINING_WEBHOOK: KeyError") == 2
