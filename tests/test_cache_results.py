"""Programs, merges and certificates that an earlier process has made: found, refused, and made once more."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest
import torch

import eqfuse as eq
from eqfuse import compiler, results
from eqfuse.cache import entries, sources
from eqfuse.cache.files import keep_whole, read_whole
from eqfuse.cli import main
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.extend.define import forget
from eqfuse.rules.egraph import client
from eqfuse.tile.triton.launch import source_file

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
SUM = "y[i] = sum[j](2 * x[i,j])"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("EQFUSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "eqfuse"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each e-graph that is opened, and with each process that is started for one."""
    found: list[int] = []
    taken, started = client._taken, client.start

    def take() -> client.Graphs:
        found.append(1)
        return taken()

    def start() -> None:
        found.append(1)
        started()

    monkeypatch.setattr(client, "_taken", take)
    monkeypatch.setattr(client, "start", start)
    return found


def files(home: Path) -> list[Path]:
    return sorted(path for kind in results.KINDS for path in (home / kind).glob("*") if path.is_file())


def is_right(kernel: eq.Kernel) -> bool:
    x = torch.randn(3, 70)
    return torch.allclose(kernel(x=x), torch.softmax(x, 1), atol=1e-6)


def test_a_hit_opens_no_e_graph(home: Path, opened: list[int]) -> None:
    first = eq.compile(SOFTMAX)
    assert opened and not first.certificate.cached
    before = files(home)
    assert {path.parent.name for path in before} == {*results.KINDS} - {
        "reached",
        "priced",
        "differentiated",
    }  # nothing was called
    opened.clear()
    second = eq.compile(SOFTMAX)
    assert not opened
    assert second.certificate.cached and second.certificate.ok
    assert "by an earlier process" in str(second.certificate)
    assert str(second.merge) == str(first.merge) and second.rule_counts == first.rule_counts
    assert str(second.loops) == str(first.loops) and second.plan == first.plan
    assert files(home) == before
    assert is_right(second)


@pytest.mark.slow
def test_a_hit_loads_neither_egglog_nor_the_verifier(home: Path) -> None:
    code = f"""
import sys, eqfuse as eq
from eqfuse.rules.egraph import client
from eqfuse.tile.triton.launch import source_file
kernel = eq.compile({SOFTMAX!r})
late = [name for name in ("egglog", "sympy", "eqfuse.rules.merge_search", "eqfuse.verify.verification") if name in sys.modules]
print(kernel.certificate.cached, *client.processes(), *late)
"""
    eq.compile(SOFTMAX)
    assert run(code) == ["True"]


