"""Compiling: once, safely, and with a plain answer where it is impossible."""

import logging
import multiprocessing
import subprocess
import sys
import textwrap

import pytest

from pagestream.kernels.cpu import build
from pagestream.kernels.cpu.ops import load_ops


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pagestream"


def test_two_processes_may_build_at_once_and_a_third_compiles_nothing(empty_cache, monkeypatch):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        paths = pool.map(build.build, ["native", "native"])
    assert paths[0] == paths[1]
    assert [path.name for path in empty_cache.iterdir()] == [paths[0].name]

    def only_version(command, *args, run=build.subprocess.run, **options):
        assert not any(word.endswith(".cpp") for word in command), f"compiled again: {command}"
        return run(command, *args, **options)

    monkeypatch.setattr(build.subprocess, "run", only_version)
    assert build.build() == paths[0]


def test_variants_of_a_build_are_kept_apart():
    assert build.cache_key(["c++"], ("-O3",)) != build.cache_key(["c++"], ("-O3", "-DPS_NO_AMX"))
    assert build.cache_key(["c++"], ("-O3",)) != build.cache_key(["c++", "-m64"], ("-O3",))


def test_without_a_compiler_there_are_no_ops(empty_cache, monkeypatch, caplog):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert load_ops() is None
    assert "no C++ compiler found" in caplog.text


@pytest.mark.parametrize("asked", ["/nope", "nowhere g++", "g++ 'cut off"])
def test_a_compiler_asked_for_that_is_none_is_not_replaced_by_another(empty_cache, monkeypatch, caplog, asked):
    monkeypatch.setenv("CXX", asked)
    with caplog.at_level(logging.WARNING):
        assert load_ops() is None
    assert "CXX is" in caplog.text
    assert not empty_cache.exists()


def test_a_compiler_may_come_with_a_launcher_and_options(monkeypatch):
    (usual,) = build.find_compiler()
    env = build.shutil.which("env")
    monkeypatch.setenv("CXX", f"env {usual} -m64")
    assert build.find_compiler() == [env, usual, "-m64"]
    monkeypatch.setenv("CXX", " ")
    assert build.find_compiler() == [usual]


def test_fewer_threads_serve_where_the_system_starts_no_more():
    """In a process of its own, with no addresses left for many stacks."""
    code = """
        import resource, torch
        from pagestream.kernels.cpu.ops import load_ops
        torch.set_num_threads(1)  # its own could not be started either
        weight, x = torch.randn(320, 64), torch.randn(200, 64)
        expected = load_ops(1).linear(weight)(x)
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20),) * 2)
        ops = load_ops(1000)
        assert torch.equal(ops.linear(weight)(x), expected)
        print(ops.threads)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    assert 1 <= int(run.stdout) < 1000
    assert "of 1000 threads" in run.stderr


def test_refusal_of_the_compiler_is_told(empty_cache, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert load_ops(march="no-such-processor") is None
    assert "no-such-processor" in caplog.text
    assert list(empty_cache.iterdir()) == []


def test_library_that_does_not_run_here_is_told(empty_cache, monkeypatch):
    class Refusing:
        def ps_init(self) -> int:
            return 1

    monkeypatch.setattr(build, "build", lambda march, defines: empty_cache)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: Refusing())
    with pytest.raises(build.BuildFailed, match="do not run"):
        build.load()
