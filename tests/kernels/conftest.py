"""Runs the kernel tests in processes of their own, and reports them here as if they had run in this one.

Triton decides at import whether a kernel is interpreted or compiled, so the two kinds of test cannot share a process:
- tests/kernels/test_*.py run under TRITON_INTERPRET=1, on CPU tensors, on every machine;
- tests/kernels/aot/test_*.py compile for GPUs that need not be there, with a fake driver that must not leak into other tests.
Each kind gets one child pytest for the whole session; both start at the first of these tests and run side by side.
`TRITON_INTERPRET=1 pytest tests/kernels/test_x.py --pdb` runs the first kind directly.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interpreter import accept_tensors_as_bounds

HERE = Path(__file__).parent
INTERPRETED, COMPILED = "interpreted", "compiled"
REPORT_FD = "PAGESTREAM_KERNEL_REPORTS"  # where a child writes its reports; set in children only
WORKERS = pytest.StashKey[dict[str, "Worker"]]()

if os.environ.get("TRITON_INTERPRET") == "1":
    accept_tensors_as_bounds()


class Worker:
    """One child pytest over all selected tests of one kind; its reports arrive in the order of the tests."""

    def __init__(self, kind: str, config: pytest.Config, node_ids: list[str]) -> None:
        read_fd, write_fd = os.pipe()
        env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {REPORT_FD: str(write_fd)}
        env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        if kind == INTERPRETED:
            env["TRITON_INTERPRET"] = "1"
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in close()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *node_ids]
        self.process = subprocess.Popen(
            command, cwd=config.rootpath, env=env, pass_fds=[write_fd], stdout=self.log, stderr=subprocess.STDOUT
        )
        os.close(write_fd)
        self.lines = os.fdopen(read_fd, encoding="utf-8")
        self.queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Read as they come: a child whose pipe is full would stand still until its tests are due here.
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.lines:
            self.queue.put(line)
        self.queue.put(None)

    def reports_of(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """The reports of one test up to its teardown; a failure with the child's output if the child died over it."""
        while (line := self.queue.get()) is not None:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=json.loads(line))
            assert report.nodeid == item.nodeid, f"the child reports {report.nodeid} where {item.nodeid} is due"
            yield report
            if report.when == "teardown":
                return
        self.queue.put(None)  # for the next test of a child that is gone
        self.process.wait()
        self.log.seek(0)
        tail = self.log.read().decode(errors="replace")[-4000:]
        why = f"the child process ended with {self.process.returncode} before this test did\n{tail}"
        yield pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self.reader.join()
        self.lines.close()
        self.log.close()


def kind_of(item: pytest.Item) -> str | None:
    """Which process a test needs; None: any, as for tests outside this folder and for the CPU's own ops."""
    if HERE not in item.path.parents or HERE / "cpu" in item.path.parents:
        return None
    return COMPILED if HERE / "aot" in item.path.parents else INTERPRETED


def is_at_home(kind: str | None) -> bool:
    if kind == INTERPRETED:
        return os.environ.get("TRITON_INTERPRET") == "1"
    return kind is None or REPORT_FD in os.environ


def start_workers(session: pytest.Session) -> dict[str, Worker]:
    wanted: dict[str, list[str]] = {}
    for item in session.items:
        kind = kind_of(item)
        if kind is not None and not is_at_home(kind):
            wanted.setdefault(kind, []).append(item.nodeid)
    return {kind: Worker(kind, session.config, node_ids) for kind, node_ids in wanted.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    kind = kind_of(item)
    if is_at_home(kind):
        return None
    assert kind is not None
    if WORKERS not in item.config.stash:
        item.config.stash[WORKERS] = start_workers(item.session)
    workers = item.config.stash[WORKERS]
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in workers[kind].reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The folders that an earlier test of this process has set up are left by whoever runs last in them, which may be this one.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a child: hand every report to the parent."""
    if REPORT_FD in os.environ:
        data: dict[str, Any] = report._to_json() | {"$report_type": "TestReport"}
        os.write(int(os.environ[REPORT_FD]), (json.dumps(data) + "\n").encode())


def pytest_sessionfinish(session: pytest.Session) -> None:
    for worker in session.config.stash.get(WORKERS, {}).values():
        worker.close()