def run(code: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_how_a_program_is_written_does_not_matter(home: Path, opened: list[int]) -> None:
    eq.compile(SOFTMAX)
    opened.clear()
    eq.compile("# the same\nm[i] = max[j](x[i,j])\ny[i,j] = exp(x[i,j]-m[i]) / sum[j](exp(x[i,j] - m[i]))")
    assert not opened


@pytest.mark.parametrize(
    "other",
    [
        lambda: eq.compile(SOFTMAX.replace("exp(x[i,j] - ", "exp(2 * x[i,j] - ")),
        lambda: eq.compile(SOFTMAX, strict_casts=True),
        lambda: eq.compile(SOFTMAX, assume_finite=True),
    ],
)
def test_other_programs_and_options_miss(
    home: Path, opened: list[int], other: Callable[[], eq.Kernel]
) -> None:
    eq.compile(SOFTMAX)
    before = len(files(home))
    opened.clear()
    assert not other().certificate.cached
    assert opened
    assert len(files(home)) > before


def test_checks_are_part_of_a_certificate(home: Path) -> None:
    eq.compile(SOFTMAX)
    assert not eq.compile(SOFTMAX, trials=20).certificate.cached
    assert not eq.compile(SOFTMAX, bound=1e-30).certificate.cached
    assert not eq.compile(SOFTMAX, target="sm_90").certificate.cached
    assert eq.compile(SOFTMAX, trials=20).certificate.cached


def test_scalars_that_are_known_now_are_part_of_a_program(home: Path) -> None:
    source = "y[i] = sum[j](a * x[i,j])"
    eq.compile(source, scalars={"a": 2})
    assert not eq.compile(source, scalars={"a": 3}).certificate.cached
    assert eq.compile(source, scalars={"a": 2}).certificate.cached


def test_other_rules_miss(home: Path, opened: list[int]) -> None:
    eq.compile(SUM)
    mine = eq.rule("twice", "a + a", "2 * a", why="addition")
    theirs = eq.rule("twice", "a + a", "a * 2", why="addition")
    for scope in (lambda: eq.rules(mine), lambda: eq.rules(theirs), lambda: eq.rules(without=["hoist"])):
        for is_hit in (False, True):
            opened.clear()
            with scope():
                kernel = eq.compile(SUM)
            assert kernel.certificate.ok
            assert is_hit == (not opened)


@pytest.mark.slow
def test_other_reductions_of_one_name_miss(home: Path) -> None:
    def kernel(combine: str) -> eq.Kernel:
        eq.reduction(
            "farthest", state="v", lift="abs(x)", identity="0", combine=combine, result="v", commutative=True
        )
        try:
            return eq.compile("y[i] = farthest[j](x[i,j])")
        finally:
            forget("farthest")

    assert not kernel("max(v1, v2)").certificate.cached
    assert kernel("max(v1, v2)").certificate.cached
    assert not kernel("v1 + v2").certificate.cached


def test_a_derivation_is_recorded_when_it_is_asked_for(home: Path, opened: list[int]) -> None:
    eq.compile(SOFTMAX)
    opened.clear()
    kernel = eq.compile(SOFTMAX)
    assert not opened
    assert kernel.derivation.check().ok
    assert opened


def test_what_is_not_fused_is_said_of_a_kept_plan(home: Path) -> None:
    source = "m[i] = max[j](x[i,j])\ns[i] = sum[j](sin(x[i,j] - m[i]))"
    first, second = (eq.compile(source, verify=False) for _ in range(2))
    assert "is not fused" in first.why_not()[0] and second.why_not() == first.why_not()


def test_again_runs_the_trials(home: Path) -> None:
    eq.compile(SOFTMAX)
    again = eq.compile(SOFTMAX, verify="again").certificate
    assert again.ok and not again.cached
    assert eq.compile(SOFTMAX, verify=False).certificate.cached
    with pytest.raises(EqfuseError, match="verify is 'never'"):
        eq.compile(SOFTMAX, verify="never")  # type: ignore[arg-type]


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Somebody who seals what they have changed."""

    def damage(path: Path) -> None:
        content = json.loads(read_whole(path) or "")
        change(content)
        keep_whole(path, json.dumps(content).encode())

    return damage


def _foreign_class(content: dict[str, Any]) -> None:
    """A value that is made of what no entry holds."""
    content["value"] = {"rows": [["Popen", "true"]], "root": {"node": 0}}


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_text(""),
    "half": lambda path: path.write_text(path.read_text()[: path.stat().st_size // 2]),
    "no JSON": lambda path: keep_whole(path, b"{"),
    "nested": lambda path: keep_whole(path, b"[" * 100_000),
    "a list": lambda path: keep_whole(path, b"[]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a folder": lambda path: (path.unlink(), path.mkdir())[0],
    "one letter": lambda path: path.write_text(path.read_text().replace('"egglog": "', '"egglog": "9', 1)),
    "no digest": lambda path: path.write_bytes(read_whole(path) or b""),
    "no key": _changed(lambda content: content.pop("key")),
    "another value": _changed(lambda content: content["value"]["rows"].pop()),
    "another key": _changed(lambda content: content["key"].update(python="2.7")),
    "a foreign class": _changed(_foreign_class),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.slow(but=["half", "no JSON", "no digest", "another key"])
def test_damage_is_a_miss(damage: str, home: Path, opened: list[int]) -> None:
    text = str(eq.compile(SOFTMAX).merge)
    for path in files(home):
        DAMAGES[damage](path)
    opened.clear()
    kernel = eq.compile(SOFTMAX)
    assert opened and not kernel.certificate.cached
    assert str(kernel.merge) == text
    assert is_right(kernel)
    assert eq.compile(SOFTMAX).certificate.cached  # what was damaged is written anew


def test_another_egglog_misses_and_none_serves(
    home: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eq.compile(SOFTMAX)
    opened.clear()
    monkeypatch.setattr(results, "egglog_here", lambda: None)
    assert eq.compile(SOFTMAX).certificate.cached and not opened
    monkeypatch.setattr(results, "egglog_here", lambda: "0.1")
    assert not eq.compile(SOFTMAX).certificate.cached and opened


def test_another_source_of_eqfuse_misses(
    home: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eq.compile(SOFTMAX)
    opened.clear()
    monkeypatch.setattr(results, "source_digest", lambda: "another")
    assert not eq.compile(SOFTMAX).certificate.cached and opened


def test_the_digest_is_of_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(files: dict[str, str]) -> str:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return results.source_digest.__wrapped__()

    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    first = digest({"results.py": "a = 1", "inner/b.py": "b = 2"})
    assert digest({"notes.txt": "no source"}) == first == digest({"inner/b.py": "b = 2"})
    assert len({first, digest({"inner/b.py": "b = 3"}), digest({"inner/c.py": ""})}) == 3


def test_sources_are_read_again_where_one_was_touched(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "package", []
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.py").write_text("a = 1")
    original = sources.read_all

    def read_all(path: str) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(sources, "read_all", read_all)
    first = sources.digest_of(str(folder))
    assert sources.digest_of(str(folder)) == first and len(read) == 2  # just written: not remembered yet
    monkeypatch.setattr(sources, "SETTLED", -1.0)
    assert [sources.digest_of(str(folder)) for _ in range(3)] == [first] * 3 and len(read) == 3
    (entry,) = (home / "sources").iterdir()
    entry.write_text(entry.read_text().replace(first, first[::-1]))
    assert sources.digest_of(str(folder)) == first and len(read) == 4
    (folder / "inner" / "a.py").write_text("a = 10")
    assert sources.digest_of(str(folder)) not in (first, first[::-1]) and len(read) == 5


def test_off_keeps_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_CACHE", "off")
    assert not eq.compile(SOFTMAX).certificate.cached
    assert not home.exists()


@pytest.mark.parametrize("where", ["a file", "nowhere"])
def test_a_home_that_takes_nothing_is_no_error(
    where: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "a file":
        home.write_text("")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def nobody() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", nobody)
    assert is_right(eq.compile(SOFTMAX))
    assert not eq.compile(SOFTMAX).certificate.cached


def test_a_packed_folder_serves_and_is_only_read(
    home: Path,
    tmp_path: Path,
    opened: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    eq.compile(SOFTMAX)
    eq.compile(SUM)
    packed = tmp_path / "packed"
    files(home)[0].write_text("damaged")
    assert main(["cache", "pack", str(packed)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{len(files(home)) - 1} entries in" in shown and "; 1 that no process here would use" in shown
    eq.compile(SOFTMAX)
    eq.compile(SUM)
    assert main(["cache", "pack", str(packed)]) == 0
    before = {path: path.read_bytes() for path in files(packed)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("EQFUSE_CACHE_PATH", os.pathsep.join([str(tmp_path / "not there"), str(packed)]))
    monkeypatch.setattr(results, "egglog_here", lambda: None)
    opened.clear()
    assert eq.compile(SOFTMAX).certificate.cached and eq.compile(SUM).certificate.cached
    assert not opened
    assert {path: path.read_bytes() for path in files(packed)} == before
    assert not files(tmp_path / "other" / "eqfuse")


def test_entries_are_made_once_more(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eq.compile(SOFTMAX)
    count = len(files(home))
    assert main(["cache", "verify"]) == 0
    assert f"{count} entries made once more and right, 0 wrong, 0 unused" in capsys.readouterr().out
    (merged,) = (home / "merged").iterdir()
    _changed(_swapped_sum)(merged)
    (rewritten,) = (home / "rewritten").iterdir()
    keep_whole(rewritten, b"{")
    assert main(["cache", "verify"]) == 1
    shown = capsys.readouterr().out
    assert f"WRONG {merged}: another merge is derived" in shown
    assert f"unused {rewritten}: it is not JSON" in shown
    assert f"{count - 2} entries made once more and right, 1 wrong, 1 unused" in shown


def test_other_files_are_as_they_were_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries.keep("tuned", {"program": ""}, {})
    entries.keep("binaries", {"program": ""}, {})
    keep_whole(home / "native" / "a.so", b"code")
    module = source_file("# a module\n")
    assert main(["cache", "verify"]) == 0
    assert "0 unused; 4 other files as they were kept" in capsys.readouterr().out
    (home / "native" / "a.so").chmod(0o666)
    (tuned,) = (home / "tuned").iterdir()
    tuned.write_bytes(tuned.read_bytes()[1:])
    module.write_text("# another")
    (home / "binaries" / "a").mkdir()
    assert main(["cache", "verify"]) == 0
    shown = capsys.readouterr().out
    assert "a.so: others can write to it (mode 0666)" in shown and "digest is not that" in shown
    assert f"{module}: its text is another one" in shown and "a: it is not a plain file" in shown
    assert "4 unused; 1 other files" in shown
    assert main(["cache", "clear"]) == 0 and not [path for path in home.rglob("*") if not path.is_dir()]


def _swapped_sum(content: dict[str, Any]) -> None:
    """Somebody seals a merge that is wrong: its sums become products."""
    for row in content["value"]["rows"]:
        if row[:2] == ["Call", "add"]:
            row[1] = "mul"


def test_a_wrong_merge_is_not_covered_by_the_certificate_of_the_right_one(home: Path) -> None:
    source = "y[i] = sum[j](x[i,j] * exp(x[i,j] - max[j](x[i,j])))"
    eq.compile(source, prefer="rolling")
    for path in (home / "merged").iterdir():
        _changed(_swapped_sum)(path)
    (planned,) = (home / "planned").iterdir()
    planned.unlink()
    with pytest.raises(VerificationError):
        eq.compile(source, prefer="rolling")


def test_a_wrong_plan_is_not_covered_by_the_certificate_of_the_right_one(home: Path) -> None:
    source = "y[i] = sum[j](x[i,j] * exp(x[i,j] - max[j](x[i,j])))"
    eq.compile(source, prefer="rolling")
    (planned,) = (home / "planned").iterdir()
    _changed(_swapped_sum)(planned)
    with pytest.raises(VerificationError):
        eq.compile(source, prefer="rolling")


def test_a_kept_plan_is_that_which_is_chosen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 5000)
    first = eq.compile(SOFTMAX, native="off")
    first(x=x)
    chosen: list[object] = []
    choose = compiler.choose

    def counted(*args: Any) -> Any:
        chosen.append(args)
        return choose(*args)

    monkeypatch.setattr(compiler, "choose", counted)
    second = eq.compile(SOFTMAX, native="off")
    assert torch.equal(second(x=x), first(x=x))
    assert second.plan == first.plan and second.loops == first.loops and second.tile == first.tile
    assert not chosen
    assert [plan.schedule for plan in second.plans()] == [plan.schedule for plan in first.plans()]
    assert len(chosen) == 1
    assert copy.copy(second).plans() == first.plans()
    assert second.explain() == first.explain() and second.why_not() == first.why_not()


@pytest.mark.slow
def test_processes_that_write_at_once(home: Path) -> None:
    code = f"import eqfuse as eq; print(eq.compile({SOFTMAX!r}).certificate.ok)"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [process.communicate()[0].split() for process in started] == [["True"]] * 4
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert sorted(kept) == sorted(path for kind in entries.KINDS for path in (home / kind).glob("*.json"))
    assert all(entries.read_file(path) is not None for path in kept)  # nothing half is left
    found = Counter(path.parent.name for path in files(home))  # all have written to the same files
    assert found == dict.fromkeys({*results.KINDS} - {"reached", "priced", "differentiated"}, 1)
    assert eq.compile(SOFTMAX).certificate.cached


@pytest.mark.slow
def test_killed_processes_leave_a_cache_that_serves() -> None:
    """Ten processes at once, half of them killed, files damaged in between; `bench cache` does it 1000 times."""
    root = Path(__file__).parent.parent
    words = [sys.executable, "-m", "bench.killed", "24", "0", "45"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["faults"] == [] and found["killed"] and found["made"] and found["cached"]


@pytest.mark.slow
@needs.cxx
def test_hostile_edits_of_a_cache_decide_nothing() -> None:
    """Files and folders are cut, exchanged, linked, given away; `bench cache` makes 1000 such edits."""
    words = [sys.executable, "-W", "ignore", "-m", "bench.hostile", "40", "0"]
    root = Path(__file__).parent.parent
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["faults"] == [] and found["edits"] == 40 and found["made"] and found["cached"]
