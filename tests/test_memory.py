"""Large pages: asked for once, where the kernel leaves it to the program."""

import os
import sys

import pytest

from anypo import cli
from anypo.engines import memory


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What the process was replaced by, on a Linux whose kernel says what the test writes."""
    calls = []
    monkeypatch.setattr(memory, "SYSTEM_SETTING", tmp_path / "enabled")
    memory.SYSTEM_SETTING.write_text("always [madvise] never\n")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "anypo", "train", "grpo"])
    monkeypatch.setattr(os, "execv", lambda program, arguments: calls.append((program, arguments)))
    monkeypatch.delenv(memory.TUNABLES, raising=False)
    monkeypatch.setattr(cli, "main", lambda: None)
    yield calls
    os.environ.pop(memory.TUNABLES, None)


@pytest.mark.parametrize("arguments", [["train", "grpo"], ["--debug", "reproduce", "grpo"]])
def test_a_command_that_computes_starts_again_as_it_was_started(started, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["anypo", *arguments])
    cli.command()
    assert started == [(sys.executable, [sys.executable, "-X", "dev", "anypo", "train", "grpo"])]
    assert os.environ[memory.TUNABLES] == "glibc.malloc.hugetlb=1"
    cli.command()  # the second time it goes on
    assert len(started) == 1


def test_a_command_that_only_reads_does_not(started, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anypo", "list"])
    cli.command()
    assert not started


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_nor_where_the_kernel_decides_alone(started, monkeypatch, setting):
    monkeypatch.setattr(sys, "argv", ["anypo", "train", "grpo"])
    memory.SYSTEM_SETTING.unlink() if setting is None else memory.SYSTEM_SETTING.write_text(setting)
    cli.command()
    monkeypatch.setattr(sys, "platform", "darwin")
    cli.command()
    assert not started


def test_nor_where_the_user_has_spoken(started, monkeypatch):
    monkeypatch.setenv(memory.TUNABLES, "glibc.malloc.arena_max=2")
    monkeypatch.setattr(sys, "argv", ["anypo", "train", "grpo"])
    cli.command()
    assert not started
