"""A webhook on this machine that keeps what it is sent."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "T0K3N"


class Server:
    """Keeps what it is sent. Answers with the given statuses in turn, or never."""

    def __init__(self, *statuses, hangs=False):
        self.got = []
        self.statuses = list(statuses)
        self.ends = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
                if hangs:
                    server.ends.wait()
                self.send_response(server.statuses.pop(0) if server.statuses else 200)
                self.end_headers()

            def log_message(self, *arguments): ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/services/{SECRET}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.http.shutdown()
        self.http.server_close()
