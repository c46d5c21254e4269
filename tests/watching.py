"""What `torchtitan watch` answers, asked of its parts, over HTTP, or in a browser."""

import gzip
import http.client
import json


def report_of(live):
    content = json.loads(gzip.decompress(live.report()))
    return content["at"], content["report"]["runs"]


def updates(live, at):
    return json.loads(live.updates(at))


def ask(server, path="/", method="GET", host="localhost:1", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(method, path, headers={"Host": host} | headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def wait(tab, condition):
    tab.evaluate(
        f"(async () => {{ while (!({condition})) await new Promise(done => setTimeout(done, 20)); }})()"  # noqa: E501
    )
