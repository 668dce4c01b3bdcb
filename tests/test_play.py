"""The playground: who is answered, what is compiled, under which limits, and what a browser makes of the page."""

from __future__ import annotations

import html
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from test_explain_page import CHROMIUM, Tags, in_browser, needs_browser

from eqfuse.cli import main
from eqfuse.ops import CATALOGUE
from eqfuse.play.compilation import Compilation, Limits
from eqfuse.play.server import AT_ONCE, FIRST, LONGEST, Playground
from eqfuse.program_files import GALLERY, shipped

ROOT = Path(__file__).parent.parent
SOFTMAX = "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))"
LIMITS = Limits(120.0, 4 << 30)


def serving(limits: Limits) -> Iterator[Playground]:
    with Playground(FIRST, 0, limits) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Playground]:
    yield from serving(LIMITS)


def said(
    server: Playground, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """The status, headers and text of an answer. Headers are those of the page itself, unless given; an empty one is left out."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    given = {"host": server.hosts[0], "content-type": "application/json"}
    if body is not None:
        given["content-length"] = str(len(body))
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in given.items():
        for each in value.split("|") if value else ():
            connection.putheader(name, each)
    connection.endheaders(body)
    answer = connection.getresponse()
    try:
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def compiled(server: Playground, **request: str) -> dict[str, Any]:
    status, _, text = said(server, "POST", f"/{server.token}/compile", json.dumps(request).encode())
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


# The page ----------------------------------------------------------------------------------------


def test_the_page_is_self_contained_and_under_a_policy(server: Playground) -> None:
    status, headers, text = said(server, "GET", f"/{server.token}/")
    tags = Tags()
    tags.VOID = tags.VOID | {"input", "link"}  # type: ignore[misc]
    tags.feed(text)
    assert status == 200 and tags.open == [] and tags.references == ["data:,"]
    assert not re.search(r"https?:|@import|url\(|\sstyle=|\son\w+=", re.sub(r"<option.*", "", text))
    policy = headers["Content-Security-Policy"]
    (nonce,) = {*re.findall(r'nonce="([^"]+)"', text)}
    assert f"script-src 'nonce-{nonce}'" in policy and policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and server.token not in text
    assert nonce not in said(server, "GET", f"/{server.token}/")[2]


def test_the_page_has_the_program_and_all_that_ship(server: Playground) -> None:
    text = said(server, "GET", f"/{server.token}/")[2]
    assert html.escape(FIRST.strip()) in text and "<option>h200</option>" in text
    names = re.findall(r">([\w.]+)</option>\n", text)
    assert {path.stem for path in GALLERY.glob("*.eqf")} | {f"ops.{op.name}" for op in CATALOGUE} <= set(
        names
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_program_that_ships_compiles(name: str) -> None:
    from eqfuse.program_files import kernel_of

    kernel, _ = kernel_of(shipped()[name], "h200", {})
    assert kernel.certificate.ok


# Who is answered ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "path, headers",
    [
        ("/", {}),
        ("/compile", {}),
        ("/wrong/compile", {}),
        ("/%2e/{token}/", {}),
        ("/{token}x/", {}),
        ("/{token}/", {"host": ""}),
        ("/{token}/", {"host": "evil.example:{port}"}),
        ("/{token}/", {"host": "127.0.0.1"}),
        ("/{token}/", {"host": "127.0.0.1:{port}|127.0.0.1:{port}"}),
        ("/{token}/compile", {"origin": "http://evil.example"}),
        ("/{token}/compile", {"origin": "null"}),
        ("/{token}/compile", {"origin": "https://127.0.0.1:{port}"}),
        ("/{token}/compile", {"origin": "http://localhost:{port}"}),
    ],
)
def test_others_are_refused(server: Playground, method: str, path: str, headers: dict[str, str]) -> None:
    facts = {"token": server.token, "port": server.server_port}
    given = {name: value.format(**facts) for name, value in headers.items()}
    status, _, text = said(server, method, path.format(**facts), b"{}", **given)
    assert status == 403 and text.startswith("forbidden")


def test_the_page_itself_is_answered_under_both_names(server: Playground) -> None:
    for host in server.hosts:
        assert said(server, "GET", f"/{server.token}/", host=host, origin=f"http://{host}")[0] == 200
    assert server.server_address[0] == "127.0.0.1" and len(server.token) > 40


@pytest.mark.parametrize(
    "path", ["", "index.html", "../../../etc/passwd", "..%2f..%2fetc/passwd", "compile/"]
)
def test_no_file_is_given_out(server: Playground, path: str) -> None:
    for method in ("GET", "POST"):
        status = said(server, method, f"/{server.token}/{path}", b"{}")[0]
        assert status == (200 if path == "" and method == "GET" else 404)


@pytest.mark.parametrize(
    "body, headers, status",
    [
        (b"x" * (LONGEST + 1), {}, 413),
        (b"", {"content_length": str(10**12)}, 413),
        (None, {}, 411),
        (b"{}", {"content_length": "-1"}, 411),
        (b"{}", {"content_type": "text/plain"}, 415),
        (b"not json", {}, 400),
        (b"[" * 5000, {}, 400),
        (b"[]", {}, 400),
        (b"{}", {}, 400),
        (b'{"program": 3}', {}, 400),
        (b'{"program": "y[i] = x[i]", "output": "/tmp/x"}', {}, 400),
    ],
)
def test_requests_that_are_none(
    server: Playground, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    assert said(server, "POST", f"/{server.token}/compile", body, **headers)[0] == status


# What is compiled --------------------------------------------------------------------------------


def test_a_program_is_compiled_for_a_device_and_sizes(server: Playground) -> None:
    answer = compiled(server, program=SOFTMAX, device="h200", sizes="i=64, j=131072", schedule="rolling")
    text = answer["html"]
    assert answer["about"].startswith("rolling on h200: ") and "bounded" in answer["about"]
    assert re.findall("<h2>(.*?)</h2>", text) == [
        *("Merge", "Plans", "Loop nest", "Tile program", "Triton", "Derivation", "Certificate")
    ]
    assert "at i=64 j=131072 on h200" in text and "@triton.jit" in text and "<script" not in text
    assert '<span class="s0">max_j</span>' in text and "Checked: " in text


def test_a_program_for_the_cpu_has_its_source(server: Playground) -> None:
    text = compiled(server, program="# sizes: i=7 j=9\ny[i] = sum[j](x[i,j] * (x[i,j] < 3))")["html"]
    assert "<h2>C++</h2>" in text and "static void kernel0(" in text and "at i=7 j=9 on cpu" in text
    assert "x[i, j] &lt; 3" in text


@pytest.mark.parametrize(
    "request_, lines, line",
    [
        (
            {"program": "a[i] = 2 * w[i]\ny[i] = sum[j](x[i,j]) * expp(2)"},
            ["unknown function 'expp' (line 2)", "    y[i] = sum[j](x[i,j]) * expp(2)", f"{' ' * 28}^^^^"],
            2,
        ),
        ({"program": SOFTMAX, "device": "sm_1"}, ["unknown target 'sm_1'"], None),
        ({"program": SOFTMAX, "sizes": "i=much"}, ["--size 'i=much' is not a name and a number"], None),
        ({"program": SOFTMAX, "schedule": "none"}, ["unknown schedule 'none'"], None),
    ],
)
def test_an_error_is_told_as_the_command_tells_it(
    server: Playground, request_: dict[str, str], lines: list[str], line: int | None
) -> None:
    answer = compiled(server, **request_)
    assert answer["error"].splitlines()[: len(lines)] == lines and answer["line"] == line
    assert "html" not in answer


# Limits ------------------------------------------------------------------------------------------


def test_a_compilation_that_takes_too_long_is_ended() -> None:
    for server in serving(Limits(0.05, 4 << 30)):
        answer = compiled(server, program=SOFTMAX)
        assert answer["error"].startswith("stopped: it took longer than 0.05 seconds")


def test_a_compilation_that_needs_too_much_memory_is_ended() -> None:
    for server in serving(Limits(120.0, 1 << 20)):
        answer = compiled(server, program=SOFTMAX)
        assert re.search("more memory than 1048576|was ended by|ended with status", answer["error"])
        assert "html" not in answer


def asked(limits: Limits) -> tuple[Compilation, socket.socket, dict[str, Any]]:
    """A compilation of a program that takes seconds, its caller, and where its answer will be."""
    sums = (f"a{n}[i] = sum[j](exp(x[i,j] * {n + 1}) * max[j](x[i,j]))" for n in range(40))
    request = json.dumps({"program": "\n".join(sums), "device": "h200"}).encode()
    ours, theirs = socket.socketpair()
    compilation, found = Compilation(limits), dict[str, Any]()

    def run() -> None:
        found["answer"] = compilation.answer(request, theirs)
        theirs.close()

    found["thread"] = threading.Thread(target=run)
    found["thread"].start()
    return compilation, ours, found


def test_a_process_ends_with_its_time() -> None:
    compilation, ours, found = asked(Limits(1.0, 4 << 30))
    found["thread"].join()
    assert "took longer than 1 seconds" in found["answer"]["error"] and not compilation.is_alive
    ours.close()


def test_a_process_ends_with_its_caller() -> None:
    compilation, ours, found = asked(LIMITS)
    assert compilation.is_alive
    ours.close()
    found["thread"].join(20)
    assert found["answer"] is None and not compilation.is_alive


def test_several_are_compiled_at_once_and_no_more(server: Playground) -> None:
    answers: dict[int, dict[str, Any]] = {}

    def ask(number: int) -> None:
        answers[number] = compiled(server, program=f"y[i] = sum[j](x[i,j] * {number})")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 2 + AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"* {number}" in answers[number]["html"] for number in range(2, 2 + AT_ONCE))
    for _ in range(AT_ONCE):
        assert server.slots.acquire(blocking=False)
    path, body = f"/{server.token}/compile", json.dumps({"program": SOFTMAX}).encode()
    assert said(server, "POST", path, body)[0] == 503
    server.slots.release(AT_ONCE)
    assert said(server, "POST", path, body)[0] == 200


# The command -------------------------------------------------------------------------------------


def test_ctrl_c_ends_it_and_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "program.eqf"
    file.write_text("z[i] = min[j](x[i,j])\n")
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "eqfuse.cli", "play", str(file)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    assert process.stdout is not None
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/\n", process.stdout.readline())
    assert found is not None and "60 seconds and 4096 MB" in process.stdout.readline()
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", f"/{found[2]}/")
    assert "z[i] = min[j](x[i,j])" in connection.getresponse().read().decode()
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and process.stdout.read() == "ended\n"
    process.stdout.close()
    deadline = time.monotonic() + 10
    left = [int(pid) for pid in children.stdout.split()]
    assert left
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_a_port_that_is_taken(server: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "--port", str(server.server_port)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"port {server.server_port} cannot be had: ") and "--port" in text


@pytest.mark.parametrize(
    "option", ["--port=70000", "--port=x", "--seconds=0", "--seconds=nan", "--memory=-1"]
)
def test_options_that_are_none(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["play", option])
    assert "is no " in capsys.readouterr().err


# In a browser ------------------------------------------------------------------------------------


@needs_browser
@needs.address_space
@pytest.mark.slow
def test_a_browser_compiles_what_is_in_the_editor(server: Playground, tmp_path: Path) -> None:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=60000", "--dump-dom", server.address]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<h2>Merge</h2>" in found and re.search(r'<p id="status">\w+ on cpu', found)
    assert found.count('<div class="">') == FIRST.count("\n") + 1  # numbers of lines


@needs_browser
@needs.address_space
@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 1280])
def test_a_browser_lays_it_out_without_scrolling_sideways(
    server: Playground, tmp_path: Path, width: int
) -> None:
    made = compiled(server, program=SOFTMAX)["html"]
    page = server.page("").replace("></section>\n</div>\n</main>", f">{made}</section></div></main>")
    assert made in page
    seen, *_ = in_browser(tmp_path, re.sub(r"<script.*</script>", "", page, flags=re.DOTALL), width).split()
    assert int(seen) <= width
